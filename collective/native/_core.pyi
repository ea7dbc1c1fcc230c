"""The extension module, of module.c. Use it through :mod:`collective.native`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from collective.deadline import Deadline

from . import SharedCallbacks

_Function = TypeVar("_Function")

PROTOCOL: int
#: The instruction levels that the folds can use on this processor; the last one is the default.
LEVELS: tuple[str, ...]
#: Capsule with the function that makes unlocked calls; see :func:`collective.native.runner`.
run: Any

def make_fold(op: str, dtype: int, reference: _Function, level: int = ..., /) -> _Function: ...
def make_schedule(
    op: str, dtype: int, inputs: int, scratch: int, results: int, steps: bytes, /
) -> Callable[[list[Any], list[Any]], bool] | None: ...
def sums(array: Any, /) -> tuple[int, int]: ...
def see_tensors(exchange_api: Any, tensor: type, parameter: type, resizable_at: int, /) -> None: ...
def hold(arrays: Any, /) -> list[Any]: ...
def see_frozen(
    frozen: type, read: Callable[[Any], Any], wrap: Callable[[Any], Any], place: str, /
) -> None: ...
def view(array: Any, /) -> tuple[int, int, int, tuple[int, ...], bool] | None: ...
def set_cached(nbytes: int, /) -> None: ...
def nap(segment: Any, asleep: int, seconds: float, ready: Callable[[], bool], /) -> bool: ...
def wake(segment: Any, asleep: Sequence[int], /) -> None: ...
def make_messages(
    segment: Any,
    rank: int,
    size: int,
    rings: int,
    ring_bytes: int,
    looks: int,
    claims: bool,
    python: Any,
    lines: int = ...,
    pids: Sequence[int] | None = ...,
    page_map: int = ...,
    /,
) -> Callable[[Any, int, Any, int, int, Deadline, bool], Any]: ...
def forget(first: int, second: int, /) -> None: ...
def failure() -> BaseException | None: ...
def write_head(x: Any, head: Any, /) -> int | None: ...
def read_head(head: Any, out: Any, /) -> bool: ...
def room_in(out: Any, /) -> int | None: ...

class InThread:
    """See :func:`collective.native.in_thread`."""

    site: str | None

class Ring:
    """Record of the last calls, for a flight recorder; see :func:`collective.native.ring`."""

    started: int
    finished: int
    left: int
    interval: int

    def __init__(self, libraries: list[str], /) -> None: ...
    def begin(self, request: Any, compares: bool = ..., /) -> None: ...
    def end(self) -> None: ...
    def kept(self, number: int, /) -> tuple[Any, bool, Any, int, float, float] | None: ...

class Door:
    """Fast path from calls to plans; see :func:`collective.native.door`."""

    def __init__(self, ring: Ring, queue: list[Any], rank: int, size: int, /) -> None: ...
    def unlock(
        self,
        first: int,
        second: int,
        plan: Any,
        request: Any,
        arrays: tuple[int, int, bool, bool, int, int, int],
        site: str,
        seconds: float,
        turn: Turn | None,
        /,
    ) -> bool:
        """Let threads without the interpreter lock make a call; return whether they can.

        Args:
            first, second: numbers of the call; see :func:`collective.native.runner`.
            plan: plan of the call; for any other object than a :class:`Plan` the result is False.
            request: the request, for the flight recorder.
            arrays: which array the plan reads, and which one it writes (-1: none, 0: the input,
                1: the output); whether the input is copied to the output afterwards; whether the
                output is set to zero; code of the dtype; lengths of input and output in bytes.
            site: the place in the program that the calls come from.
            seconds: timeout of the calls.
            turn: lock that the calls hold.
        """
    def lock(self) -> None:
        """Let Python make all calls from now on that have been unlocked."""

class Turn:
    """Lock for threads without the interpreter lock; see :func:`collective.native.turn`."""

    def __enter__(self) -> Turn: ...
    def __exit__(self, *error: object) -> None: ...

class Gate:
    """Base class of paths; see :func:`collective.native.gate`."""

class Handle:
    """Base class of communicators; see :func:`collective.native.handle`."""

class Method:
    """Method of communicators; see :func:`collective.native.method`."""

    def __init__(self, function: Callable[..., Any], kind: type, /) -> None: ...

class Shared:
    """Shared memory of the ranks of one host; see :func:`collective.native.shared`."""

    def __init__(
        self,
        segment: Any,
        rank: int,
        size: int,
        lines: int,
        calls: int,
        areas: int,
        area_bytes: int,
        least_long: int,
        looks: int,
        callbacks: SharedCallbacks,
        /,
    ) -> None: ...
    def know(
        self, number: int, nbytes: int = 0, addresses: Sequence[int] | None = None, /
    ) -> bool: ...
    def plan(
        self,
        operation: int,
        digest: int,
        root: int,
        elements: Sequence[int] | None,
        op: str | None,
        dtype: int,
        mean: bool,
        request: Any,
        description: bytes,
        otherwise: Callable[[Callable[..., Any], Any, Any, Deadline], Any],
        /,
    ) -> Plan: ...

class Plan:
    """Prepared call, on two Buffers (each may be None) and a deadline; see :meth:`Shared.plan`.

    If the arrays overlap, are not aligned, or are of another class than NumPy's or PyTorch's, the
    call runs ``otherwise``.
    """

    def __call__(self, src: Any, dst: Any, deadline: Deadline, /) -> None: ...
    def summed(
        self, src: Any, dst: Any, deadline: Deadline, /
    ) -> tuple[int, int, int, bytes | None]:
        """Make the call, and compute the sums of what it copies to the result.

        Returns:
            The two sums; the number of bytes that they are of; and for each rank three words of 64
            bits: the sums that it has announced at the end of this call, and the complement of
            their exclusive or. None in place of these if not all ranks have announced their sums.
        """

class Messages:
    """Messages of one rank: ``self`` of the function that :func:`make_messages` returns."""

    def send(self, data: Any, to: int, tag: int, /) -> Posted: ...
    def receive(self, memory: Any, source: int, tag: int, mask: int, wait: bool, /) -> Posted: ...
    def find(self, source: int, tag: int, mask: int, take: bool, /) -> Posted | None: ...
    def cancel(self, posted: Posted, /) -> bool: ...
    def step(self, items: tuple[Posted, ...], any_of: bool, seconds: float, /) -> bool: ...
    def end(self, at_once: bool | None, /) -> tuple[int, int]: ...

class Posted:
    """Posted send or receive; see :class:`collective.contract.mail.Posted`."""

    done: bool
    whole: bool
    state: int
    source: int
    to: int
    tag: int
    nbytes: int
    room: int
    data: memoryview | None
    damage: str | None
