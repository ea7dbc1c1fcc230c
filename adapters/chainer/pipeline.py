"""``Pipeline``: a model cut into stages, one a rank, and batches that go through in pieces.

The order of the passes is that of :mod:`collective.training.pipelines`. Of each micro-batch a rank
receives the arrays that the stage before returned, with their shapes and dtypes, and sends on its
own; the gradients come back the same way. Sends are in the background, so that a rank goes on to
its next pass; receives are not, so that the time outside of the passes is the time of waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer

from collective.communicator import Communicator
from collective.communicator.rows import split_sizes
from collective.contract.copying import NotCopied
from collective.errors import (
    CommunicatorClosedError,
    InvalidArgumentError,
    MismatchError,
    ShapeError,
)
from collective.training.pipelines import Span, check_options, check_same, order

from .passage import ARRAYS, Passage, other_parameters, pieces

__all__ = ["Pipeline"]


class Pipeline(NotCopied):
    """A model cut into stages, one on each rank, trained on micro-batches.

    ::

        pipe = Pipeline([front, back], comm, microbatches=8)   # rank 0 has front, rank 1 back
        optimizer = chainer.optimizers.SGD().setup(pipe.stage)
        for x, t in batches:
            pipe.stage.cleargrads()
            loss = pipe.step(x, t, F.softmax_cross_entropy)    # on the last rank, elsewhere None
            optimizer.update()

    A stage is called as ``stage(*arrays)`` with what the one before returned, one variable or a
    tuple of some, and the first with ``x``. It sees nothing else: what a later stage needs is
    passed on by all between them.

    Random numbers and batch statistics are those of micro-batches.

    Collective: every rank makes it, and calls :meth:`step` and :meth:`predict` in one order.

    Args:
        stages: one link a rank. Of other ranks' there may be None, so that no memory is needed for
            them.
        comm: the ranks, in the order of the stages. The pipeline makes a communicator of its own
            of it.
        microbatches: into how many pieces a batch is cut, as ``numpy.array_split`` does.
        schedule: ``"1f1b"``, which keeps ``stages - rank`` micro-batches at most for the backward
            pass, or ``"gpipe"``, which keeps all.
        reduction: what the loss of a micro-batch is over its samples, ``"mean"`` or ``"sum"``. The
            loss and the gradients of a step are the same of the whole batch: micro-batches count
            by their samples in the one case, and are added in the other. A mean over anything
            else, such as the labels that ``softmax_cross_entropy`` does not ignore, is neither:
            take its sum.

    Attributes:
        stage: this rank's link; its gradients are of the whole batch after a step.
        timeline: of the last step, when this rank computed what: seconds since the ranks agreed
            on the step. Where arrays are on a GPU, when it was enqueued.

    Raises:
        InvalidArgumentError: a number or an option is none of those allowed, there are not as many
            stages as ranks, or this rank's is no link.
        MismatchError: the ranks' options differ; on every rank.
        UnsupportedError: two stages share a parameter.
    """

    instead = "Copy its stage, and make a Pipeline of the copies on all ranks."

    def __init__(
        self,
        stages: Sequence[chainer.Link | None],
        comm: Communicator,
        *,
        microbatches: int,
        schedule: str = "1f1b",
        reduction: str = "mean",
    ) -> None:
        check_options(microbatches, schedule, reduction)
        self._others = other_parameters(stages, comm)
        check_same(comm, microbatches, schedule, reduction)
        self.stage: Any = stages[comm.rank]
        self.timeline: tuple[Span, ...] = ()
        # So that its messages are not taken for the program's own.
        self._comm = comm.dup()
        self._microbatches, self._mean = microbatches, reduction == "mean"
        self._actions = order(schedule, comm.rank, comm.size, microbatches)
        self._failure = ""

    def step(
        self, x: Any = None, target: Any = None, loss: Callable[..., Any] | None = None
    ) -> float | None:
        """Compute the loss of a batch and add its gradients to those of the stage's parameters.

        Collective: every rank calls it.

        Args:
            x: at the first stage, an array or a variable of samples, or a tuple of some. Ignored
                elsewhere.
            target: at the last stage, the same with as many samples, or None. Ignored elsewhere.
            loss: at the last stage, is called with what the stage returns and, if there is one,
                the target of the micro-batch, and returns one number. None if the last stage
                itself takes the target last, if there is one, and returns the loss, as
                ``chainer.links.Classifier`` does. Ignored elsewhere.

        Returns:
            At the last stage the loss of the batch; None elsewhere.

        Raises:
            InvalidArgumentError, ShapeError: ``x`` or ``target`` is no array, the numbers of
                samples differ, or there are fewer than micro-batches; on every rank, before
                anything is computed, and the pipeline can be used.
            MismatchError: another rank called something else; as before.
            ShapeError: the loss is not one number.
            UnsupportedError: a stage uses another's parameters.
            PeerFailedError: another rank's stage raised.
            CommunicatorClosedError: this rank's stage raised in an earlier step, or another's. All
                ranks have to make a new pipeline; gradients are of some micro-batches only.
        """
        samples = self._agree("step", x, target, loss)
        sizes = split_sizes("Pipeline.step", samples, self._microbatches, None)
        shares = [size / samples if self._mean else 1.0 for size in sizes]
        with self._ended_by_errors():
            passage = Passage(self.stage, self._comm, pieces(x, sizes), self._others)
            targets = pieces(target, sizes) if passage.last else []
            for action in self._actions:
                if action.kind == "forward":
                    labels = targets[action.microbatch] if targets else ()
                    passage.forward(action, labels, loss, shares[action.microbatch])
                else:
                    passage.backward(action)
            passage.finish()
        self.timeline = tuple(passage.spans)
        return sum(map(float, passage.losses)) if passage.last else None

    def predict(self, x: Any = None) -> Any:
        """Compute the model's output in micro-batches, without gradients and not in training mode.

        For a last stage that takes no target.

        Collective: every rank calls it.

        Args:
            x: as of :meth:`step`.

        Returns:
            At the last stage an array, or a tuple of some, of all samples; None elsewhere.

        Raises:
            As :meth:`step`.
        """
        samples = self._agree("predict", x)
        count = min(samples, self._microbatches)
        sizes = split_sizes("Pipeline.predict", samples, count, None)
        with (
            self._ended_by_errors(),
            chainer.no_backprop_mode(),
            chainer.using_config("train", False),
        ):
            passage = Passage(self.stage, self._comm, pieces(x, sizes), self._others)
            found = [passage.evaluate(microbatch) for microbatch in range(count)]
            passage.finish()
        if not passage.last:
            return None
        joined = tuple(self.stage.xp.concatenate(each) for each in zip(*found))
        return joined if passage.several else joined[0]

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """End the pipeline, for all ranks, if the body raises.

        Messages of the body may be on their way: another step would take them for its own.
        """
        try:
            yield
        except BaseException as error:
            self._comm.__exit__(type(error), error, error.__traceback__)
            self._failure = (
                f"an earlier call failed: {type(error).__name__}: {error}. Make another Pipeline, "
                "on all ranks."
            )
            raise

    def _agree(
        self, what: str, x: Any, target: Any = None, loss: Callable[..., Any] | None = None
    ) -> int:
        """Compare what the ranks are about to do; return the number of samples.

        Raises:
            As :meth:`step`; the same on every rank.
        """
        if self._failure:
            raise CommunicatorClosedError(f"Pipeline.{what}: {self._failure}")
        comm = self._comm
        mine: list[Any] = [what, None, None, ""]
        try:
            if comm.rank == 0:
                mine[1] = _samples(what, "x", x)
            if comm.rank == comm.size - 1 and target is not None:
                mine[2] = _samples(what, "target", target)
            if comm.rank == comm.size - 1 and loss is not None and not callable(loss):
                raise InvalidArgumentError(
                    f"Pipeline.{what}: {type(loss).__name__} as loss; a function of the last "
                    "stage's output and the target, as chainer.functions.softmax_cross_entropy."
                )
        except InvalidArgumentError as error:
            mine[3] = str(error)
        with self._ended_by_errors():
            every = comm.all_gather_object(mine)
        where = f"[rank {comm.rank} of {comm.size}]"
        for rank, (theirs, _, _, refused) in enumerate(every):
            if theirs != every[0][0]:
                raise MismatchError(
                    f"Pipeline: rank 0 called {every[0][0]} and rank {rank} {theirs} {where}. Call "
                    "the same on every rank."
                )
            if refused:
                raise InvalidArgumentError(f"{refused} [rank {rank} of {comm.size}]")
        samples, targets = every[0][1], every[-1][2]
        least = self._microbatches if what == "step" else 1
        if samples < least:
            raise ShapeError(
                f"Pipeline.{what}: x has {samples} samples; at least one for each of the "
                f"{least} micro-batches {where}. Pass more, or make the pipeline with "
                "fewer microbatches."
            )
        if targets not in (None, samples):
            raise ShapeError(
                f"Pipeline.{what}: x has {samples} samples on rank 0, target {targets} on rank "
                f"{comm.size - 1}; equally many {where}. Pass both of the same batch."
            )
        return int(samples)


def _samples(what: str, name: str, given: Any) -> int:
    """Return how many samples an array or a tuple of some has.

    Raises:
        InvalidArgumentError: it is something else, or they differ.
    """
    arrays = given if isinstance(given, tuple) else (given,)
    if not arrays or not all(isinstance(each, ARRAYS) and each.ndim for each in arrays):
        kinds = ", ".join(type(each).__name__ for each in arrays)
        raise InvalidArgumentError(
            f"Pipeline.{what}: {kinds or 'nothing'} as {name}; an array or a variable of samples, "
            "or a tuple of some. chainer.dataset.concat_examples makes them of a list of examples."
        )
    lengths = [len(each) for each in arrays]
    if len(set(lengths)) > 1:
        raise InvalidArgumentError(
            f"Pipeline.{what}: {lengths} samples in the arrays of {name}; equally many in each."
        )
    return lengths[0]
