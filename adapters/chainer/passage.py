"""One batch on its way through a stage of a pipeline, in micro-batches."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer
import numpy as np

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, ShapeError, UnsupportedError
from collective.memory.annotations import Framework
from collective.training.pipelines import Action, Span

from .tape import bare

__all__ = ["ARRAYS", "Others", "Passage", "other_parameters", "pieces"]

# Tags of the pipeline's own communicator.
_FORWARD, _BACKWARD = 0, 1

_Arrays = tuple[Any, ...]

#: What a stage may take and return.
ARRAYS: Any = (chainer.Variable, *chainer.get_array_types())
#: Parameters of other ranks' stages, by their identity, and what they are called.
Others = dict[int, tuple[weakref.ref[Any], str]]


class Passage:
    """One batch on its way through this rank's stage.

    Args:
        stage: a link.
        comm: the pipeline's ranks.
        inputs: at the first stage, the arrays of each micro-batch.
        others: parameters that are other stages'.

    Attributes:
        first, last: whether the stage is.
        losses: at the last stage, of each micro-batch what it adds to the batch's.
        spans: when which pass was computed, from the making of this on.
        several: whether the stage returned a tuple.
    """

    def __init__(
        self, stage: Any, comm: Communicator, inputs: list[_Arrays], others: Others
    ) -> None:
        self._stage, self._comm, self._inputs, self._others = stage, comm, inputs, others
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        self._like: Framework = "numpy" if stage.xp is np else "cupy"
        # Of each micro-batch from its forward to its backward pass: inputs, outputs and, where
        # they are known already, the outputs' gradients.
        self._kept: dict[int, tuple[_Arrays, _Arrays, _Arrays | None]] = {}
        self._sends: deque[Any] = deque()
        self.losses: list[Any] = []
        self.spans: list[Span] = []
        self.several = False
        self._began = time.perf_counter()

    def forward(
        self,
        action: Action,
        labels: _Arrays,
        loss: Callable[..., Any] | None,
        share: float,
    ) -> None:
        """Compute a micro-batch's outputs and pass them on; at the last stage, its loss."""
        arrays = self._received(action)
        start, cpu = time.perf_counter(), time.thread_time()
        inputs = tuple(
            chainer.Variable(x, requires_grad=not self.first and x.dtype.kind == "f")
            for x in arrays
        )
        if self.last and loss is None:
            found = self._stage(*inputs, *labels)
        else:
            found = self._stage(*inputs)
        gradients: _Arrays | None = None
        if self.last:
            found = found if loss is None else loss(found, *labels)
            gradients = (self._weigh(found, share),)
        outputs = self._outputs(found)
        if self._others and not action.microbatch:
            _refuse_skips(outputs, self._others, self._comm)
        self._record(action, start, cpu)
        self._kept[action.microbatch] = inputs, outputs, gradients
        if not self.last:
            self._send([bare(y) for y in outputs], self._comm.rank + 1, _FORWARD)

    def backward(self, action: Action) -> None:
        """Compute a micro-batch's gradients and pass those of its inputs back."""
        inputs, outputs, gradients = self._kept.pop(action.microbatch)
        differentiated = [y for y in outputs if bare(y).dtype.kind == "f"]
        if gradients is None:
            gradients = self._recv(self._comm.rank + 1, _BACKWARD)
        start, cpu = time.perf_counter(), time.thread_time()
        both = zip(differentiated, gradients, strict=True)
        reached = [(y, g) for y, g in both if getattr(y, "requires_grad", False)]
        if reached:
            chainer.backward(
                [y for y, _ in reached],
                [chainer.Variable(g, requires_grad=False) for _, g in reached],
            )
        # One for each output of floating point, used or not: the stage before counts them.
        back = [
            x.xp.zeros_like(x.array) if x.grad is None else x.grad
            for x in inputs
            if x.requires_grad
        ]
        self._record(action, start, cpu)
        if not self.first:
            self._send(back, self._comm.rank - 1, _BACKWARD)

    def evaluate(self, microbatch: int) -> _Arrays:
        """Compute a micro-batch's outputs, pass them on, and keep nothing."""
        arrays = self._received(Action("forward", microbatch))
        inputs = (chainer.Variable(x, requires_grad=False) for x in arrays)
        outputs = tuple(map(bare, self._outputs(self._stage(*inputs))))
        if not self.last:
            self._send(list(outputs), self._comm.rank + 1, _FORWARD)
        return outputs

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        while self._sends:
            self._sends.popleft().wait()

    def _weigh(self, found: Any, share: float) -> Any:
        """Note the share that a loss has in the batch's; return the gradient that it gets."""
        value = bare(found)
        if getattr(value, "size", 0) != 1 or value.dtype.kind != "f":
            given = getattr(value, "shape", type(value).__name__)
            raise ShapeError(
                f"Pipeline.step: {given} as loss; one floating-point number "
                f"[rank {self._comm.rank} of {self._comm.size}]. Pass loss=, which is called with "
                "what the last stage returns and the target."
            )
        self.losses.append(value * share)
        return self._stage.xp.full_like(value, share)

    def _outputs(self, found: Any) -> _Arrays:
        self.several = isinstance(found, (tuple, list))
        outputs = tuple(found) if self.several else (found,)
        for y in outputs:
            if not isinstance(y, ARRAYS):
                raise InvalidArgumentError(
                    f"Pipeline: the stage returns {type(y).__name__}; a variable or a tuple of "
                    f"some [rank {self._comm.rank} of {self._comm.size}]."
                )
        return outputs

    def _received(self, action: Action) -> _Arrays:
        if self.first:
            return self._inputs[action.microbatch]
        return self._recv(self._comm.rank - 1, _FORWARD)

    def _recv(self, rank: int, tag: int) -> _Arrays:
        found = self._comm.recv(None, rank, tag=tag, like=self._like)
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    def _send(self, arrays: list[Any], rank: int, tag: int) -> None:
        # A work keeps its array alive until it is dropped.
        while self._sends and self._sends[0].done():
            self._sends.popleft().wait()
        message = arrays[0] if len(arrays) == 1 else tuple(arrays)
        self._sends.append(self._comm.send(message, rank, tag=tag, async_op=True))

    def _record(self, action: Action, start: float, cpu: float) -> None:
        began, end = self._began, time.perf_counter()
        self.spans.append(Span(*action, start - began, end - began, time.thread_time() - cpu))


def other_parameters(stages: Sequence[chainer.Link | None], comm: Communicator) -> Others:
    """Check what a pipeline is made of; return the parameters that are other ranks'.

    Raises:
        InvalidArgumentError: there are not as many as ranks, or this rank's is no link.
        UnsupportedError: two share a parameter.
    """
    where = f"[rank {comm.rank} of {comm.size}]"
    if not isinstance(stages, (list, tuple)) or len(stages) != comm.size:
        given = len(stages) if isinstance(stages, (list, tuple)) else type(stages).__name__
        raise InvalidArgumentError(
            f"Pipeline: {given} stages; a list of {comm.size}, one for each rank {where}. Put "
            "several layers into one stage by chainer.Sequential."
        )
    for rank, stage in enumerate(stages):
        if not isinstance(stage, chainer.Link) and (stage is not None or rank == comm.rank):
            raise InvalidArgumentError(
                f"Pipeline: {type(stage).__name__} as stage {rank}; a chainer.Link {where}. None "
                "stands for other ranks' only."
            )
    names: dict[int, tuple[int, str]] = {}
    found: Others = {}
    for rank, stage in enumerate(stages):
        for path, parameter in stage.namedparams() if stage is not None else ():
            owner, name = names.setdefault(id(parameter), (rank, path))
            if owner != rank:
                raise UnsupportedError(
                    f"Pipeline: {path} of stage {rank} is {name} of stage {owner}, too; each stage "
                    f"has parameters of its own {where}. Put what uses it into one stage."
                )
            if rank != comm.rank:
                found[id(parameter)] = weakref.ref(parameter), f"{path} of stage {rank}"
    return found


def pieces(given: Any, sizes: Sequence[int]) -> list[_Arrays]:
    """Cut an array, or each of a tuple, along its first axis."""
    if given is None:
        return []
    arrays = [bare(each) for each in (given if isinstance(given, tuple) else (given,))]
    ends = np.cumsum(sizes).tolist()
    return [tuple(x[end - size : end] for x in arrays) for size, end in zip(sizes, ends)]


def _refuse_skips(outputs: _Arrays, others: Others, comm: Communicator) -> None:
    """Refuse a graph that reaches into another stage, whose gradients would be lost or doubled.

    Raises:
        UnsupportedError: it uses a parameter of another stage.
    """
    for node in _leaves(outputs):
        variable = node.get_variable_or_none()
        found, name = others.get(id(variable), (None, ""))
        if found is not None and found() is variable:
            raise UnsupportedError(
                f"Pipeline: this stage uses {name}: a skip connection across stages [rank "
                f"{comm.rank} of {comm.size}]. A stage sees only what the one before returns: "
                "return what is needed later as a further output, and pass it on."
            )


def _leaves(outputs: _Arrays) -> Iterator[Any]:
    """Yield the nodes of variables that no function made, of all that lead to ``outputs``."""
    todo = [y.node for y in outputs if isinstance(y, chainer.Variable)]
    seen = set()
    while todo:
        node = todo.pop()
        if node.creator_node is None:
            yield node
        elif node.creator_node not in seen:
            seen.add(node.creator_node)
            todo += node.creator_node.inputs
