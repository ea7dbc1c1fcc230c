"""A request with its plan, which a communicator remembers for later calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.request import Request

__all__ = ["Planned"]


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
