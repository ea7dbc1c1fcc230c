"""Base class of all collective calls of a communicator, and the plan that a call runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from collective.deadline import Deadline
from collective.memory.arrays import adapter_of, known
from collective.request import Disagreement

from ..streams import Near

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.memory.buffer import Spot
    from collective.ops import ReduceOp
    from collective.request import Request
    from collective.shards import Shards

    from ..path import Path

#: Header of another rank's request, as parsed from ``Request.header()``.
Header = dict[str, Any]


class Planned:
    """Request with its plan.

    Args:
        request: request that all ranks must agree on.
        plan: function of two buffers and a deadline that moves the data: the transport's plan, or
            a replacement for it.
        fixed: if true, calls that differ are always an error. If the program sets
            ``check="always"``, such calls are compared before anything is sent.
        compares: if true, ``plan`` only compares the ranks' calls or their results, and moves none
            of the program's data.
        takes_gpus: if true, the plan takes arrays on GPUs without a copy to the host.

    Attributes:
        comparison: plan that compares the ranks' calls before this call; None until it is needed.
    """

    __slots__ = ("compares", "comparison", "fixed", "plan", "request", "takes_gpus")

    def __init__(
        self,
        request: Request,
        plan: Plan,
        *,
        fixed: bool = False,
        compares: bool = False,
        takes_gpus: bool = True,
    ) -> None:
        self.request = request
        self.plan = plan
        self.fixed = fixed
        self.compares = compares
        self.takes_gpus = takes_gpus
        self.comparison: Planned | None = None


class Call(ABC):
    """One collective call of one rank.

    A call is made in four steps:

    1. The constructor stores the arguments of the communicator's method. C passes them by the same
       names, and leaves out those that are None.
    2. :meth:`prepare` views the arrays, finds the plan and determines where the result goes. It
       sends nothing, and afterwards the call may be run several times.
    3. :meth:`run` moves the data and returns the result.
    4. If the ranks' calls differ, :meth:`recover` completes the call, where a difference is
       allowed.

    Args:
        path: path of the communicator.
        x, root, op, out, order, counts, axis, like: arguments that the program passed, as far as
            the method has them.
        hosted: as in :func:`.views.view`.

    Attributes:
        operation: name of the communicator's method.
        rooted, to_root: whether the method has a root; whether only the root gets a result.
        receives: whether this rank gets a result.
        near: the call's array on a GPU, if the call has one; set by :meth:`prepare`.
        several_streams: whether the call's arrays are on several streams of a GPU.
    """

    operation: str
    rooted: bool = False
    to_root: bool = False
    near: Near | None = None
    several_streams: bool = False

    def __init__(
        self, path: Path, x: Any = None, *, root: Any = None, op: str | ReduceOp = "sum",
        out: Any = None, order: str | Shards | None = None, counts: Sequence[int] | None = None,
        axis: int = 0, like: Any = None, hosted: str = "",
    ) -> None:  # fmt: skip
        self.path = path
        self.x = x
        self.root = path.check_rank(self.operation, "root", root) if self.rooted else None
        self.receives = not self.to_root or self.root == path.rank
        self.op = op
        self.out = out if self.receives else None
        self.order = order
        self.counts = counts
        self.axis = axis
        self.like = like
        self.hosted = hosted

    def plan_for_c(self) -> Planned | None:
        """Return the plan of a plain call, for C; None if Python makes it."""
        raise NotImplementedError(f"{type(self).__name__}: C makes no such calls")

    def prepare(self) -> Call:
        """View the arrays, and find the plan; return the call to run.

        The returned call is this one, or another object for nested arrays or arrays on GPUs.
        """
        return self

    @abstractmethod
    def run(self, deadline: Deadline) -> Any:
        """Move the data; return the result.

        Raises:
            Disagreement: the ranks' calls differ; nothing was written.
        """

    def recover(self, headers: Sequence[Header], deadline: Deadline) -> Any:
        """Complete the call after the ranks have found that their calls differ; return the result.

        By default, calls that differ are an error.

        Args:
            headers: headers of the ranks' calls, in rank order.

        Raises:
            MismatchError: the calls differ in more than is allowed.
            Disagreement: another rank has moved on to another call meanwhile.
        """
        self.path.raise_mismatch(headers)

    def perform(self, deadline: Deadline) -> Any:
        """Run the call, and recover where the ranks' calls may differ."""
        try:
            return self.run(deadline)
        except Disagreement as difference:
            # Break the cycle exception → traceback → frame → exception.
            difference.__traceback__ = None
            headers = difference.headers
        return self.go_on(headers, deadline)

    def go_on(self, headers: Sequence[Header], deadline: Deadline) -> Any:
        """Recover once; if the ranks disagree a second time, raise ``MismatchError``."""
        try:
            return self.recover(headers, deadline)
        except Disagreement as difference:
            difference.__traceback__ = None
            headers = difference.headers
        self.path.raise_mismatch(headers)

    # -- arrays on GPUs, see :class:`Straight` -------------------------------------------

    def run_by(self, near: Near | None) -> None:
        """Set the GPU array whose stream the call runs on; None if the call has no GPU array."""
        self.near = near
        self.several_streams = near is not None and self.path.enqueues and bool(near.others)

    def known_plan(self, spot: Spot) -> tuple[Planned | None, tuple[int, ...] | None]:
        """Return the plan of an earlier call on an array like the one at ``spot``, and a shape.

        The plan is None if there was no such call. The shape is that of this rank's result; None if
        this rank gets no result. A spot is the address of a plain array on a GPU, with its dtype
        and shape.
        """
        return None, None


# -- calls on GPU arrays that were planned before --------------------------------------------------


class Straight(Call):
    """Call on GPU arrays that has a plan already, and goes directly to the transport.

    A call on GPU memory is only enqueued, so most of its time would go into inspecting its arrays.
    The arguments of such a call were checked when its plan was made. The plan is found by their
    values, and the spots (address, dtype and shape) of the arrays are enough to run it. A call that
    is not plain, or must be refused, is prepared in full instead.

    Args:
        call: the call.
        planned: plan of the call.
        src, dst: spots of its arrays; ``dst`` is None if this rank gets no result.
        x, out: the arrays, which this object keeps alive until the call is over.
        finish: function that returns the result, if the result is a new array.
    """

    def __init__(
        self, call: Call, planned: Planned, src: Spot, dst: Spot | None, x: Any, out: Any,
        finish: Callable[[], Any] | None,
    ) -> None:  # fmt: skip
        self.path = call.path
        self.operation = call.operation
        self._planned = planned
        self._src = src
        self._dst = dst
        self._x = x
        self._out = out
        self._finish = finish

    @property
    def near(self) -> Near:  # type: ignore[override]
        """The call's input; needed only if the call is not run at once."""
        return Near(self._src, adapter_of(self._x))

    def run(self, deadline: Deadline) -> Any:
        self.path.carry(self._planned, self._src, self._dst, deadline)
        return self._out if self._finish is None else self._finish()


def spot_of(path: Path, x: Any) -> Spot | None:
    """Return the spot of a plain array on this rank's GPU; None for any other value."""
    adapter = known.get(type(x))
    spot = None if adapter is None else adapter.spot(x)
    # path.gpu is set once a call that was prepared in full has had an array on this rank's GPU.
    return spot if spot is not None and spot.device is path.gpu else None


def straight(call: Call, x: Any, out: Any) -> Call | None:
    """Return a call as :class:`Straight` if it has a plan and its result is plain; else None.

    The result is plain if it is on the input's stream, and either is the input itself or does not
    overlap the input. The transport must enqueue calls.
    """
    src = spot_of(call.path, x)
    if src is None:
        return None
    planned, shape = call.known_plan(src)
    if planned is None or not planned.takes_gpus:
        return None
    dst: Spot | None = src
    finish: Callable[[], Any] | None = None
    if shape is None:
        dst = out = None
    elif out is None:
        adapter = adapter_of(x)
        result = adapter.empty(shape, src.dtype, src.device, src.stream)
        dst = adapter_of(result).spot(result)
        finish = partial(adapter.wrap, result, src.dtype)
    elif out is not x or src.shape != shape:
        kind = known.get(type(out))
        dst = None if kind is None else kind.spot(out)
    if shape is not None and dst is not src:
        if dst is None or dst.shape != shape or dst.dtype is not src.dtype:
            return None
        size, distance = src.dtype.storage.itemsize, dst.address - src.address
        if dst.stream is not src.stream or -size * dst.count < distance < size * src.count:
            return None
    return Straight(call, planned, src, dst, x, out, finish)
