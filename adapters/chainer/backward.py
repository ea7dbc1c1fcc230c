"""Chainer's backward pass, watched: told is each gradient as soon as nothing will be added to it.

Chainer keeps gradients in a table of its own and gives them to the parameters after everything
else, so no setter and no hook of its own comes early enough. While passes are watched, and only
then, two functions that Chainer looks up by name at each call stand wrapped:

- ``chainer._backprop._backprop_to_all``, a pass: its graph is walked first, to count the
  functions that use each leaf;
- ``chainer._backprop_utils.backprop_step``, one function of a pass: it is counted down for what
  it has used. At zero the gradient is complete.

A third, the forward pass of ``LinearGradWeight``, computes the gradient of a dense layer's weight
right where the caller wants it: large gradients are mostly these, and neither fresh memory nor a
copy is needed then.

Leaves behind a branch that gets no gradient are never counted down to zero: of those, nothing is
told.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chainer
import numpy as np
from chainer import _backprop, _backprop_utils
from chainer.functions.connection.linear import LinearFunction, LinearGradWeight

from collective.errors import InvalidArgumentError

__all__ = ["Complete", "Target", "watching"]

#: Is told a leaf's number and its gradient, an array that it may read and not write. What it
#: returns takes the gradient's place, if it is not None.
Complete = Callable[[int, Any], Any]
#: Returns the array where the gradient of a leaf, told by its number, may be computed.
Target = Callable[[int], Any]


@contextlib.contextmanager
def watching(
    leaves: Mapping[Any, int], complete: Complete, target: Target | None = None
) -> Iterator[None]:
    """Watch the backward passes of the body in this thread.

    Passes that others start in their course (``F.forget`` does) are not watched: they add to
    leaves whose gradients are read from there when the outer pass is over.

    Args:
        leaves: their variables' nodes, and the numbers by which they are told.
        complete: is called in the middle of a pass.
        target: asked before a gradient is computed that could be in place from the start; then
            ``complete`` is called with that array.

    Raises:
        InvalidArgumentError: of a pass with ``enable_double_backprop=True``: the gradients are
            copied, and a copy has no graph.
    """
    before = _here.watch
    _wrappers.install()
    _here.watch = leaves, complete, target
    try:
        yield
    finally:
        _here.watch = before
        _wrappers.remove()


class _Here(threading.local):
    """What this thread watches, and where it is."""

    watch: tuple[Mapping[Any, int], Complete, Target | None] | None = None
    in_pass = False
    counted: _Pass | None = None  # the pass whose functions are counted, if the innermost is
    into: Any = None  # where the next gradient of a dense layer's weight goes


_here = _Here()


class _Pass:
    """One backward pass: which functions will use which leaves.

    Args:
        outputs: the nodes that the pass starts at.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        leaves: Mapping[Any, int],
        complete: Complete,
        target: Target | None,
    ):
        if chainer.config.enable_backprop:
            raise InvalidArgumentError(
                "backward: enable_double_backprop=True, while gradients are reduced; allowed is "
                "False, as gradients that other ranks have a part in have no graph here. Use "
                "chainer.grad in the loss, or no_sync()."
            )
        self._leaves = leaves
        self._complete = complete
        self._target = target
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

    def target_for(self, function: Any, gradients: Mapping[Any, list[Any]]) -> Any:
        """Return where a function's gradient of its weight may go, if it is all there will be."""
        if self._target is None or type(function) is not LinearFunction:
            return None
        weight = function.inputs[1]
        if self._left.get(weight) != 1 or weight in (function.inputs[0], *function.inputs[2:]):
            return None
        return None if gradients[weight] else self._target(self._leaves[weight])

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
            if taken is not None and taken is not gradient.array:
                parts[:] = [chainer.Variable(taken, requires_grad=False)]


class _Wrappers:
    """Puts the wrappers in place, once for all threads that watch, and back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._pass: Any = None
        self._step: Any = None
        self._weight: Any = None

    def install(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._pass = _backprop._backprop_to_all
                self._step = _backprop_utils.backprop_step
                _backprop._backprop_to_all = self.run_pass
                _backprop_utils.backprop_step = self.run_step
                self._weight = weight = LinearGradWeight.forward
                LinearGradWeight.forward = lambda node, inputs: _forward(weight, node, inputs)

    def remove(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                _backprop._backprop_to_all = self._pass
                _backprop_utils.backprop_step = self._step
                LinearGradWeight.forward = self._weight

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
        counted = _here.counted
        if counted is None:
            return self._step(function, indexes, out, gradients, *args)
        _here.into = counted.target_for(function, gradients)
        try:
            result = self._step(function, indexes, out, gradients, *args)
        finally:
            _here.into = None
        counted.done(function, gradients)
        return result


def _forward(original: Any, node: Any, inputs: tuple[Any, Any]) -> tuple[Any]:
    """Run the forward pass of a ``LinearGradWeight``, into the place that there is for it.

    The same product of the same operands, so the same bits.
    """
    into, _here.into = _here.into, None
    x, gy = inputs
    if (
        into is None
        or not all(type(array) is np.ndarray for array in (x, gy, into))
        or not x.dtype == gy.dtype == node._w_dtype == into.dtype
        or (gy.shape[1], x.shape[1]) != into.shape
        or not (gy.flags.forc and x.flags.forc and into.flags.c_contiguous)
        or chainer.config.use_ideep != "never"
    ):
        found: tuple[Any] = original(node, inputs)
        return found
    node.retain_inputs((0, 1))
    node._config_use_ideep = "never"
    np.dot(gy.T, x, out=into)
    return (into,)


_wrappers = _Wrappers()
