"""Writes checkpoints and GGUF files of statements that disagree, and compares pdserve with transformers."""
