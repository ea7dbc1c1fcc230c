"""Gradients made smaller on their way: see :mod:`collective.training.compression`."""

from collective.training.compression import Cast, PowerSGD, TopK

__all__ = ["Cast", "PowerSGD", "TopK"]
