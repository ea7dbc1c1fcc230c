"""Which forward passes a backward pass goes back through, and so whether it is one to reduce.

That belongs to the forward pass which made the graph, whatever has been called since. A gradient
does not tell: autograd adds up those of all graphs in one node a parameter, and that node is what
calls. So each forward pass leaves a hook at its outputs, by which a backward pass comes first.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Variable

__all__ = ["BackwardPass", "ForwardPass", "Passes", "leaves_behind", "tensors_in", "weakly"]

_current_task: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of a backward pass
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class ForwardPass:
    """One forward pass. The hooks at its outputs keep it alive, and so its graph does.

    Attributes:
        reduced: whether gradients that come through it are reduced.
        unused: numbers of the parameters on which no output depends, where that was looked for.
        spent: whether a backward pass has come by that has freed the graph.
    """

    __slots__ = ("__weakref__", "reduced", "spent", "unused")

    def __init__(self, reduced: bool, unused: Sequence[int]) -> None:
        self.reduced = reduced
        self.unused = unused
        self.spent = False


class BackwardPass:
    """One backward pass under way; those of reentrant checkpoints within it are part of it.

    Autograd's engine alone keeps it alive, by the call at the end that it has queued there. So
    one that breaks off by an exception leaves nothing behind.

    Attributes:
        reduced: whether its gradients are reduced; None until it is known.
        presumed: whether that is known by no output.
        forward: the forward passes by whose outputs it has come.
        arrived: numbers of the gradients that came before it was known to be one that is reduced.
        any_arrived: whether a gradient has come.
    """

    def __init__(self) -> None:
        self.reduced: bool | None = None
        self.presumed = False
        self.forward: list[ForwardPass] = []
        self.arrived: list[int] = []
        self.any_arrived = False


class Passes:
    """The passes of one module.

    Args:
        began: called when a backward pass comes by the module.
        reached: called with a :class:`ForwardPass` and a gradient when a backward pass comes by
            an output of it.
        ended: called with a :class:`BackwardPass` at its end. None of the three may keep its
            object alive: ``reached`` lives as long as the graph.
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
        # Forward passes whose graph is not known to be spent: of those that are reduced, and not.
        self._open = {True: 0, False: 0}
        self._backward: Callable[[], BackwardPass | None] = _nothing

    # -- forward --------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether this is within a backward pass, as when a checkpoint computes once again."""
        if _current_task() >= 0:
            return self._backward() is not None
        self._backward = _nothing
        return False

    def add(
        self, outputs: Iterable[torch.Tensor], reduced: bool, unused: Sequence[int] = ()
    ) -> None:
        """Take note of a forward pass; see :class:`ForwardPass`."""
        made = ForwardPass(reduced, unused)
        hook = functools.partial(self._reached, made)
        untyped: Any
        for untyped in outputs:
            if untyped.grad_fn is not None:
                untyped.register_hook(hook)
        self._alive.add(made)
        self._open[reduced] += 1

    # -- backward -------------------------------------------------------------------------

    def reach(self, forward: ForwardPass) -> list[int]:
        """Take note that the backward pass under way comes by an output of a forward pass.

        Returns:
            The numbers of gradients that have come in it and turn out now to be reduced.
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
        """Take note of a parameter's gradient; return whether it is reduced in this pass.

        Args:
            number: the parameter's; None if its gradients are in no bucket.
            outside: whether one is of a graph that no forward pass has made.
        """
        backward = self._backward() or self._begin()
        backward.any_arrived = True
        if backward.reduced is None:
            # It has come by no output: of a loss kept elsewhere, or a second derivative. In doubt
            # it is reduced, which is right within no_sync(), too, only earlier than it had to be:
            # the average of a sum is the same if parts of it have been averaged before.
            known = any(self._open.values())
            backward.reduced = self._open[True] > 0 if known else outside
            backward.presumed = True
        if not backward.reduced and number is not None:
            backward.arrived.append(number)
        return backward.reduced

    def unused(self) -> Sequence[int]:
        """Return the numbers of gradients that cannot come in the backward pass under way.

        None where it may yet come by the outputs of another forward pass.
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
        made = BackwardPass()
        self._backward = weakref.ref(made)
        engine: Any = Variable._execution_engine
        engine.queue_callback(functools.partial(self._end, made))
        return made

    def _end(self, backward: BackwardPass) -> None:
        self._backward = _nothing  # also if an error's traceback keeps it alive
        if backward.presumed and not _keeps_graph():
            self._close(not self._open[False])  # in doubt the one to reduce is still to come
        self._ended(backward)

    def _close(self, reduced: bool) -> None:
        self._open[reduced] = max(0, self._open[reduced] - 1)


def _nothing() -> None:
    """Stand for a reference to what is gone."""


def leaves_behind(outputs: Iterable[torch.Tensor]) -> set[Any]:
    """Return the leaves of the graph behind some tensors."""
    found, todo = set(), []
    for tensor in outputs:
        if tensor.grad_fn is None:
            found.add(tensor)
        else:
            todo.append(tensor.grad_fn)
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module has returned."""
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
    """Return a call of ``method`` that does not keep its object alive, as hooks would."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = weak()
        return None if found is None else found(*args)

    return call
