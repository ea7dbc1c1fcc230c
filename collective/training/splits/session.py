"""Treatment of functions that take an array which is cut.

A function with a rule becomes a step. A function without a rule is called on the whole array. If
its result has the same rows, the following functions work on pieces again. The framework's part
intercepts the functions and has the rules.
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
from .filters import Filters
from .layered import Executor


class _LayerNames(threading.local):
    """Names of a model's layers that are running in this thread, from outermost to innermost."""

    def __init__(self) -> None:
        self.stack: list[str] = []

    @property
    def current(self) -> str:
        """Name of the innermost running layer; "forward" outside of all layers."""
        return self.stack[len(self.stack) - 1] if self.stack else "forward"


#: Names of the running layers.
names = _LayerNames()


class SplitSession(ABC):
    """One forward pass of a model whose arrays are cut.

    Args:
        executor: executor that makes the calls.
        arrays: operations on the framework's arrays.
        strict: whether functions without a rule are refused.
        kept: counter of the bytes that are kept for the backward pass.
        filters: record of the parameters of which this rank has a piece.

    Attributes:
        kind: class of the stand-ins for arrays that are cut; each has a ``value``.
        joined: names of the functions that took whole arrays.
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
        """Intercept the functions that are called with cut arrays, while the model runs."""

    @abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a function: cut, if the function has a rule."""

    @abstractmethod
    def cut(self, value: Value, shape: Sequence[int], like: Any) -> Any:
        """Return a stand-in for a value, with the given shape and the dtype of ``like``."""

    # -- cut arrays ------------------------------------------------------------------------

    def enter(self, x: Any) -> Any:
        """Return the stand-in for an existing array."""
        value = self._executor.enter(x)
        first, *rest = value.lengths
        return self.cut(value, (first, x.shape[1], *rest), x)

    def whole(self, cut: Any) -> Any:
        """Return the whole array of a stand-in."""
        return self._executor.whole([cut.value])[0]

    def leave(self, result: Any) -> Any:
        """Return a forward pass's result with arrays in place of stand-ins."""
        leaves = nested.flatten(result)
        arrays = iter(self._executor.results([x.value for x in leaves if self._is_cut(x)]))
        return nested.rebuild(result, (next(arrays) if self._is_cut(x) else x for x in leaves))

    def has_piece(self, x: Any) -> bool:
        """Return whether ``x`` is a parameter of which this rank has a piece."""
        return self._filters is not None and self._filters.share(x) is not None

    def _is_cut(self, x: Any) -> bool:
        return isinstance(x, self.kind)

    def _broadcast_whole(self, leaves: Sequence[Any], shape: Sequence[int]) -> list[Any]:
        """Return operands with whole arrays in place of those that broadcast along a cut axis.

        Such an array is the same for every piece.

        Args:
            shape: shape of the result.
        """
        expected = lengths_of(shape), len(shape)
        return [
            self.whole(x) if self._is_cut(x) and (x.value.lengths, x.ndim) != expected else x
            for x in leaves
        ]

    # -- functions without a rule ----------------------------------------------------------

    def _wholes(self, name: str, leaves: Sequence[Any]) -> list[Any]:
        """Return the whole arrays that a function without a rule takes.

        Raises:
            UnsupportedError: ``strict`` refuses such functions.
        """
        if self._strict:
            raise UnsupportedError(
                f"Split: {name} needs its input whole, which strict=True refuses. Split only the "
                "layers before it, and call it on their result; or pass strict=False."
            )
        cut = [x for x in leaves if self._is_cut(x)]
        whole = dict(zip(map(id, cut), self._executor.whole([x.value for x in cut])))
        self.joined.append(name)
        return [whole.get(id(x), self._executor.parameter(x)) for x in leaves]

    def _again(self, result: Any, cut: Any) -> Any:
        """Cut a result again if it has the rows of the array that it was computed from."""
        if not self.arrays.is_array(result) or result.ndim != cut.ndim:
            return result
        if lengths_of(result.shape) != cut.value.lengths:
            return result
        return self.cut(self._executor.enter_whole(result), result.shape, result)
