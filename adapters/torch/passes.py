"""Detection of the forward passes that a backward pass goes through, and so whether it reduces.

The forward pass that made the graph determines whether its gradients are reduced; later calls do
not matter. A gradient's hook does not know the forward pass: autograd adds up the gradients of all
graphs in one node for each parameter, and that node calls the hook. So each forward pass registers
hooks on its outputs, which a backward pass reaches before the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Variable

# Returns -1 outside of a backward pass.
_current_task: Callable[[], int] = torch._C._current_graph_task_id
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class ForwardPass:
    """Record of a forward pass. The hooks on the outputs, and so the graph, keep the record alive.

    Attributes:
        reduced: whether gradients of this forward pass are reduced.
        unused: numbers of the parameters on which no output depends; empty if the module has not
            searched for them.
        spent: whether a backward pass has reached an output and has freed the graph.
    """

    __slots__ = ("__weakref__", "reduced", "spent", "unused")

    def __init__(self, reduced: bool, unused: Sequence[int]) -> None:
        self.reduced = reduced
        self.unused = unused
        self.spent = False


class BackwardPass:
    """Record of the current backward pass, including nested passes of reentrant checkpoints.

    Only autograd's engine keeps the record alive, by the callback that is queued for the end of the
    pass. So a backward pass that ends with an exception leaves nothing behind.

    Attributes:
        reduced: whether the gradients of this pass are reduced; None before its first gradient or
            output hook.
        presumed: true until an output hook has confirmed ``reduced``.
        forward: forward passes whose outputs this pass has reached.
        arrived: numbers of the gradients that arrived before ``reduced`` became true.
        any_arrived: whether a gradient has arrived.
    """

    def __init__(self) -> None:
        self.reduced: bool | None = None
        self.presumed = False
        self.forward: list[ForwardPass] = []
        self.arrived: list[int] = []
        self.any_arrived = False


class Passes:
    """Forward and backward passes of one module.

    None of the three functions may keep its object alive, because ``reached`` lives as long as the
    graph.

    Args:
        began: function that is called when a backward pass first reaches the module.
        reached: function that is called when a backward pass reaches an output of a forward pass,
            with the :class:`ForwardPass` and a gradient.
        ended: function that is called at the end of a backward pass, with the
            :class:`BackwardPass`.
    """

    def __init__(
        self,
        began: Callable[[], None],
        reached: Callable[..., None],
        ended: Callable[[BackwardPass], None],
    ) -> None:
        self._began = began
        self._reached = reached
        self._ended = ended
        self._alive: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        # Numbers of forward passes whose graphs may not be freed yet, by `ForwardPass.reduced`.
        self._open = {True: 0, False: 0}
        self._backward: Callable[[], BackwardPass | None] = _nothing

    # -- forward --------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether the caller runs inside a backward pass, as a recomputing checkpoint does."""
        if _current_task() >= 0:
            return self._backward() is not None
        self._backward = _nothing
        return False

    def add(
        self, outputs: Iterable[torch.Tensor], reduced: bool, unused: Sequence[int] = ()
    ) -> None:
        """Record a forward pass; see :class:`ForwardPass`."""
        forward = ForwardPass(reduced, unused)
        hook = functools.partial(self._reached, forward)
        untyped: Any
        for untyped in outputs:
            if untyped.grad_fn is not None:
                untyped.register_hook(hook)
        self._alive.add(forward)
        self._open[reduced] += 1

    # -- backward -------------------------------------------------------------------------

    def reach(self, forward: ForwardPass) -> list[int]:
        """Record that the current backward pass has reached an output of a forward pass.

        Returns:
            The numbers of gradients that arrived earlier in this backward pass, if this call
            determines that they are reduced.
        """
        backward = self._backward() or self._begin()
        if not (forward.spent or _keeps_graph()):
            forward.spent = True
            self._close(forward.reduced)
        if forward not in backward.forward:
            backward.forward.append(forward)
        if not forward.reduced:
            backward.reduced = bool(backward.reduced)
            return []
        backward.reduced, backward.presumed = True, False
        late, backward.arrived = backward.arrived, []
        return late

    def arrive(self, number: int | None, outside: bool) -> bool:
        """Record a parameter's gradient; return whether it is reduced in this pass.

        Args:
            number: number of the parameter; None if its gradients are in no bucket.
            outside: whether the gradient is reduced if no recorded forward pass can have made its
                graph.
        """
        backward = self._backward() or self._begin()
        backward.any_arrived = True
        if backward.reduced is None:
            # The pass has reached no output: its loss comes from elsewhere, or it computes a
            # second derivative. In doubt the gradients are reduced. Within no_sync(), a
            # reduction is correct as well, only earlier than necessary: the average of a sum is the
            # same if parts of the sum have been averaged before.
            pending = any(self._open.values())
            backward.reduced = self._open[True] > 0 if pending else outside
            backward.presumed = True
        if not backward.reduced and number is not None:
            backward.arrived.append(number)
        return backward.reduced

    def unused(self) -> Sequence[int]:
        """Return the numbers of gradients that cannot arrive in the current backward pass.

        The result is empty if the pass may still reach the outputs of another forward pass.
        """
        backward = self._backward()
        if backward is None or len(backward.forward) != 1:
            return ()
        (forward,) = backward.forward
        if any(other is not forward and not other.spent for other in self._alive):
            return ()
        return forward.unused

    def _begin(self) -> BackwardPass:
        self._began()
        backward = BackwardPass()
        self._backward = weakref.ref(backward)
        engine: Any = Variable._execution_engine
        engine.queue_callback(functools.partial(self._end, backward))
        return backward

    def _end(self, backward: BackwardPass) -> None:
        self._backward = _nothing  # also if an error's traceback keeps it alive
        if backward.presumed and not _keeps_graph():
            # It is unknown which graph the pass has freed. If a forward pass within no_sync() is
            # open, count that one as freed, so that the reduction is still to come.
            self._close(not self._open[False])
        self._ended(backward)

    def _close(self, reduced: bool) -> None:
        self._open[reduced] = max(0, self._open[reduced] - 1)


def _nothing() -> None:
    """Return None, like a weak reference whose object is gone."""


def leaves_behind(outputs: Iterable[torch.Tensor]) -> set[Any]:
    """Return the leaves of the graph behind some tensors."""
    leaves, todo = set(), []
    for tensor in outputs:
        if tensor.grad_fn is None:
            leaves.add(tensor)
        else:
            todo.append(tensor.grad_fn)
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return leaves


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's result."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, (list, tuple, set)):
        for value in outputs:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        for each in dataclasses.fields(outputs):
            yield from tensors_in(getattr(outputs, each.name))


def weakly(method: Any) -> Callable[..., Any]:
    """Return a function that calls ``method`` without keeping its object alive."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = weak()
        return None if bound is None else bound(*args)

    return call
