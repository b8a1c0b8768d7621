"""Megatron-core backend: Qwen3-shaped models on GPU or CPU, mapped to and from Hugging Face weights.

Importing the package puts the CPU rewrite in place, so that every module below may import megatron at its top.
"""

from rl360.training.megatron.cpu_hook import install

ON_CPU = install()
