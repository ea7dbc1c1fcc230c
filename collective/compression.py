"""Compressed reductions of gradients: see :mod:`collective.training.compression`."""

from collective.training.compression import Cast, PowerSGD, TopK

__all__ = ["Cast", "PowerSGD", "TopK"]
