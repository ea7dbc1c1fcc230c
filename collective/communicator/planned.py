"""A request with its plan: what a communicator remembers of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.request import Request

__all__ = ["Planned"]


class Planned:
    """Request with its plan.

    Args:
        request: what all ranks must agree on.
        plan: moves the data, given two buffers and a deadline: the transport's, or one in its
            place.
        fixed: true if calls that differ are always an error. Such calls are compared before
            anything is sent where the program asks for that (``check="always"``).
        compares: true if ``plan`` only compares the ranks' calls, and moves nothing.
        takes_gpus: true if the plan takes arrays on GPUs where they are.

    Attributes:
        comparison: compares the ranks' calls before this one is made; None until it is needed.
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
