"""The image encoder that is merged, and the heads that never are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    CLIPModel,
    CLIPVisionModelWithProjection,
    PreTrainedModel,
    ViTConfig,
    ViTModel,
)
from transformers.image_processing_base import ImageProcessingMixin
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

#: Short sentences with a class in them; a class's embedding is the mean of theirs. "{}" is the class.
TEMPLATES = {
    "cars": ("a photo of a {}.", "a photo of the {}.", "a photo of my {}."),
    "dtd": ("a photo of a {} texture.", "a photo of a {} pattern.", "a photo of a {} thing."),
    "eurosat": ("a centered satellite photo of {}.", "a centered satellite photo of a {}."),
    "gtsrb": ('a zoomed in photo of a "{}" traffic sign.', 'a close up photo of a "{}" traffic sign.'),
    "mnist": ('a photo of the number: "{}".',),
    "resisc45": ("satellite imagery of {}.", "aerial imagery of {}.", "a satellite photo of a {}."),
    "sun397": ("a photo of a {}.", "a photo of the {}."),
    "svhn": ('a photo of the number: "{}".',),
}


class Heads(nn.Module):
    """A linear classifier per task: logits of an example under its own task's head.

    Tasks have different numbers of classes: all have as many rows as the largest, and rows without a class count as −∞.
    """

    def __init__(self, classes: Sequence[int], width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(classes), max(classes), width))
        self.bias = nn.Parameter(torch.zeros(len(classes), max(classes)))
        nn.init.trunc_normal_(self.weight, std=width**-0.5)
        self.register_buffer("absent", torch.arange(max(classes)) >= torch.tensor(classes)[:, None])

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        logits = torch.einsum("bcd,bd->bc", self.weight[task], features) + self.bias[task]
        return logits.masked_fill(self.absent[task], torch.finfo(logits.dtype).min)


def enlarged(pixels: Tensor, side: int) -> Tensor:
    """Square images brought to another size as ``F.interpolate`` does (bicubic, antialias), by two products.

    The function itself takes as long on a GPU as a small encoder.
    """
    unit = torch.eye(pixels.shape[-1], device=pixels.device).view(1, 1, pixels.shape[-1], -1)
    # Rows of the identity enlarged along one side alone: what each new pixel takes from each old one.
    rule = F.interpolate(unit, (side, pixels.shape[-1]), mode="bicubic", antialias=True)[0, 0]
    return rule @ pixels @ rule.T


class Classifier(nn.Module):
    """Encoder and heads: from images as bytes to logits, or to a loss where labels are given."""

    def __init__(self, encoder: PreTrainedModel, heads: Heads) -> None:
        super().__init__()
        self.encoder, self.heads = encoder, heads
        self.enlarges = hasattr(encoder.config, "pixel_scaling")
        """The encoder was trained by others, on larger images than the tasks'."""
        clip = encoder.config.model_type == "clip_vision_model"
        scaling = {"mean": OPENAI_CLIP_MEAN, "std": OPENAI_CLIP_STD} if clip else {"mean": [0.5] * 3, "std": [0.5] * 3}
        for name, value in (scaling | getattr(encoder.config, "pixel_scaling", {})).items():
            self.register_buffer(name, torch.tensor(value).view(1, 3, 1, 1))

    def features(self, pixels: Tensor) -> Tensor:
        """What the heads are given."""
        pixels, side = pixels.float(), self.encoder.config.image_size
        if pixels.shape[-1] != side:
            pixels = enlarged(pixels, side).clamp(0, 255)
        output = self.encoder((pixels / 255 - self.mean) / self.std)
        if "image_embeds" in output:
            return F.normalize(output.image_embeds, dim=-1)
        return output.last_hidden_state[:, 0]

    def forward(self, pixels: Tensor, task: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.heads(self.features(pixels), task)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}

    def state(self) -> dict[str, Tensor]:
        """The weights that are merged, on the CPU."""
        return {n: p.detach().cpu().clone() for n, p in self.named_parameters() if n.startswith("encoder.")}

    def put(self, state: Mapping[str, Tensor]) -> None:
        """Other weights for the encoder."""
        own = {n: p for n, p in self.named_parameters() if n.startswith("encoder.")}
        if own.keys() != state.keys():
            raise ValueError(f"not the weights of this encoder: {min(own.keys() ^ state.keys())}")
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)


def new_classifier(config: Mapping[str, Any], classes: Sequence[int]) -> Classifier:
    """A vision transformer with random weights, and heads."""
    made = ViTConfig(**{"intermediate_size": 4 * config["hidden_size"], **config}, hidden_dropout_prob=0.0)
    return Classifier(ViTModel(made, add_pooling_layer=False), Heads(classes, made.hidden_size))


def clip_classifier(model: str, classes: Mapping[str, Sequence[str]]) -> Classifier:
    """The image encoder of a CLIP model, with its text embeddings of the classes as heads.

    Logits are s · cos(image, class). s is the model's own scale, and a class is the mean of its sentences' unit
    vectors, brought to length 1.
    """
    clip = CLIPModel.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = CLIPVisionModelWithProjection.from_pretrained(model, dtype=torch.float32)
    heads = Heads([len(names) for names in classes.values()], encoder.config.projection_dim)
    nn.init.zeros_(heads.weight)
    for number, (task, names) in enumerate(classes.items()):
        rows = torch.stack([_text_embedding(clip, tokenizer, name, TEMPLATES[task]) for name in names])
        with torch.no_grad():
            heads.weight[number, : len(names)] = clip.logit_scale.exp() * rows
    return Classifier(encoder, heads)


def pretrained_classifier(model: str, classes: Sequence[int]) -> Classifier:
    """A vision transformer that others trained, with heads that are still to be fitted."""
    encoder = ViTModel.from_pretrained(model, add_pooling_layer=False, dtype=torch.float32)
    known = ImageProcessingMixin.get_image_processor_dict(model)[0]
    encoder.config.pixel_scaling = {"mean": known["image_mean"], "std": known["image_std"]}
    return Classifier(encoder, Heads(classes, encoder.config.hidden_size))


def fit_head(features: Tensor, labels: Tensor, classes: int, decay: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Weight and bias of the logistic regression from features to classes; both are shrunk a little towards 0."""
    centre, spread = features.mean(0), features.std(0) + 1e-6
    scaled = ((features - centre) / spread).double()
    weight, bias = (
        torch.zeros(*s, dtype=torch.float64, device=features.device) for s in ((classes, len(centre)), (classes,))
    )
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(scaled @ weight.T + bias, labels) + decay * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    fitted = weight.detach().float() / spread
    return fitted, bias.detach().float() - fitted @ centre


@torch.no_grad()
def _text_embedding(clip: CLIPModel, tokenizer: Any, name: str, templates: Sequence[str]) -> Tensor:
    tokens = tokenizer([t.format(name) for t in templates], padding=True, truncation=True, return_tensors="pt")
    text = clip.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).pooler_output
    return F.normalize(F.normalize(clip.text_projection(text), dim=-1).mean(0), dim=-1)


def save_classifier(classifier: Classifier, folder: Path) -> None:
    classifier.encoder.config.save_pretrained(folder)
    save_file(classifier.state(), folder / "encoder.safetensors")
    save_file({n: t.detach().cpu() for n, t in classifier.heads.state_dict().items()}, folder / "heads.safetensors")


def load_classifier(folder: Path, device: str) -> Classifier:
    """Encoder, and heads that are fixed."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type == "clip_vision_model":
        encoder: PreTrainedModel = CLIPVisionModelWithProjection(config)
    else:
        encoder = ViTModel(config, add_pooling_layer=False)
    stored = load_file(folder / "heads.safetensors")
    heads = Heads((~stored["absent"]).sum(1).tolist(), stored["weight"].shape[-1])
    heads.load_state_dict(stored)
    heads.requires_grad_(False)
    classifier = Classifier(encoder, heads)
    classifier.put(load_file(folder / "encoder.safetensors"))
    return classifier.to(device)
