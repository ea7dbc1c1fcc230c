"""Gradients of a Chainer model, averaged over the ranks in one piece of symmetric memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from collective.communicator import Communicator
from collective.contract.work import Work
from collective.errors import MismatchError
from collective.training.gradients import Gradients, Parameter

__all__ = ["PackedGradients"]

# Number of elements in the buffer that identify which gradients a rank has: bytes of a digest.
_MARKS = 8
# Number of bytes that are copied and reduced at once. They should stay in the processor's cache.
_BUCKET_BYTES = 8 << 20
# Largest deviation of an average of such bytes that is rounding, as in float16, and no difference.
_ROUNDING = 0.25


class PackedGradients:
    """Mean of a model's gradients over the ranks: packed, reduced, and given to the model.

    The memory is reused from step to step, and the gradients that the model gets are views of it.
    The next :meth:`begin` overwrites them. The model's previous gradients (read-only, not
    contiguous, or one array for two parameters) are only read.

    The buffer also contains some bytes of a digest of the set of gradients that are None on this
    rank. If all ranks have the same digest, the average of these bytes is equal to each rank's
    own. So the comparison costs no message.

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
        self._marks = np.zeros(_MARKS)

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
        if self._engine is None or layout != self._layout:
            self._engine = None  # frees its memory before the new engine allocates
            self._engine = self._lay_out(layout)
            self._layout = layout
        self._zero_fill = bool(zero_fill)
        self._missing = [name for name, param in self._named if param.grad is None]
        missing = "" if self._zero_fill else repr(self._missing)
        digest = hashlib.blake2b(f"{self._zero_fill}{missing}".encode(), digest_size=_MARKS)
        self._marks = np.frombuffer(digest.digest(), np.uint8).astype(np.float64)
        for bucket in self._engine.buckets:
            for number, view in zip(bucket.members, bucket.views):
                grad = self._contents(number, view)
                if grad is not view:
                    view[...] = grad
            # The reduction starts here, while the copied bytes are in the processor's cache.
            array = bucket.array
            work = self._comm.all_reduce(array, op="avg", out=array, async_op=async_op)
            if async_op:
                self._works.append(work)

    def _contents(self, number: int, view: Any) -> Any:
        """Return the contents for the place of a gradient, or of the digest, in the buffer."""
        if number == len(self._named):
            return chainer.backend.get_array_module(view).asarray(self._marks.astype(view.dtype))
        grad = self._named[number][1].grad
        return 0 if grad is None else grad

    def _lay_out(self, layout: Sequence[tuple[str, tuple[int, ...], str]]) -> Gradients:
        parameters = [Parameter(*fields) for fields in layout]
        kind = layout[0][2] if layout else "float32"
        parameters.append(Parameter("(which gradients there are)", (_MARKS,), kind))
        on_gpu = [p.array for _, p in self._named if not isinstance(p.array, np.ndarray)]
        return Gradients(
            self._comm,
            parameters,
            like=on_gpu[0] if on_gpu else None,
            bucket_bytes=_BUCKET_BYTES,
            first_bytes=_BUCKET_BYTES,
        )

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
        views = self._engine.views
        here = chainer.backends.cuda.to_cpu(views[-1])
        off = abs(here.astype(np.float64) - self._marks)
        if not bool((off < _ROUNDING).all()):
            self._explain()
        if chainer.is_debug():
            self._check_finite()
        for (_, param), view in zip(self._named, views):
            if param.grad is view or (param.grad is None and not self._zero_fill):
                continue
            param.grad = view if view.dtype == param.dtype else view.astype(param.dtype)

    def _explain(self) -> None:
        """Raise an error, on every rank, that lists the missing gradients of each rank."""
        every: list[Any] = self._comm.all_gather_object([self._zero_fill, self._missing])
        lines = [
            f"  rank {rank}: "
            + ("zero_fill=True" if filled else "None for " + (_few(missing) or "no parameter"))
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
                f"multi_node_mean_grad: the mean gradient is not finite, of {_few(names)} [rank "
                f"{self._comm.rank} of {self._comm.size}]: training diverged on some rank. "
                "Lower the learning rate or the loss scale."
            )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + f" and {len(names) - 10} more" * (len(names) > 10)
