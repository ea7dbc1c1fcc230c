"""What all calls of a communicator have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from collective.deadline import Deadline
from collective.request import Disagreement

from ..path import Path
from ..planned import Planned
from ..streams import Near

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.memory.buffer import Spot


__all__ = ["Call", "Header"]

#: What another rank asked for, as of ``Request.header``.
Header = dict[str, Any]


class Call(ABC):
    """One collective call of one rank.

    A call is made in four steps. The constructor checks and keeps the arguments. :meth:`prepared`
    views the arrays, finds the plan and settles where the result goes; nothing has been sent then,
    and the call may be run several times. :meth:`run` moves the data and returns the result. If the
    ranks' calls differ, :meth:`recover` goes on where that is allowed.

    Args:
        path: the communicator's path.

    Attributes:
        operation: the method's name.
        near: the call's array on a GPU, if it has one; set by :meth:`prepared`.
        several_streams: whether its arrays are on several streams of a GPU.
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
        """Return the call with arguments that C has sorted, all of them plain.

        Args:
            x: the array by whose dtype and shape C knows the call.
            out: where the result goes; None while C only asks for the plan.
            op, order, root, counts: None where the operation has none.
        """
        raise NotImplementedError(f"{cls.__name__}: C makes no such calls")

    def plan(self) -> Planned | None:
        """Return the plan of a plain call, for C; None if Python makes it."""
        raise NotImplementedError(f"{type(self).__name__}: C makes no such calls")

    def prepared(self) -> Call:
        """View the arrays, and find the plan; return the call to run.

        That is this one, or another form of it: for nested arrays, for arrays on GPUs.
        """
        return self

    @abstractmethod
    def run(self, deadline: Deadline) -> Any:
        """Move the data; return the result.

        Raises:
            Disagreement: the ranks' calls differ; nothing was written.
        """

    def recover(self, headers: Sequence[Header], deadline: Deadline) -> Any:
        """Go on after the ranks have found that their calls differ; return the result.

        By default calls that differ are an error.

        Args:
            headers: the ranks' calls, in rank order.

        Raises:
            MismatchError: the calls differ in more than they may.
            Disagreement: a rank has gone on to another call meanwhile.
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
        """Recover, once: a second disagreement is an error."""
        try:
            return self.recover(headers, deadline)
        except Disagreement as difference:
            difference.__traceback__ = None
            headers = difference.headers
        self.path.raise_mismatch(headers)

    # -- of arrays on GPUs, see :mod:`.device` ------------------------------------------

    def run_by(self, near: Near | None) -> None:
        """Run by the call's arrays on a GPU, if there are such."""
        self.near = near
        self.several_streams = near is not None and self.path.enqueues and bool(near.others)

    def known_plan(self, spot: Spot) -> tuple[Planned | None, tuple[int, ...] | None]:
        """Return the plan of an earlier call on an array like the one at ``spot``, if there is one.

        And the shape of this rank's result; None if it gets none. A spot is where a plain array on
        a GPU is, with its dtype and shape.
        """
        return None, None
