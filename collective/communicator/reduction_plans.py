"""How reductions are checked and planned, whatever the arrays are in."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from collective.algorithms import arithmetic
from collective.contract.work import Work
from collective.errors import (
    CollectiveError,
    CommunicatorAbortedError,
    DtypeError,
    InvalidArgumentError,
    UnsupportedError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.ops import ReduceOp, as_op
from collective.request import Disagreement, Request

from .calls import Array
from .plan import Planned
from .straight import StraightCalls

if TYPE_CHECKING:
    from collective.contract.backend import Plan

__all__ = ["ReductionPlans"]


class ReductionPlans(StraightCalls):
    """The part of a communicator that plans reductions."""

    def _reduction(
        self,
        key: tuple[Any, ...],
        root: int | None = None,
        elements: Sequence[int] | None = None,
        **options: Any,
    ) -> Planned:
        """Check a reduction, and plan it for now and later.

        Args:
            key: by which it is known: operation, dtype, shape, op, order, whether it is on the CPU,
                and whatever else tells it from others.
            elements: of ``reduce_scatter``, how many each rank gets.
            options: what else the ranks have to agree on.

        Raises:
            InvalidArgumentError, DtypeError, UnsupportedError: it cannot be made.
        """
        what, dtype, shape, op, order, on_host = key[:6]
        if order not in (None, "rank"):
            raise InvalidArgumentError(f"{what}: order {order!r}; 'rank' or None {self._who}.")
        reducer, ordered = as_op(op), order == "rank"
        try:
            arithmetic.check(reducer, dtype)
        except DtypeError as error:
            raise DtypeError(f"{what}: {error} {self._who}") from None
        takes_gpus = on_host or self._backend.supports(what, reducer, dtype, ordered)
        if takes_gpus and not on_host:
            options["device"] = "cuda" if self._enqueues else None
        else:
            self._check_able(what, reducer, dtype)
        if options.get("counts") is not None:
            options["counts"] = list(map(int, options["counts"]))
        request = Request(
            what, dtype, shape, op=reducer, ordered=ordered, root=root, elements=elements, **options
        )
        plan = self._backend.plan(request)
        if reducer.function is not None:
            outcome = self._backend.plan(request.step(1, "barrier"))
            plan = functools.partial(self._fold, plan, outcome)
        return self._remember(key, Planned(request, plan, takes_gpus=takes_gpus))

    def _fold(
        self, fold: Plan, outcome: Plan, src: Buffer, dst: Buffer | None, seconds: float
    ) -> None:
        """Fold with a user's operator, and return when all ranks have.

        A rank whose operator raised does not come. Otherwise the others would go on with a result
        that they cannot tell from a right one. MPI in particular has no way to stop a reduction
        from within.

        Args:
            fold: the transport's part.
            outcome: the barrier after it.
        """
        end = time.monotonic() + seconds
        try:
            _finish(fold(src, dst, seconds))
        except (Disagreement, CommunicatorAbortedError):
            raise  # nothing has been folded, or all ranks know why
        except CollectiveError as error:
            self._half_done(error)  # it may be the operator's
            raise
        _finish(outcome(None, None, max(0.0, end - time.monotonic())))

    def _refuse_long(self, what: str, array: Array, dtype: DType, op: str | ReduceOp) -> None:
        """Refuse a Python integer if the result might have more than 64 bits.

        Python's have as many as they need, so that one that wraps would be wrong in silence. What
        the other ranks have is not known: it is taken to be as much.
        """
        if dtype.kind != "i":
            return
        number, name = int(array), as_op(op).name
        worst = {"sum": abs(number) * self.size, "prod": abs(number) ** self.size}.get(name, 0)
        if worst >= 2**63:
            raise DtypeError(
                f"{what}: op {name} of {number}; if {self.size} ranks have as much the result "
                f"takes more than 64 bits {self._who}. Pass float(x), or numpy.int64(x), which "
                "wraps; or use all_gather_object."
            )

    def _check_able(self, what: str, op: ReduceOp, dtype: DType) -> None:
        able = self.capabilities
        if op.name not in able.ops or dtype.name not in able.dtypes:
            other = "'nccl', which does it on GPUs" if dtype.kind == "f" else "'shm' or 'threads'"
            raise UnsupportedError(
                f"{what}: op {op} on {dtype} is not supported by backend "
                f"{self._backend.name!r} (ops {', '.join(sorted(able.ops))}; dtypes "
                f"{', '.join(sorted(able.dtypes))}) {self._who}. Use backend={other}."
            )


def _finish(work: Work[Any] | None) -> None:
    """Wait for what a transport may have left running."""
    if work is not None:
        work.wait()
