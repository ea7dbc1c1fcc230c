"""Chainer links computed in pieces: see :class:`Split`."""

from .split import Split

__all__ = ["Split"]
