"""Passage of one batch through a stage of a pipeline, in micro-batches."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer
import numpy as np

from collective import Communicator, InvalidArgumentError, ShapeError, UnsupportedError
from collective.inner import Framework
from collective.training.pipelines import Action, Span

from .tape import bare

# Message tags on the pipeline's own communicator.
_FORWARD, _BACKWARD = 0, 1

_Arrays = tuple[Any, ...]

#: Types of the arrays that a stage may take and return.
ARRAYS: Any = (chainer.Variable, *chainer.get_array_types())
#: Parameters of other ranks' stages, by their identity: a weak reference and a name for errors.
Others = dict[int, tuple[weakref.ref[Any], str]]


class Passage:
    """Passage of one batch through this rank's stage.

    Args:
        stage: link that computes the stage.
        comm: ranks of the pipeline.
        inputs: at the first stage, the arrays of each micro-batch.
        others: parameters of other ranks' stages.

    Attributes:
        first, last: whether the stage is the first one, and whether it is the last one.
        losses: at the last stage, the contribution of each micro-batch to the batch's loss.
        spans: times of the passes, in seconds since this object was made.
        several: whether the stage returned a tuple.
    """

    def __init__(
        self, stage: Any, comm: Communicator, inputs: list[_Arrays], others: Others
    ) -> None:
        self._stage, self._comm, self._inputs, self._others = stage, comm, inputs, others
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        self._like: Framework = "numpy" if stage.xp is np else "cupy"
        # By micro-batch, from its forward to its backward pass: inputs, outputs, and the outputs'
        # gradients if these exist already.
        self._kept: dict[int, tuple[_Arrays, _Arrays, _Arrays | None]] = {}
        self._sends: deque[Any] = deque()
        self.losses: list[Any] = []
        self.spans: list[Span] = []
        self.several = False
        self._began = time.perf_counter()

    def forward(
        self, action: Action, labels: _Arrays, loss: Callable[..., Any] | None, share: float
    ) -> None:
        """Compute a micro-batch's outputs and send them on; at the last stage, compute its loss."""
        arrays = self._received(action)
        start, cpu = time.perf_counter(), time.thread_time()
        inputs = tuple(
            chainer.Variable(x, requires_grad=not self.first and x.dtype.kind == "f")
            for x in arrays
        )
        if self.last and loss is None:
            result = self._stage(*inputs, *labels)
        else:
            result = self._stage(*inputs)
        gradients: _Arrays | None = None
        if self.last:
            result = result if loss is None else loss(result, *labels)
            gradients = (self._weigh(result, share),)
        outputs = self._outputs(result)
        if self._others and not action.microbatch:
            _refuse_skips(outputs, self._others, self._comm)
        self._record(action, start, cpu)
        self._kept[action.microbatch] = inputs, outputs, gradients
        if not self.last:
            self._send([bare(y) for y in outputs], self._comm.rank + 1, _FORWARD)

    def backward(self, action: Action) -> None:
        """Compute a micro-batch's gradients and send those of its inputs back."""
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
        # One gradient for each floating-point output of the previous stage, used or not, because
        # that stage counts them.
        back = [
            x.xp.zeros_like(x.array) if x.grad is None else x.grad
            for x in inputs
            if x.requires_grad
        ]
        self._record(action, start, cpu)
        if not self.first:
            self._send(back, self._comm.rank - 1, _BACKWARD)

    def evaluate(self, microbatch: int) -> _Arrays:
        """Compute a micro-batch's outputs, send them on, and keep nothing."""
        arrays = self._received(Action("forward", microbatch))
        inputs = (chainer.Variable(x, requires_grad=False) for x in arrays)
        outputs = tuple(map(bare, self._outputs(self._stage(*inputs))))
        if not self.last:
            self._send(list(outputs), self._comm.rank + 1, _FORWARD)
        return outputs

    def finish(self) -> None:
        """Wait until all sends are complete."""
        while self._sends:
            self._sends.popleft().wait()

    def _weigh(self, loss: Any, share: float) -> Any:
        """Record the contribution of a loss to the batch's loss; return the loss's gradient."""
        value = bare(loss)
        if getattr(value, "size", 0) != 1 or value.dtype.kind != "f":
            described = getattr(value, "shape", type(value).__name__)
            raise ShapeError(
                f"Pipeline.step: {described} as loss (expected one floating-point number) "
                f"[rank {self._comm.rank} of {self._comm.size}]. Pass loss=, a function of the "
                "last stage's output and the target."
            )
        self.losses.append(value * share)
        return self._stage.xp.full_like(value, share)

    def _outputs(self, result: Any) -> _Arrays:
        self.several = isinstance(result, (tuple, list))
        outputs = tuple(result) if self.several else (result,)
        for y in outputs:
            if not isinstance(y, ARRAYS):
                raise InvalidArgumentError(
                    f"Pipeline: the stage returns {type(y).__name__} (expected a variable, or a "
                    f"tuple of variables) [rank {self._comm.rank} of {self._comm.size}]. Change "
                    "the stage's forward method."
                )
        return outputs

    def _received(self, action: Action) -> _Arrays:
        if self.first:
            return self._inputs[action.microbatch]
        return self._recv(self._comm.rank - 1, _FORWARD)

    def _recv(self, rank: int, tag: int) -> _Arrays:
        message = self._comm.recv(None, rank, tag=tag, like=self._like)
        return tuple(message) if isinstance(message, (tuple, list)) else (message,)

    def _send(self, arrays: list[Any], rank: int, tag: int) -> None:
        # A work keeps its array alive until the work is dropped.
        while self._sends and self._sends[0].done():
            self._sends.popleft().wait()
        message = arrays[0] if len(arrays) == 1 else tuple(arrays)
        self._sends.append(self._comm.send(message, rank, tag=tag, async_op=True))

    def _record(self, action: Action, start: float, cpu: float) -> None:
        began, end = self._began, time.perf_counter()
        self.spans.append(Span(*action, start - began, end - began, time.thread_time() - cpu))


def other_parameters(stages: Sequence[chainer.Link | None], comm: Communicator) -> Others:
    """Check the stages of a pipeline; return the parameters of other ranks' stages.

    Raises:
        InvalidArgumentError: the number of stages is not the number of ranks, or this rank's stage
            is no link.
        UnsupportedError: two stages share a parameter.
    """
    where = f"[rank {comm.rank} of {comm.size}]"
    if not isinstance(stages, (list, tuple)) or len(stages) != comm.size:
        count = len(stages) if isinstance(stages, (list, tuple)) else type(stages).__name__
        raise InvalidArgumentError(
            f"Pipeline: {count} stages (expected a list of {comm.size}, one stage for each rank) "
            f"{where}. Combine layers into one stage with chainer.Sequential."
        )
    for rank, stage in enumerate(stages):
        if not isinstance(stage, chainer.Link) and (stage is not None or rank == comm.rank):
            raise InvalidArgumentError(
                f"Pipeline: {type(stage).__name__} as stage {rank} (expected a chainer.Link) "
                f"{where}. Only a stage of another rank may be None."
            )
    names: dict[int, tuple[int, str]] = {}
    foreign: Others = {}
    for rank, stage in enumerate(stages):
        for path, parameter in stage.namedparams() if stage is not None else ():
            owner, name = names.setdefault(id(parameter), (rank, path))
            if owner != rank:
                raise UnsupportedError(
                    f"Pipeline: {path} of stage {rank} is {name} of stage {owner}, too, but each "
                    f"stage needs its own parameters {where}. Put the layers that use it into one "
                    "stage."
                )
            if rank != comm.rank:
                foreign[id(parameter)] = weakref.ref(parameter), f"{path} of stage {rank}"
    return foreign


def pieces(given: Any, sizes: Sequence[int]) -> list[_Arrays]:
    """Cut an array, or each of a tuple, along its first axis."""
    if given is None:
        return []
    arrays = [bare(array) for array in (given if isinstance(given, tuple) else (given,))]
    ends = np.cumsum(sizes).tolist()
    return [tuple(x[end - size : end] for x in arrays) for size, end in zip(sizes, ends)]


def _refuse_skips(outputs: _Arrays, others: Others, comm: Communicator) -> None:
    """Refuse a graph that reaches into another stage: gradients would be lost or counted twice.

    Raises:
        UnsupportedError: the graph uses a parameter of another stage.
    """
    for node in _leaves(outputs):
        variable = node.get_variable_or_none()
        reference, name = others.get(id(variable), (None, ""))
        if reference is not None and reference() is variable:
            raise UnsupportedError(
                f"Pipeline: this stage uses {name}: a skip connection across stages [rank "
                f"{comm.rank} of {comm.size}]. A stage sees only the outputs of the previous "
                "stage. Return the array as a further output, and pass it on."
            )


def _leaves(outputs: _Arrays) -> Iterator[Any]:
    """Yield the nodes from which ``outputs`` are computed and which no function computes."""
    todo = [y.node for y in outputs if isinstance(y, chainer.Variable)]
    seen = set()
    while todo:
        node = todo.pop()
        if node.creator_node is None:
            yield node
        elif node.creator_node not in seen:
            seen.add(node.creator_node)
            todo += node.creator_node.inputs
