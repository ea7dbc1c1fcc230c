"""PyTorch modules that compute their results in pieces: see :class:`Split`."""

from .split import Split

__all__ = ["Split"]
