"""Chainer links computed in pieces: see :class:`Split`."""

from collective.adapters.chainer.splits.split import Split

__all__ = ["Split"]
