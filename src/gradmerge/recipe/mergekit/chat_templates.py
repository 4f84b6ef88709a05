"""Chat templates that mergekit recipes name, written from the published formats."""

from __future__ import annotations

TEMPLATES = {
    "chatml": (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "alpaca": (
        "{% for turn in messages %}{% if turn.role == 'user' %}### Instruction:\n{% elif turn.role == 'assistant' %}"
        "### Response:\n{% endif %}{{ turn.content | trim }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for turn in messages %}<|start_header_id|>{{ turn.role }}<|end_header_id|>\n\n"
        "{{ turn.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
#: Other names that mergekit knows: the format of the first changed several times, and the second is rarely used.
UNSUPPORTED = ("mistral", "exaone")
