"""Megatron-core backend: Qwen3-shaped models on GPU or CPU, mapped to and from Hugging Face weights."""
