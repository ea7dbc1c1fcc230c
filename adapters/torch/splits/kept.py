"""Count of the bytes that are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from collective.training.splits.session import names

__all__ = ["Kept"]

Tensor = torch.Tensor


class Kept:
    """Counter of the bytes that a backward pass keeps; tensors with the same memory count once.

    Args:
        there: tensors that are not counted.

    Attributes:
        piece: number of bytes of the recomputed piece that keeps most.
    """

    def __init__(self, there: Sequence[Tensor]) -> None:
        self.piece = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in there}
        self._found: dict[str, int] = {}
        # References to the counted tensors. Without them, a later tensor could get the same address
        # and would not be counted.
        self._alive: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """Count a tensor, and return it."""
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._seen and not tensor.is_meta:
            self._seen.add(memory.data_ptr())
            self._alive.append(tensor.detach())
            layer = names.current
            self._found[layer] = self._found.get(layer, 0) + memory.nbytes()
        return tensor

    def sizes(self) -> dict[str, int]:
        """Return the number of bytes of each layer."""
        return dict(self._found)

    def compute_piece(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Compute a piece that keeps only ``arrays``, and count the bytes of its recomputation."""
        for array in arrays:
            self(array)
        outer = self._seen, self._found, self._alive, self.piece
        self._seen, self._found, self._alive, self.piece = set(self._seen), {}, [], 0
        try:
            result = function(*arrays)
            inside = sum(self._found.values()) + self.piece
        finally:
            self._seen, self._found, self._alive, self.piece = outer
        self.piece = max(self.piece, inside)
        return result
