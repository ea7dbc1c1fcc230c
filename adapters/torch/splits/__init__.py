"""Splits of PyTorch modules."""
