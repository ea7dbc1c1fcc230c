"""Checks and plans of calls that fold the ranks' arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from collective.algorithms import arithmetic
from collective.contract.failure import Failure
from collective.contract.recorder import Recorder
from collective.contract.work import Work
from collective.deadline import Deadline
from collective.errors import (
    CollectiveError,
    CommunicatorAbortedError,
    DtypeError,
    InvalidArgumentError,
    UnsupportedError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.memory.numbers import NUMBERS
from collective.ops import ReduceOp, as_op
from collective.request import Disagreement, Request
from collective.shards import Shards

from ..path import Path
from ..planned import Planned
from ..rows import Rows, split_sizes
from .call import Call
from .views import Array, View

if TYPE_CHECKING:
    from collective.contract.backend import Backend, Plan

__all__ = ["CuttingFoldCall", "FoldCall", "finish", "guarded"]


class FoldCall(Call):
    """Call that folds the ranks' arrays with an operator.

    Attributes:
        x, op, out, order: arguments that the caller passed.
        root: rank that gets the result; None for a result on every rank.
        receives: whether this rank gets a result.
    """

    x: Any
    op: str | ReduceOp
    out: Any
    order: str | Shards | None
    root: int | None = None
    receives: bool = True

    def plan_fold(
        self, key: Any, dtype: DType, shape: tuple[int, ...], on_host: bool,
        elements: Sequence[int] | None = None, **options: Any,
    ) -> Planned:  # fmt: skip
        """Check a fold, and return its plan, which the path remembers.

        Args:
            key: key by which the path remembers the plan.
            dtype, shape: dtype and shape of this rank's input.
            on_host: whether the input is on the CPU.
            elements: in ``reduce_scatter``, the number of elements that each rank gets.
            options: other values that the ranks must agree on.

        Raises:
            InvalidArgumentError, DtypeError, UnsupportedError: the fold cannot be made.
        """
        path, what, order = self.path, self.operation, self.order
        if order not in (None, "rank"):
            raise InvalidArgumentError(
                f"{what}: order {order!r}; expected 'rank', a collective.Shards or None {path.who}."
            )
        reducer, ordered = self.reducer_of(dtype), order == "rank"
        takes_gpus = on_host or path.backend.supports(what, reducer, dtype, ordered)
        if takes_gpus and not on_host:
            options["device"] = "cuda" if path.enqueues else None
        else:
            self._check_supported(reducer, dtype)
        request = Request(
            what, dtype, shape, op=reducer, ordered=ordered, root=self.root, elements=elements,
            **options,
        )  # fmt: skip
        plan = guarded(path, request, path.backend.plan(request))
        return path.remember(key, Planned(request, plan, fixed=True, takes_gpus=takes_gpus))

    def reducer_of(self, dtype: DType) -> ReduceOp:
        """Return the operator, after a check that it is defined for a dtype."""
        reducer = as_op(self.op)
        try:
            arithmetic.check(reducer, dtype)
        except DtypeError as error:
            raise DtypeError(f"{self.operation}: {error} {self.path.who}") from None
        return reducer

    def _check_supported(self, op: ReduceOp, dtype: DType) -> None:
        able = self.path.capabilities
        if op.name not in able.ops or dtype.name not in able.dtypes:
            other = "'nccl', which does it on GPUs" if dtype.kind == "f" else "'shm' or 'threads'"
            raise UnsupportedError(
                f"{self.operation}: op {op} on {dtype} is not supported by backend "
                f"{self.path.backend.name!r} (ops {', '.join(sorted(able.ops))}; dtypes "
                f"{', '.join(sorted(able.dtypes))}) {self.path.who}. Use backend={other}."
            )

    def refuse_long(self, number: View) -> None:
        """Refuse a Python integer if the result might have more than 64 bits.

        Python integers have any number of bits, so a result that wraps would be silently wrong.
        This rank does not know the other ranks' values, and assumes that they are as large as its
        own.
        """
        if number.adapter is not NUMBERS or number.dtype.kind != "i":
            return
        path, value, name = self.path, int(number.array), as_op(self.op).name
        worst = {"sum": abs(value) * path.size, "prod": abs(value) ** path.size}.get(name, 0)
        if worst >= 2**63:
            raise DtypeError(
                f"{self.operation}: op {name} of {value}; if {path.size} ranks have as large a "
                f"value, the result needs more than 64 bits {path.who}. Pass float(x), or "
                "numpy.int64(x), which wraps; or use all_gather_object."
            )


class CuttingFoldCall(FoldCall):
    """Fold in which each rank gets one piece of the result.

    Attributes:
        counts, axis: arguments that the caller passed.
    """

    counts: Sequence[int] | None
    axis: int

    def cut(self, array: Array) -> tuple[Rows, list[int]]:
        """Return an array's rows along the axis, and the number of rows that each rank gets."""
        rows = Rows(self.operation, array, self.axis)
        return rows, split_sizes(self.operation, rows.length, self.path.size, self.counts)

    @property
    def agreed_counts(self) -> list[int] | None:
        """Counts as the ranks compare them: a list of integers, or None."""
        return None if self.counts is None else list(map(int, self.counts))


def guarded(path: Path, request: Request, plan: Plan) -> Plan:
    """Return a plan that ends once a user's operator has succeeded on all ranks.

    Args:
        path: path of the communicator.
        request: request of the fold.
        plan: plan of the fold. It is returned itself if the operator is one of this library's.
    """
    if request.op.function is None:
        return plan
    outcome = path.backend.plan(request.step(1, "barrier"))
    # The plan must not refer to the path, because the path keeps the plan: the cycle would keep a
    # dropped path alive.
    fail = partial(_fail, path.recorder, path.backend)
    return partial(_fold_with_function, fail, plan, outcome)


def _fold_with_function(
    fail: Callable[[BaseException], None], fold: Plan, outcome: Plan, src: Buffer,
    dst: Buffer | None, deadline: Deadline,
) -> None:  # fmt: skip
    """Fold with a user's operator, and return when the operator has succeeded on all ranks.

    A barrier follows the fold, and a rank whose operator raised does not enter it. Without the
    barrier the other ranks would continue with a result that they cannot distinguish from a correct
    one. MPI in particular has no way to stop a reduction from inside the operator.

    Args:
        fail: function that breaks the communicator.
        fold: plan of the fold, made by the transport.
        outcome: plan of the barrier after the fold.
    """
    try:
        finish(fold(src, dst, deadline))
    except (Disagreement, CommunicatorAbortedError):
        raise  # nothing has been folded, or all ranks know the reason
    except CollectiveError as error:
        fail(error)  # the operator may have raised it, and the other ranks do not know
        raise
    finish(outcome(None, None, deadline))


def _fail(recorder: Recorder, backend: Backend, error: BaseException) -> None:
    recorder.fail()
    backend.abort(Failure.caused_by(backend.rank, error))


def finish(work: Work[Any] | None) -> None:
    """Wait for the work that a plan has returned, if the plan left work in flight."""
    if work is not None:
        work.wait()
