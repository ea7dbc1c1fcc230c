"""A request with what the transport has made of it, so that it can be made again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.request import Request

__all__ = ["Planned"]


class Planned:
    """A request with its plan.

    Attributes:
        request: what all ranks have to agree on.
        plan: makes it, of two buffers and seconds: the transport's, or what stands for it.
        compares: whether the ranks' calls are only compared, and nothing is moved.
        takes_gpus: whether it takes arrays of GPUs, if they are such, where they are.
        comparison: what compares the ranks' calls before it is made, once there is one.
    """

    __slots__ = ("compares", "comparison", "plan", "request", "takes_gpus")

    def __init__(
        self, request: Request, plan: Plan, *, compares: bool = False, takes_gpus: bool = True
    ) -> None:
        self.request = request
        self.plan = plan
        self.compares = compares
        self.takes_gpus = takes_gpus
        self.comparison: Planned | None = None
