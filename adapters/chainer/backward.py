"""Chainer's backward pass, watched: told is each gradient as soon as nothing will be added to it.

Chainer keeps gradients in a table of its own and gives them to the parameters after everything
else, so no setter and no hook of its own comes early enough. While passes are watched, and only
then, two functions that Chainer looks up by name at each call stand wrapped:

- ``chainer._backprop._backprop_to_all``, a pass: its graph is walked first, to count the
  functions that use each leaf;
- ``chainer._backprop_utils.backprop_step``, one function of a pass: it is counted down for what
  it has used. At zero the gradient is complete.

Leaves behind a branch that gets no gradient are never counted down to zero: of those, nothing is
told.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chainer
from chainer import _backprop, _backprop_utils

from collective.errors import InvalidArgumentError

__all__ = ["Complete", "watching"]

#: Is told a leaf's number and its gradient, an array that it may read and not write. What it
#: returns takes the gradient's place, if it is not None.
Complete = Callable[[int, Any], Any]


@contextlib.contextmanager
def watching(leaves: Mapping[Any, int], complete: Complete) -> Iterator[None]:
    """Watch the backward passes of the body in this thread.

    Passes that others start in their course (``F.forget`` does) are not watched: they add to
    leaves whose gradients are read from there when the outer pass is over.

    Args:
        leaves: their variables' nodes, and the numbers by which they are told.
        complete: is called in the middle of a pass.

    Raises:
        InvalidArgumentError: of a pass with ``enable_double_backprop=True``: the gradients are
            copied, and a copy has no graph.
    """
    before = _here.watch
    _wrappers.install()
    _here.watch = leaves, complete
    try:
        yield
    finally:
        _here.watch = before
        _wrappers.remove()


class _Here(threading.local):
    """What this thread watches, and where it is."""

    watch: tuple[Mapping[Any, int], Complete] | None = None
    in_pass = False
    counted: _Pass | None = None  # the pass whose functions are counted, if the innermost is


_here = _Here()


class _Pass:
    """One backward pass: which functions will use which leaves.

    Args:
        outputs: the nodes that the pass starts at.
    """

    def __init__(self, outputs: Sequence[Any], leaves: Mapping[Any, int], complete: Complete):
        if chainer.config.enable_backprop:
            raise InvalidArgumentError(
                "backward: enable_double_backprop=True, while gradients are reduced; allowed is "
                "False, as gradients that other ranks have a part in have no graph here. Use "
                "chainer.grad in the loss, or no_sync()."
            )
        self._leaves = leaves
        self._complete = complete
        self._users: dict[Any, list[Any]] = {}  # function -> the leaves that it uses
        self._left: dict[Any, int] = {}  # leaf -> how many functions still have to add to it
        todo = [node.creator_node for node in outputs if node.creator_node is not None]
        seen = set(todo)
        while todo:
            function = todo.pop()
            used: dict[Any, None] = {}
            for node in function.inputs or ():
                if not node.requires_grad:
                    continue
                creator = node.creator_node
                if creator is None:
                    if node in leaves:
                        used[node] = None
                elif creator not in seen:
                    seen.add(creator)
                    todo.append(creator)
            if used:
                self._users[function] = list(used)
                for node in used:
                    self._left[node] = self._left.get(node, 0) + 1

    def done(self, function: Any, gradients: Mapping[Any, list[Any]]) -> None:
        """Count a function that has added to the gradients of what it has used."""
        for node in self._users.pop(function, ()):
            self._left[node] -= 1
            if self._left[node]:
                continue
            parts = gradients[node]
            # As Chainer adds them up when the pass is over, by the same function.
            gradient = _backprop_utils._reduce(parts)
            if gradient is None:
                continue
            taken = self._complete(self._leaves[node], gradient.array)
            if taken is not None:
                parts[:] = [chainer.Variable(taken, requires_grad=False)]


class _Wrappers:
    """Puts the wrappers in place, once for all threads that watch, and back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._pass: Any = None
        self._step: Any = None

    def install(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._pass = _backprop._backprop_to_all
                self._step = _backprop_utils.backprop_step
                _backprop._backprop_to_all = self.run_pass
                _backprop_utils.backprop_step = self.run_step

    def remove(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                _backprop._backprop_to_all = self._pass
                _backprop_utils.backprop_step = self._step

    def run_pass(self, outputs: Any, *args: Any, **options: Any) -> Any:
        before = _here.in_pass, _here.counted
        watched = None if _here.in_pass else _here.watch
        _here.in_pass = True
        try:
            nodes = [node for node, _ in outputs]
            _here.counted = None if watched is None else _Pass(nodes, *watched)
            return self._pass(outputs, *args, **options)
        finally:
            _here.in_pass, _here.counted = before

    def run_step(self, function: Any, indexes: Any, out: Any, gradients: Any, *args: Any) -> Any:
        result = self._step(function, indexes, out, gradients, *args)
        if _here.counted is not None:
            _here.counted.done(function, gradients)
        return result


_wrappers = _Wrappers()
