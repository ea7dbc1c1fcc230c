"""What is found out about a call once, so that it can be made again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective.request import Request

__all__ = ["Plan"]


class Plan:
    """A call of the transport's without its buffers and its deadline.

    ``plan.method(src, dst, *plan.arguments, plan.request, seconds)`` makes it.

    Attributes:
        request: what all ranks have to agree on.
        method: of the transport.
        arguments: what it takes between the buffers and the request.
        compares: whether the ranks' calls are only compared, and nothing is moved.
        native: whether it takes arrays of GPUs, if they are such, where they are.
    """

    __slots__ = ("arguments", "compares", "method", "native", "request")

    def __init__(
        self,
        request: Request,
        method: Callable[..., Any],
        *arguments: Any,
        compares: bool = False,
        native: bool = True,
    ) -> None:
        self.request = request
        self.method = method
        self.arguments = arguments
        self.compares = compares
        self.native = native
