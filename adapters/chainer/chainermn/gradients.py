"""Gradients of a Chainer model, averaged over the ranks in one piece of symmetric memory.

ChainerMN's double-buffering optimizer is here, too: it needs two of these, and no GPU's streams.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from chainermn.optimizers import _MultiNodeOptimizer

from collective import Communicator, MismatchError, Work
from collective.adapters.chainer.state import MARKS, agree, compare_parameters, marks_of, sampled
from collective.inner import Gradients, Parameter
from collective.training.replicas import few

# Number of bytes that are copied and reduced at once. They should stay in the processor's cache.
_BUCKET_BYTES = 8 << 20


class PackedGradients:
    """Mean of a model's gradients over the ranks: packed, reduced, and given to the model.

    The memory is reused from step to step, and the gradients that the model gets are views of it.
    The next :meth:`begin` overwrites them. The model's previous gradients (read-only, not
    contiguous, or one array for two parameters) are only read.

    The buffer also contains two notes of this rank (:func:`marks_of`): one on its parameters and on
    which of them have no gradient, the other one on their values. So the comparison of the ranks
    costs no message. Values may differ from the beginning, since ChainerMN does not require equal
    models here. But values that were equal must stay so.

    Args:
        comm: communicator that connects the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._layout: list[tuple[str, tuple[int, ...], str]] = []
        self._engine: Gradients | None = None
        self._named: list[tuple[str, Any]] = []
        self._missing: list[str] = []
        self._zero_fill = True
        self._works: list[Work[Any]] = []
        self._marks: list[float] = []
        self._step = 0
        self._equal = False  # whether the values were equal on all ranks in the last step

    def begin(
        self,
        model: chainer.Link,
        zero_fill: bool,
        wire: np.dtype[Any] | None,
        async_op: bool = False,
    ) -> None:
        """Copy the gradients of ``model`` to the buffer, and average them over the ranks.

        Collective: every rank calls it.

        Args:
            model: link whose parameters are taken in the order of their names; parameters without
                data are skipped.
            zero_fill: whether a gradient that is None counts as zeros.
            wire: dtype in which gradients are reduced; by default their own.
            async_op: if true, the reductions run in the background, and :meth:`wait` waits.
        """
        named = sorted(model.namedparams(), key=lambda item: item[0])
        self._named = [(name, param) for name, param in named if param.array is not None]
        layout = [
            (name, tuple(param.shape), (wire or param.dtype).name) for name, param in self._named
        ]
        self._zero_fill = bool(zero_fill)
        self._missing = [name for name, param in self._named if param.grad is None]
        self._note(named, layout)
        if self._engine is not None and layout != self._layout:
            # The other ranks may not have changed their model: they reduce the buckets meanwhile.
            for view in self._engine.views[:-1]:
                view[...] = 0
            self._reduce(self._engine, fill=False)
            self._compare()
            self._engine = None  # frees its memory before the new engine allocates
        if self._engine is None:
            self._engine = self._lay_out(layout)
            self._layout = layout
        self._reduce(self._engine, async_op=async_op)

    def _note(self, named: list[tuple[str, Any]], layout: list[Any]) -> None:
        """Set the marks of this rank's parameters, and of their values."""
        own = [self._zero_fill, layout, [] if self._zero_fill else self._missing]
        own.append([name for name, param in named if param.array is None])
        values = zlib.crc32(sampled(self._named, self._step))
        self._marks = marks_of(zlib.crc32(repr(own).encode(), self._step)) + marks_of(values)
        self._step += 1

    @np.errstate(all="ignore")  # a gradient may overflow the wire's dtype on some rank only
    def _reduce(self, engine: Gradients, fill: bool = True, async_op: bool = False) -> None:
        """Average the buckets over the ranks, with the model's gradients if ``fill`` is true."""
        for bucket in engine.buckets:
            for number, view in zip(bucket.members, bucket.views):
                if number == len(engine.views) - 1:
                    view[...] = chainer.backend.get_array_module(view).array(self._marks)
                elif fill and (grad := self._named[number][1].grad) is not view:
                    view[...] = 0 if grad is None else grad
            # The reduction starts here, while the copied bytes are in the processor's cache.
            array = bucket.array
            work = self._comm.all_reduce(array, op="avg", out=array, async_op=async_op)
            if async_op:
                self._works.append(work)

    def _lay_out(self, layout: Sequence[tuple[str, tuple[int, ...], str]]) -> Gradients:
        parameters = [Parameter(*fields) for fields in layout]
        kind = layout[0][2] if layout else "float32"
        parameters.append(Parameter("(notes of the ranks)", (2 * MARKS,), kind))
        on_gpu = [p.array for _, p in self._named if not isinstance(p.array, np.ndarray)]
        return Gradients(
            self._comm,
            parameters,
            like=on_gpu[0] if on_gpu else None,
            bucket_bytes=_BUCKET_BYTES,
            first_bytes=_BUCKET_BYTES,
        )

    def changes(self, named: Sequence[tuple[str, Any]]) -> list[str]:
        """Return how the set of parameters differs from that of the last step."""
        before = {name for name, _ in self._named}
        now = {name for name, param in named if param.array is not None}
        added = [f"{name} was added or initialised" for name in sorted(now - before)]
        return added + [f"{name} was deleted" for name in sorted(before - now)]

    def wait(self) -> None:
        """Wait for the reductions that :meth:`begin` has started."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def unpack(self) -> None:
        """Set the model's gradients to the means.

        Raises:
            MismatchError: gradients are None on some ranks and not on others; every rank raises
                it. The model's gradients are unchanged.
            ValueError: Chainer's debug mode is on and a mean is not finite.
        """
        assert self._engine is not None, "unpack() before begin()"
        self.wait()
        self._compare()
        views = self._engine.views
        if chainer.is_debug():
            self._check_finite()
        for (_, param), view in zip(self._named, views):
            if param.grad is view or (param.grad is None and not self._zero_fill):
                continue
            param.grad = view if view.dtype == param.dtype else view.astype(param.dtype)

    def _compare(self) -> None:
        """Compare the ranks' notes that came with the gradients; every rank raises the error."""
        assert self._engine is not None
        marks = self._engine.views[-1]
        same, equal = agree(marks[:MARKS]), agree(marks[MARKS:])
        drifted = self._equal and not equal
        if not same or drifted:
            compare_parameters("multi_node_mean_grad", self._named, self._comm, values=drifted)
        if not same:
            self._explain()
        self._equal = equal

    def _explain(self) -> None:
        """Raise an error, on every rank, that lists the missing gradients, if these differ."""
        every: list[Any] = self._comm.all_gather_object([self._zero_fill, self._missing])
        if all(theirs == every[0] or (theirs[0] and every[0][0]) for theirs in every):
            return
        lines = [
            f"  rank {rank}: "
            + ("zero_fill=True" if filled else "None for " + (few(missing) or "no parameter"))
            for rank, (filled, missing) in enumerate(every)
        ]
        raise MismatchError(
            f"multi_node_mean_grad: the ranks have gradients of different parameters [rank "
            f"{self._comm.rank} of {self._comm.size}]:\n" + "\n".join(lines) + "\nPass "
            "zero_fill=True on every rank to replace missing gradients by zeros, or use the same "
            "parameters on all ranks."
        )

    def _check_finite(self) -> None:
        names = [
            name
            for (name, _), view in zip(self._named, self._engine.views if self._engine else [])
            if not bool(chainer.backend.get_array_module(view).isfinite(view).all())
        ]
        if names:
            raise ValueError(
                f"multi_node_mean_grad: the mean gradient is not finite, of {few(names)} [rank "
                f"{self._comm.rank} of {self._comm.size}]: training diverged on some rank. "
                "Lower the learning rate or the loss scale."
            )


class DoubleBufferingOptimizer(_MultiNodeOptimizer):  # type: ignore[misc]  # Chainer has no types
    """Optimizer that averages the gradients of a step while the next step computes its own.

    As in ChainerMN, a step applies the means of the previous step. The first ``update()`` gives
    all ranks rank 0's parameters. The second one only starts the reduction of its gradients. Means
    that are in flight when training ends are not applied.

    Args:
        actual_optimizer: optimizer that applies the means.
        communicator: ``CollectiveCommunicator`` that connects the ranks.
        zero_fill: whether gradients that are None count as zeros.
    """

    def __init__(self, actual_optimizer: Any, communicator: Any, zero_fill: bool) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill)
        # Set in the instance's dict, because the base class's __setattr__ passes attributes on to
        # the optimizer inside.
        own = self.__dict__
        own["_buffers"] = [PackedGradients(communicator.comm) for _ in range(2)]
        own["_under_way"] = False

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        """Compute gradients, if ``lossfun`` is given, and apply the means of the previous step."""
        target = self.target
        if lossfun is not None:
            loss = lossfun(*args, **kwds)
            if getattr(self, "_use_cleargrads", True):
                target.cleargrads()
            else:
                target.zerograds()
            loss.backward(loss_scale=self.actual_optimizer._loss_scale)
            del loss
        own = self.__dict__
        before, current = own["_buffers"]
        arrived = own["_under_way"]
        if self.is_changed(target):
            if arrived:
                before.wait()
            own["_under_way"] = False
            self.communicator.bcast_data(target)
            return
        wire = self.communicator.get_config("allreduce_grad_dtype")
        current.begin(target, self.zero_fill, wire, async_op=True)
        own["_buffers"], own["_under_way"] = [current, before], True
        if arrived:
            before.unpack()
            self.actual_optimizer.update(None, *args, **kwds)
