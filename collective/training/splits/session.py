"""What becomes of functions that take an array which is cut.

A function with a rule becomes a step; one without is called on the whole array. Where its result
has the same rows, what follows goes on in pieces. How a function is caught, and what rule it has,
is a framework's.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from collective.errors import UnsupportedError
from collective.memory import nested

from .arrays import Arrays
from .blocks import Value, lengths_of
from .executors import Executor
from .filters import Filters

__all__ = ["Session", "names"]


class _LayerNames(threading.local):
    """Which of a model's layers are running, in this thread, one within another."""

    def __init__(self) -> None:
        self.stack: list[str] = []

    @property
    def current(self) -> str:
        """The innermost; "forward" outside of them."""
        return self.stack[len(self.stack) - 1] if self.stack else "forward"


#: Of the layers that are running.
names = _LayerNames()


class Session(ABC):
    """One forward pass of a model whose arrays are cut.

    Args:
        executor: makes the calls.
        arrays: what the framework does with its arrays.
        strict: whether functions without a rule are refused.
        kept: counts what is kept for the backward pass.
        filters: which parameters this rank has a piece of.

    Attributes:
        kind: of what stands for an array that is cut; one has its ``value``.
        joined: the names of the functions that took whole arrays.
    """

    kind: type

    def __init__(
        self,
        executor: Executor,
        arrays: Arrays,
        strict: bool,
        kept: Any = None,
        filters: Filters | None = None,
    ) -> None:
        self._executor = executor
        self.arrays = arrays
        self._strict = strict
        self._kept = kept
        self._filters = filters
        self.joined: list[str] = []

    # -- of a framework --------------------------------------------------------------------

    @abstractmethod
    def calls_of(self, model: Any) -> AbstractContextManager[Any]:
        """Get the functions that are given what is cut, while the model runs."""

    @abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a function returns: cut, if there is a rule for it."""

    @abstractmethod
    def cut(self, value: Value, shape: Sequence[int], like: Any) -> Any:
        """Return what stands for a value of such a shape, and of the dtype of ``like``."""

    # -- what is cut -----------------------------------------------------------------------

    def enter(self, x: Any) -> Any:
        """Return what stands for an array that is there."""
        value = self._executor.enter(x)
        first, *rest = value.lengths
        return self.cut(value, (first, x.shape[1], *rest), x)

    def whole(self, cut: Any) -> Any:
        """Return all of an array that is cut."""
        return self._executor.whole([cut.value])[0]

    def leave(self, result: Any) -> Any:
        """Return a forward's result with whole arrays in it."""
        leaves = nested.flatten(result)
        found = iter(self._executor.results([x.value for x in leaves if self._is_cut(x)]))
        return nested.rebuild(result, (next(found) if self._is_cut(x) else x for x in leaves))

    def has_piece(self, x: Any) -> bool:
        """Return whether ``x`` is a parameter of which this rank has a piece."""
        return self._filters is not None and self._filters.share(x) is not None

    def _is_cut(self, x: Any) -> bool:
        return isinstance(x, self.kind)

    # -- functions without a rule ----------------------------------------------------------

    def _wholes(self, name: str, leaves: Sequence[Any]) -> list[Any]:
        """Return what a function is given that has no rule: whole arrays.

        Raises:
            UnsupportedError: that is refused.
        """
        if self._strict:
            raise UnsupportedError(
                f"Split: {name} needs its input whole, which strict=True refuses. Split the layers "
                "before it, and call it on their result."
            )
        cut = [x for x in leaves if self._is_cut(x)]
        whole = dict(zip(map(id, cut), self._executor.whole([x.value for x in cut])))
        self.joined.append(name)
        return [whole.get(id(x), self._executor.parameter(x)) for x in leaves]

    def _again(self, found: Any, cut: Any) -> Any:
        """Cut a result once more that has the rows of what it was made of."""
        if not self.arrays.is_array(found) or found.ndim != cut.ndim:
            return found
        if lengths_of(found.shape) != cut.value.lengths:
            return found
        return self.cut(self._executor.enter_whole(found), found.shape, found)
