"""A tensor whose rows are computed piece by piece, and the names of layers.

A :class:`Cut` goes through a model's own forward in place of a tensor. It has the whole tensor's
shape and dtype and no memory: it lies on the device ``meta``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from collective.errors import UnsupportedError
from collective.memory import nested
from collective.training.splits.executor import LayerNames

if TYPE_CHECKING:
    from collective.training.splits.blocks import Value

__all__ = ["Cut", "CutPass", "names", "running"]


class CutPass(Protocol):
    """Where functions go that are given a cut tensor."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the function returns: cut, if there is a rule for it."""

    def whole(self, cut: Cut) -> torch.Tensor:
        """Return the whole tensor."""


#: Of the module's layers.
names = LayerNames()


class Cut(torch.Tensor):
    """Stands for a tensor that is cut; made by :meth:`Session.cut`."""

    value: Value
    session: CutPass

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        leaves = nested.flatten([list(args), kwargs or {}])
        session = next(leaf.session for leaf in leaves if isinstance(leaf, Cut))
        return session.call(function, tuple(args), dict(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "Split: a tensor that is cut cannot be pickled or copied inside forward. Do that to "
            "the result."
        )


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    """Say which layer is running."""
    names.stack.append(name)
    try:
        yield
    finally:
        names.stack.pop()
