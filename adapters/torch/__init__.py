"""PyTorch: its tensors as arrays of ``collective``."""
