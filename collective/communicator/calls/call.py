"""Base class of all collective calls of a communicator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from collective.deadline import Deadline
from collective.request import Disagreement

from ..path import Path
from ..planned import Planned
from ..streams import Near

if TYPE_CHECKING:
    from collective.memory.buffer import Spot


__all__ = ["Call", "Header"]

#: Header of another rank's request, as parsed from ``Request.header()``.
Header = dict[str, Any]


class Call(ABC):
    """One collective call of one rank.

    A call is made in four steps:

    1. The constructor checks and stores the arguments.
    2. :meth:`prepare` views the arrays, finds the plan and determines where the result goes. It
       sends nothing, and afterwards the call may be run several times.
    3. :meth:`run` moves the data and returns the result.
    4. If the ranks' calls differ, :meth:`recover` completes the call, where a difference is
       allowed.

    Args:
        path: path of the communicator.

    Attributes:
        operation: name of the communicator's method.
        near: the call's array on a GPU, if the call has one; set by :meth:`prepare`.
        several_streams: whether the call's arrays are on several streams of a GPU.
    """

    operation: str
    near: Near | None = None
    several_streams: bool = False

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_plain(
        cls, path: Path, x: Any, out: Any, *, op: Any = None, order: Any = None,
        root: Any = None, counts: Any = None,
    ) -> Self:  # fmt: skip
        """Return the call with plain arguments that C has sorted.

        Args:
            x: array whose dtype and shape identify the call in C.
            out: array that receives the result; None if C only needs the plan.
            op, order, root, counts: arguments of the call; None if the operation has none.
        """
        raise NotImplementedError(f"{cls.__name__}: C makes no such calls")

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

    # -- arrays on GPUs, see :mod:`.device` ---------------------------------------------

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
