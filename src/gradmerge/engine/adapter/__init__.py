"""Output as an adapter: what a merge changes of its base, written as one PEFT LoRA adapter."""
