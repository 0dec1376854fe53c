"""Checkpoints whose weights were made small before they were published: FP8, AWQ, GPTQ and compressed-tensors safetensors."""
