"""PyTorch modules computed in pieces: see :class:`Split`."""

from collective.adapters.torch.splits.split import Split

__all__ = ["Split"]
