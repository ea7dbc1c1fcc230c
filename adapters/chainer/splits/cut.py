"""Variable whose rows are computed piece by piece, and interception of functions that take it.

All of Chainer's functions go through ``FunctionNode.apply``. This method is wrapped, but only while
a split link runs. A function that takes a :class:`Cut` goes to the forward pass that the cut
belongs to; other functions run unchanged. A hook of Chainer on links records which link calls a
function.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import chainer
import numpy as np
from chainer.function_node import FunctionNode

from collective.adapters.chainer.backward import Replacements
from collective.training.splits.blocks import Value
from collective.training.splits.session import SplitSession, names


class _Current(threading.local):
    """Session that handles functions of this rank's pieces of parameters, in this thread."""

    session: SplitSession | None = None


_current = _Current()


class _LinkNames(chainer.LinkHook):  # type: ignore[misc, unused-ignore]
    """Hook that records which link is running.

    Args:
        link: link whose children are named by their paths.
    """

    name = "collective-split"

    def __init__(self, link: chainer.Link) -> None:
        super().__init__()
        self._paths = {id(child): path for path, child in link.namedlinks()}

    def forward_preprocess(self, args: Any) -> None:
        path = self._paths.get(id(args.link), "")
        names.stack.append(f"{path} ({type(args.link).__name__})")

    def forward_postprocess(self, args: Any) -> None:
        names.stack.pop()


class Cut(chainer.Variable):  # type: ignore[misc, unused-ignore]
    """Stand-in for a variable that is cut.

    Its shape and dtype are those of the whole variable; ``array`` computes the whole array.

    Args:
        value: recipe of the variable.
        session: forward pass that the variable belongs to.
        shape, dtype: those of the whole variable.
    """

    def __init__(
        self, value: Value, session: SplitSession, shape: Sequence[int], dtype: Any
    ) -> None:
        # An array of this shape without memory: Chainer reads only its shape and dtype.
        nothing = np.broadcast_to(np.zeros((), dtype), tuple(shape))
        super().__init__(nothing, requires_grad=False)
        self.value = value
        self.session = session

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._data[0].shape)

    @property
    def ndim(self) -> int:
        return int(self._data[0].ndim)

    @property
    def size(self) -> int:
        return int(self._data[0].size)

    @property
    def dtype(self) -> Any:
        return self._data[0].dtype

    @property
    def xp(self) -> Any:
        return self.session.arrays.like.xp

    @property
    def array(self) -> Any:
        return self.session.whole(self).array

    @property
    def data(self) -> Any:
        return self.array


def _intercepted(original: Any) -> Any:
    def apply(node: Any, inputs: Any) -> Any:
        session = _session_of(inputs)
        if session is None:
            return original(node, inputs)
        with _current_session(None):  # functions inside work on pieces
            return session.call(node, tuple(inputs))

    return apply


_interception = Replacements((FunctionNode, "apply", _intercepted))


def _session_of(inputs: Any) -> SplitSession | None:
    """Return the forward pass that a function of ``inputs`` belongs to, or None."""
    for x in inputs:
        if isinstance(x, Cut):
            return x.session
        if _current.session is not None and _current.session.has_piece(x):
            return _current.session
    return None


@contextlib.contextmanager
def _current_session(session: SplitSession | None) -> Iterator[None]:
    outer, _current.session = _current.session, session
    try:
        yield
    finally:
        _current.session = outer


@contextlib.contextmanager
def intercepting(link: chainer.Link, session: SplitSession) -> Iterator[None]:
    """Pass functions of cut variables to the forward passes that the variables belong to.

    Args:
        link: link that runs.
        session: session that handles functions of this rank's pieces of parameters.
    """
    try:
        with _interception, _LinkNames(link), _current_session(session):
            yield
    finally:
        names.stack.clear()
