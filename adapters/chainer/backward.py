"""Observation of Chainer's backward pass: it reports each gradient as soon as it is complete.

A gradient is complete when nothing will be added to it any more. Chainer keeps gradients in its own
table and gives them to the parameters at the end of the pass. So none of its setters and hooks runs
early enough. Instead, two functions that Chainer looks up by name at each call are replaced by
wrappers, but only while passes are watched:

- ``chainer._backprop._backprop_to_all`` runs a pass. Its wrapper walks the graph first, and counts
  the functions that use each leaf.
- ``chainer._backprop_utils.backprop_step`` runs one function of a pass. Its wrapper then decrements
  the count of each leaf that the function has used. At zero the leaf's gradient is complete.

A third wrapper, of the forward pass of ``LinearGradWeight``, computes the gradient of a dense
layer's weight directly into the caller's array. Most large gradients are of this kind, and they
need neither new memory nor a copy then.

The count of a leaf behind a branch without a gradient never reaches zero. Such a leaf is not
reported.
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

from collective import InvalidArgumentError

#: Function that gets a leaf's number and its gradient, an array that it may read but not write. If
#: it does not return None, its result replaces the gradient.
Complete = Callable[[int, Any], Any]
#: Function that gets a leaf's number, and returns an array in which to compute the leaf's gradient,
#: or None.
Target = Callable[[int], Any]


@contextlib.contextmanager
def watching(
    leaves: Mapping[Any, int], complete: Complete, target: Target | None = None
) -> Iterator[None]:
    """Watch the backward passes of the body in this thread.

    A pass may start inner passes (``F.forget`` does). These are not watched: they add to leaves,
    and the gradients are read from the leaves at the end of the outer pass.

    Args:
        leaves: nodes of the variables to watch, and the numbers that identify them.
        complete: function that is called in the middle of a pass.
        target: function that is called before a gradient that can be computed in place. Then
            ``complete`` is called with the array that ``target`` has returned.

    Raises:
        InvalidArgumentError: a pass has ``enable_double_backprop=True``. The gradients are copied,
            and a copy has no graph.
    """
    before = _here.watch
    with _wrappers:
        _here.watch = leaves, complete, target
        try:
            yield
        finally:
            _here.watch = before


class _Here(threading.local):
    """State of this thread: what it watches, and the pass that it runs."""

    watch: tuple[Mapping[Any, int], Complete, Target | None] | None = None
    in_pass = False
    counted: _Pass | None = None  # pass whose functions are counted, if the innermost one is
    into: Any = None  # array for the next gradient of a dense layer's weight


_here = _Here()


class _Pass:
    """Counts of one backward pass: which functions will still use which leaves.

    Args:
        outputs: nodes at which the pass starts.
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
                "backward: enable_double_backprop=True while gradients are reduced (allowed is "
                "False, because other ranks contribute to the reduced gradients, and so these have "
                "no graph here). Use chainer.grad in the loss function, or no_sync()."
            )
        self._leaves = leaves
        self._complete = complete
        self._target = target
        self._users: dict[Any, list[Any]] = {}  # function -> leaves that it uses
        self._left: dict[Any, int] = {}  # leaf -> number of functions that will still add to it
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
        """Return an array for a function's gradient of its weight, if no other part is added."""
        if self._target is None or type(function) is not LinearFunction:
            return None
        weight = function.inputs[1]
        if self._left.get(weight) != 1 or weight in (function.inputs[0], *function.inputs[2:]):
            return None
        return None if gradients[weight] else self._target(self._leaves[weight])

    def done(self, function: Any, gradients: Mapping[Any, list[Any]]) -> None:
        """Count a function as done: it has added to the gradients of the leaves that it uses."""
        for node in self._users.pop(function, ()):
            self._left[node] -= 1
            if self._left[node]:
                continue
            parts = gradients[node]
            # Chainer adds the parts by the same function when the pass is over.
            gradient = _backprop_utils._reduce(parts)
            if gradient is None:
                continue
            taken = self._complete(self._leaves[node], gradient.array)
            if taken is not None and taken is not gradient.array:
                parts[:] = [chainer.Variable(taken, requires_grad=False)]


class Replacements:
    """Replacements of attributes of Chainer, shared by all threads that need them at a time.

    Args:
        entries: for each attribute its owner, its name, and a function that makes the replacement
            of the original.
    """

    def __init__(self, *entries: tuple[Any, str, Callable[[Any], Any]]) -> None:
        self._entries = entries
        self._lock = threading.Lock()
        self._users = 0
        self._originals: list[Any] = []

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._originals = [getattr(owner, name) for owner, name, _ in self._entries]
                for (owner, name, replacement), original in zip(self._entries, self._originals):
                    setattr(owner, name, replacement(original))

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for (owner, name, _), original in zip(self._entries, self._originals):
                    setattr(owner, name, original)


def _run_pass(original: Any) -> Any:
    def run(outputs: Any, *args: Any, **options: Any) -> Any:
        before = _here.in_pass, _here.counted
        watched = None if _here.in_pass else _here.watch
        _here.in_pass = True
        try:
            nodes = [node for node, _ in outputs]
            _here.counted = None if watched is None else _Pass(nodes, *watched)
            return original(outputs, *args, **options)
        finally:
            _here.in_pass, _here.counted = before

    return run


def _run_step(original: Any) -> Any:
    def run(function: Any, indexes: Any, out: Any, gradients: Any, *args: Any) -> Any:
        counted = _here.counted
        if counted is None:
            return original(function, indexes, out, gradients, *args)
        _here.into = counted.target_for(function, gradients)
        try:
            result = original(function, indexes, out, gradients, *args)
        finally:
            _here.into = None
        counted.done(function, gradients)
        return result

    return run


def _weight_gradient(original: Any) -> Any:
    return lambda node, inputs: _forward(original, node, inputs)


def _forward(original: Any, node: Any, inputs: tuple[Any, Any]) -> tuple[Any]:
    """Run the forward pass of a ``LinearGradWeight``, into the prepared array if there is one.

    The product and its operands are the same, and so are the bits of the result.
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
        result: tuple[Any] = original(node, inputs)
        return result
    node.retain_inputs((0, 1))
    node._config_use_ideep = "never"
    np.dot(gy.T, x, out=into)
    return (into,)


_wrappers = Replacements(
    (_backprop, "_backprop_to_all", _run_pass),
    (_backprop_utils, "backprop_step", _run_step),
    (LinearGradWeight, "forward", _weight_gradient),
)
