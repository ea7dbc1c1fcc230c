"""``Pipeline``: a model cut into stages, one on each rank, and batches cut into micro-batches.

The order of the passes is that of :mod:`collective.training.pipelines`. For each micro-batch, a
rank receives the arrays that the previous stage returned, with their shapes and dtypes, and sends
its own arrays on. The gradients return the same way. Sends run in the background, so that a rank
continues with its next pass. Receives block, so that time outside of the passes is waiting time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer

from collective import (
    Communicator,
    CommunicatorClosedError,
    InvalidArgumentError,
    MismatchError,
    ShapeError,
)
from collective.algorithms.pieces import split_sizes
from collective.inner import NotCopied, comm_or_current
from collective.training.pipelines import Span, check_options, order
from collective.training.replicas import check_settings

from .passage import ARRAYS, Passage, other_parameters, pieces


class Pipeline(NotCopied):
    """Model cut into stages, one on each rank, trained on micro-batches.

    ::

        pipe = Pipeline([front, back], comm, microbatches=8)   # rank 0 has front, rank 1 back
        optimizer = chainer.optimizers.SGD().setup(pipe.stage)
        for x, t in batches:
            pipe.stage.cleargrads()
            loss = pipe.step(x, t, F.softmax_cross_entropy)    # on the last rank, elsewhere None
            optimizer.update()

    A stage is called as ``stage(*arrays)`` with the output of the previous stage, one variable or a
    tuple of variables. The first stage is called with ``x``. A stage sees nothing else. If a later
    stage needs an array, all stages in between have to pass it on.

    Random numbers and batch statistics are those of micro-batches.

    Collective: every rank makes it, and calls :meth:`step` and :meth:`predict` in the same order.

    Args:
        stages: links, one for each rank. Stages of other ranks may be None, so that they need no
            memory here.
        comm: ranks in the order of the stages; None: those of the current communicator. The
            pipeline uses a duplicate of it.
        microbatches: number of pieces into which a batch is cut, as ``numpy.array_split`` does.
        schedule: ``"1f1b"``, which keeps at most ``stages - rank`` micro-batches for the backward
            pass, or ``"gpipe"``, which keeps all.
        reduction: how the loss of a micro-batch combines its samples, ``"mean"`` or ``"sum"``. The
            loss and the gradients of a step are then the same as for the whole batch. For
            ``"mean"``, micro-batches are weighted by their numbers of samples; for ``"sum"``, they
            are added. A mean over anything else, such as the labels that ``softmax_cross_entropy``
            does not ignore, is neither: use its sum.

    Attributes:
        stage: this rank's link; after a step its gradients are those of the whole batch.
        timeline: times of this rank's passes in the last step, in seconds since the ranks agreed on
            the step. If arrays are on a GPU, these are the times when passes were enqueued.

    Raises:
        InvalidArgumentError: a number or an option is not allowed, the number of stages is not the
            number of ranks, or this rank's stage is no link.
        MismatchError: the ranks' options differ; every rank raises it.
        UnsupportedError: two stages share a parameter.
    """

    instead = "Copy its stage, and make a Pipeline of the copies on all ranks."

    def __init__(
        self,
        stages: Sequence[chainer.Link | None],
        comm: Communicator | None = None,
        *,
        microbatches: int,
        schedule: str = "1f1b",
        reduction: str = "mean",
    ) -> None:
        comm = comm_or_current(comm, "Pipeline")
        check_options(microbatches, schedule, reduction)
        self._others = other_parameters(stages, comm)
        options = {"microbatches": microbatches, "schedule": schedule, "reduction": reduction}
        check_settings(comm, options, "Pipeline")
        self.stage: Any = stages[comm.rank]
        self.timeline: tuple[Span, ...] = ()
        # The pipeline has its own communicator, so that its messages never mix with the program's.
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
            x: at the first stage, an array or a variable of samples, or a tuple of these. Ignored
                on other stages.
            target: at the last stage, the same with as many samples, or None. Ignored on other
                stages.
            loss: at the last stage, a function that returns one number. It is called with the
                stage's output and, if there is one, the micro-batch's target. None: the last stage
                itself takes the target as its last argument, if there is one, and returns the loss,
                as ``chainer.links.Classifier`` does. Ignored on other stages.

        Returns:
            At the last stage the loss of the batch; None on other stages.

        Raises:
            InvalidArgumentError, ShapeError: ``x`` or ``target`` is no array, the numbers of
                samples differ, or there are fewer samples than micro-batches. Every rank raises it,
                before anything is computed, and the pipeline stays usable.
            MismatchError: another rank called another method; again on every rank, and the pipeline
                stays usable.
            ShapeError: the loss is not one number.
            UnsupportedError: a stage uses another stage's parameters.
            PeerFailedError: another rank's stage raised.
            CommunicatorClosedError: a stage raised in an earlier step, on this rank or another. All
                ranks have to make a new pipeline. The gradients are those of some micro-batches
                only.
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
        """Compute the model's output in micro-batches, without gradients, in evaluation mode.

        Use it with a last stage that takes no target.

        Collective: every rank calls it.

        Args:
            x: that of :meth:`step`.

        Returns:
            At the last stage an array or a tuple of arrays, of all samples; None on other stages.

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
            outputs = [passage.evaluate(microbatch) for microbatch in range(count)]
            passage.finish()
        if not passage.last:
            return None
        joined = tuple(self.stage.xp.concatenate(arrays) for arrays in zip(*outputs))
        return joined if passage.several else joined[0]

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """End the pipeline, on all ranks, if the body raises.

        Messages of the body may be in flight, and another step would receive them as its own.
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
        """Check that the ranks are about to do the same; return the number of samples.

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
                    f"Pipeline.{what}: {type(loss).__name__} as loss (expected a function of the "
                    "last stage's output and the target). Pass a function such as "
                    "chainer.functions.softmax_cross_entropy."
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
                    "the same method on every rank."
                )
            if refused:
                raise InvalidArgumentError(f"{refused} [rank {rank} of {comm.size}]")
        samples, targets = every[0][1], every[-1][2]
        least = self._microbatches if what == "step" else 1
        if samples < least:
            raise ShapeError(
                f"Pipeline.{what}: x has {samples} samples (expected at least one for each of the "
                f"{least} micro-batches) {where}. Pass more samples, or make the pipeline with "
                "fewer microbatches."
            )
        if targets not in (None, samples):
            raise ShapeError(
                f"Pipeline.{what}: x has {samples} samples on rank 0, target {targets} on rank "
                f"{comm.size - 1} (expected equal numbers) {where}. Pass both of the same batch."
            )
        return int(samples)


def _samples(what: str, name: str, given: Any) -> int:
    """Return the number of samples of an array or of a tuple of arrays.

    Raises:
        InvalidArgumentError: ``given`` is something else, or the numbers of samples differ.
    """
    arrays = given if isinstance(given, tuple) else (given,)
    if not arrays or not all(isinstance(array, ARRAYS) and array.ndim for array in arrays):
        kinds = ", ".join(type(array).__name__ for array in arrays)
        raise InvalidArgumentError(
            f"Pipeline.{what}: {kinds or 'nothing'} as {name} (expected an array or a variable of "
            "samples, or a tuple of these). chainer.dataset.concat_examples makes them from a list "
            "of examples."
        )
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise InvalidArgumentError(
            f"Pipeline.{what}: {lengths} samples in the arrays of {name} (expected equal numbers). "
            "Pass arrays of the same samples."
        )
    return lengths[0]
