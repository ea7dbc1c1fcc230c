"""The native core: C for the few operations that would cost most time in Python.

The core is an extension module. It is built if there is a C compiler, and the package works without
it. :func:`status` says whether the core is in use and, if not, why. The setting ``disable``, as in
``COLLECTIVE_DISABLE=native``, switches it off. Its results have the same bits as those of the
Python code.

The C files lie beside this one:

- ``folds.c`` and ``fold_loops.h`` have the arithmetic of reductions; ``folding.c`` is its
  interface, and folds several arrays along the steps of a tree.
- ``sums.c`` computes checksums of results.
- ``shared.c`` and ``staging.c`` have the collectives over shared memory; ``plan.c`` and
  ``shared_type.c`` are their interface.
- ``messages.c`` has the messages between two ranks; ``messages_type.c`` is its interface.
- ``views.c`` finds the addresses of arrays' elements; ``holding.c`` keeps the elements there.
- ``record.c`` keeps the records of the flight recorder.
- ``method.c``, ``call.c``, ``message.c`` and ``door.c`` make plain calls of communicators with no
  Python code in between; ``method.h`` says how.
- ``unlocked.c`` makes calls for libraries in C, without the interpreter lock.
- ``objects.c`` has what the types of all these files share.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from collective.deadline import Deadline
from collective.platform import cache_bytes

if TYPE_CHECKING:
    from ._core import Door, InThread, Ring, Shared

__all__ = ["HEAD_BYTES", "HEAD_ROOM", "NOBODY", "PROTOCOL", "Chosen", "Exchange", "Heads",
           "cached_bytes", "chosen", "door", "failure", "fold", "forget", "gate", "handle", "heads",
           "holder", "in_thread", "messages", "method", "ring", "runner", "schedule", "see_frozen",
           "see_tensors", "shared", "status", "sums", "switch", "turn"]  # fmt: skip

#: Version on which this package and the extension must agree, and the cores of any two ranks.
PROTOCOL = 32

#: Bytes of a head, and bytes of it that can hold the elements of a short array.
HEAD_BYTES, HEAD_ROOM = 1024, 896
#: Passed in place of a rank: nothing is sent, or nothing is received.
NOBODY = -2
#: ``exchange(x, to, out, source, tag, deadline, heads)``; see :func:`messages`.
Exchange = Callable[[Any, int, Any, int, int, Deadline, int], Any]
_Function = TypeVar("_Function")
_REBUILD = "build it again: pip install -e ."
_USUAL, _LEAST = 32 << 20, 16 << 20
# A longer cache serves more than the ranks of one job: in a virtual machine it also serves the
# other machines on the host.
_MOST = 96 << 20


class SharedCallbacks(Protocol):
    """Callbacks from C into Python for calls over shared memory."""

    def wait(
        self, request: Any, deadline: Deadline, rank: int, offset: int, value: int, most: int
    ) -> None:
        """Wait until a counter that ``rank`` writes has reached ``value``.

        Args:
            request: the call that waits.
            deadline: for the wait.
            rank: the rank that writes the counter.
            offset: bytes from the segment's beginning to the counter.
            value: the value to wait for; a higher one will do.
            most: the highest value that the counter may have.

        Raises:
            Exception: the counter is above ``most``, or does not reach ``value``.
        """

    def differ(self, request: Any, deadline: Deadline) -> None:
        """Raise an error that says that the ranks' calls differ."""

    def fail(self, request: Any) -> None:
        """Raise the error that explains why the ranks cannot go on."""

    def refuse(self, request: Any, rank: int, what: str) -> None:
        """Raise an error, since ``rank`` has written an impossible value to shared memory."""

    def unreadable(self, request: Any, rank: int) -> None:
        """Raise an error, since the kernel does not read the memory of ``rank``."""

    def moved(self, request: Any) -> None:
        """Raise an error, since an array of the running call has got other memory."""


class Heads(Protocol):
    """Functions for the heads of plain arrays, as :meth:`collective.Communicator.send` has them.

    A head is an array of uint8. It begins with 128 bytes that describe an array. The room behind
    them holds the elements of a short array.
    """

    def write_head(self, x: Any, head: Any) -> int | None:
        """Write the head of ``x``, with the elements if there is room; return the bytes of ``x``.

        Return None, and write nothing, if ``x`` is not plain.
        """

    def read_head(self, head: Any, out: Any) -> bool:
        """Return whether ``out`` fits the array that ``head`` describes.

        If it fits and the elements are in the head, copy them to ``out``.
        """

    def room_in(self, out: Any) -> int | None:
        """Return the bytes of ``out``; None if ``out`` is not plain, or read-only."""

    def view(self, array: Any) -> tuple[int, int, int, tuple[int, ...], bool] | None:
        """Return address, bytes, dtype, shape and writability; None if ``array`` is not plain."""


class Chosen:
    """The extension that is in use.

    Attributes:
        extension: the extension, or None.
        reason: if ``extension`` is None, the reason.
    """

    def __init__(self) -> None:
        self.extension: ModuleType | None = None
        self.reason = ""


#: The extension that is in use now; :func:`switch` sets it.
chosen = Chosen()


def switch(on: bool) -> None:
    """Use the extension from now on, if there is one; with ``on=False`` stop using it.

    Folds that callers already have stay as they are, since both kinds give the same bits.
    """
    chosen.extension, chosen.reason = _load() if on else (None, "switched off")


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    if "t" in sys.abiflags and _is_limited():
        return None, f"built for a Python with a GIL; {_REBUILD}"
    try:
        from . import _core
    except ImportError as error:
        if error.name == f"{__name__}._core" or "cannot import name '_core'" in str(error):
            if sys.maxsize <= 2**32:
                return None, "not built: it needs a 64-bit Python"
            return None, "not built: a wheel without it, or no C compiler at installation"
        return None, f"cannot be loaded: {error}"
    return _checked(_core)


def _is_limited() -> bool:
    # Python 3.13 without a GIL finds a core of the limited API, and cannot load it.
    spec = importlib.util.find_spec(f"{__name__}._core")
    return spec is not None and str(spec.origin).endswith(".abi3.so")


def _checked(extension: ModuleType) -> tuple[ModuleType | None, str]:
    version = getattr(extension, "PROTOCOL", None)
    if version != PROTOCOL:
        return None, (
            f"built for protocol {version}, but this package has protocol {PROTOCOL}; {_REBUILD}"
        )
    extension.set_cached(cached_bytes())
    return extension, ""


def cached_bytes() -> int:
    """Return how many bytes of a call's arrays the last cache holds, of all ranks of a host.

    Copies for longer arrays go around the caches.
    """
    nbytes = cache_bytes() or _USUAL
    return min(max(nbytes, _LEAST), _MOST)


def status() -> str:
    """Return ``"in use (avx2)"``, with the loops' instructions, or why the core is not in use."""
    if chosen.extension is None:
        return f"not in use: {chosen.reason}"
    return f"in use ({chosen.extension.LEVELS[-1]})"


def door(ring: Any, queue: list[Any], rank: int, size: int) -> Door | None:
    """Return a fast path in C from a communicator's methods to a transport's plans.

    C makes the calls on plain arrays. Python makes all other calls. See :func:`method`.

    Args:
        ring: the record of calls, from :func:`ring`.
        queue: the queue of the communicator's lane, which is empty if no call is in flight.
        rank, size: those of the communicator.

    Returns:
        None if C is not in use, or if ``ring`` is not a ring of C.
    """
    extension = chosen.extension
    if extension is None or not isinstance(ring, extension.Ring):
        return None
    native_door: Door = extension.Door(ring, queue, rank, size)
    return native_door


class _NoExtension:
    """Base class for use without the extension."""


def gate() -> type:
    """Return the class that paths of calls derive from.

    With the extension, the attributes ``timeout``, ``door``, ``door_of_pieces``,
    ``door_of_scatter``, ``exchange`` and ``lanes`` are members in C. So no call has to look them
    up by name. Without the extension the class is empty.
    """
    extension, _ = _load()
    return _NoExtension if extension is None else cast("type", extension.Gate)


def handle() -> type:
    """Return the class that communicators derive from.

    With the extension, the attribute ``_path`` is a member in C. Without the extension the class
    is empty.
    """
    extension, _ = _load()
    return _NoExtension if extension is None else cast("type", extension.Handle)


def method(function: _Function, kind: type) -> _Function | None:
    """Return a method in C that stands in front of a communicator's method in Python.

    The method makes a plain call through the door of the communicator's path, or by the path's
    ``exchange``. It passes every other call to ``function``. For a call in C, Python creates no
    frame, sorts no arguments and does not look for the calling code. The method has the name,
    docstring, signature and source of ``function``.

    Args:
        function: all_reduce, reduce, scan, reduce_scatter, broadcast, scatter, all_gather, gather,
            all_to_all, barrier, send, recv or sendrecv.
        kind: the class of the calls. C passes it to the path when it needs a plan or cannot go on.

    Returns:
        None if there is no extension.
    """
    extension, _ = _load()
    if extension is None:
        return None
    in_c = extension.Method(function, kind)
    return cast("_Function", functools.update_wrapper(in_c, cast("Callable[..., Any]", function)))


def fold(op: str, dtype: int, reference: _Function) -> _Function:
    """Return ``reference`` in C: ``fold(a, b, out=c)`` sets c to ``a op b``, elementwise.

    C folds arrays that are contiguous and aligned, and that have the same length and the dtype's
    storage. The array c may be a or b. For all other arguments C calls ``reference``. A long fold
    releases the interpreter lock. If both operands of a sum or product are NaN, the result is the
    left one.

    Args:
        op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"band"``, ``"bor"``, ``"bxor"``,
            ``"land"`` or ``"lor"``.
        dtype: the code of the element type, as in :mod:`collective.memory.dtypes`.
        reference: the same fold in Python.

    Returns:
        ``reference`` itself if C is not in use or has no such fold.
    """
    if chosen.extension is None:
        return reference
    native_fold: _Function = chosen.extension.make_fold(op, dtype, reference)
    return native_fold


def schedule(
    op: str, dtype: int, inputs: int, scratch: int, results: int, steps: bytes
) -> Callable[[list[Any], list[Any]], bool] | None:
    """Return ``run(inputs, results)`` in C, which folds lists of arrays along ``steps``.

    ``run`` returns False, and has done nothing, if it cannot take the arrays: it takes arrays as
    :func:`fold` does, of one length, and no result may overlap another array.

    Args:
        op, dtype: as for :func:`fold`.
        inputs, scratch, results: numbers of slots. Slots are numbered in this order.
        steps: three int32 for each step: the slots of the left and of the right operand, and of the
            result. Without a right operand (-1) the step copies.

    Returns:
        None if C is not in use or has no such fold.
    """
    extension = chosen.extension
    if extension is None:
        return None
    run: Callable[[list[Any], list[Any]], bool] | None = extension.make_schedule(
        op, dtype, inputs, scratch, results, steps
    )
    return run


def sums() -> Callable[[Any], tuple[int, int]] | None:
    """Return a function of the bytes of a contiguous array: their two sums, as in ``sums.h``.

    Returns:
        None if C is not in use.
    """
    extension = chosen.extension
    if extension is None:
        return None
    of_bytes: Callable[[Any], tuple[int, int]] = extension.sums
    return of_bytes


def in_thread() -> InThread | None:
    """Return an object with an attribute ``site`` for each thread; None without the extension.

    The attribute is None at first. If it is set, it is the place in the program that the thread's
    calls come from, and every :func:`ring` records it.
    """
    extension, _ = _load()
    if extension is None:
        return None
    sites: InThread = extension.InThread()
    return sites


def ring(libraries: list[str]) -> Ring | None:
    """Return a record of the last calls of a communicator, for its flight recorder.

    Args:
        libraries: prefixes of the names of the files that do not belong to the program. The ring
            reads this list at each call, so a prefix may be added later.

    Returns:
        None if C is not in use.
    """
    if chosen.extension is None:
        return None
    native_ring: Ring = chosen.extension.Ring(libraries)
    return native_ring


def runner() -> Any:
    """Return a capsule with a function of C that makes unlocked calls; None without the extension.

    Its type is ``int (int64_t first, int64_t second, const void *in, void *out)``. It makes the
    call that ``Door.unlock`` has registered by the two numbers, on other arrays of the same
    lengths. Any thread may call it, without the interpreter lock. If it does not return 0, its
    caller has Python make the call in the same thread, by
    :class:`collective.communicator.repeated.RepeatedCall`.
    """
    extension, _ = _load()
    return None if extension is None else extension.run


def failure() -> BaseException | None:
    """Return the error of this thread's last call by :func:`runner`, once; else None."""
    extension, _ = _load()
    error: BaseException | None = None if extension is None else extension.failure()
    return error


def forget(first: int, second: int) -> None:
    """Remove the call that ``Door.unlock`` has registered by these numbers, if there is one."""
    extension, _ = _load()
    if extension is not None:
        extension.forget(first, second)


def turn() -> Any:
    """Return a lock that threads in :func:`runner` can hold, too, as a context manager."""
    extension, _ = _load()
    return threading.Lock() if extension is None else extension.Turn()


def see_tensors(tensor: Any, parameter: type, resizable_at: int) -> None:
    """Let C view PyTorch's tensors as it views NumPy's arrays, which saves calls into Python.

    C uses the functions that DLPack 1.2 defines for this, if the version of PyTorch has them.

    Args:
        tensor, parameter: the classes ``torch.Tensor`` and ``torch.nn.Parameter``. C views tensors
            of exactly these classes.
        resizable_at: bytes from the address of a storage (``_cdata``) to the flag that says whether
            it may be resized, or 0. C clears the flag while a call uses a tensor.
    """
    extension, _ = _load()
    functions = getattr(tensor, "__dlpack_c_exchange_api__", None)
    if extension is not None and functions is not None:
        extension.see_tensors(functions, tensor, parameter, resizable_at)


def see_frozen(
    frozen: type, read: Callable[[Any], Any], wrap: Callable[[Any], Any], place: str
) -> None:
    """Let C make small calls on arrays that never change, which saves calls into Python.

    C makes the call on NumPy's array that ``read`` returns. Only the first class counts. If the
    place of an array is the same object as that of the last array that ``read`` has read, C calls
    :func:`numpy.asarray` instead. So ``read`` may refuse an array for its place, or call that
    function, and do nothing else.

    Args:
        frozen: class of the arrays. C takes arrays of exactly this class.
        read: function that returns NumPy's array over the memory of an array. For any other result,
            or an exception, Python makes the call.
        wrap: function that returns the framework's array for a new NumPy array, a result.
        place: name of the attribute that says where an array is. Its value never changes.
    """
    extension, _ = _load()
    if extension is not None:
        extension.see_frozen(frozen, read, wrap, place)


def holder() -> Callable[[Any], list[Any]] | None:
    """Return :func:`collective.memory.holding.hold` in C; None if there is no extension."""
    extension, _ = _load()
    return None if extension is None else cast("Callable[[Any], list[Any]]", extension.hold)


@functools.cache
def _page_map(process: int) -> int:
    """Return a descriptor by which C asks for the pages of this process; -1 if there is none.

    It stays open as long as the process. A forked process opens another one.
    """
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def shared(
    segment: Any,
    rank: int,
    size: int,
    lines: int,
    calls: int,
    areas: int,
    area_bytes: int,
    least_long: int,
    crowded: bool,
    callbacks: SharedCallbacks,
    pids: Sequence[int] | None = None,
) -> Shared | None:
    """Return the shared memory of the ranks of one host, for collectives in C.

    All ranks make the same calls, one at a time. A call releases the interpreter lock where that
    pays. It uses ``callbacks`` when it has polled for a moment in vain. If the ranks' digests
    differ, nothing has been written. If a callback raises for any other reason, the call stays
    incomplete, and the ranks must not use this object again.

    Args:
        segment: a writable buffer, shared and zero at first. Its first word is not 0 when the
            ranks cannot go on.
        rank, size: this rank, and the number of ranks.
        lines: bytes from the segment's beginning to the ranks' lines. Each line has 64 words, which
            collective/native/shared.h names.
        calls: bytes to the descriptions of this rank's last calls: 64 of 256 bytes, in a ring.
        areas: bytes from the segment's beginning to the ranks' areas, two for each rank.
        area_bytes: length of one area, a multiple of 64.
        least_long: bytes from which on a call is long, at most a quarter of an area.
        crowded: whether ranks share cores, so that a wait soon yields the processor.
        callbacks: the callbacks into Python.
        pids: the ranks' processes, if all ranks can read each other's memory.

    Returns:
        None if C is not in use.
    """
    if chosen.extension is None:
        return None
    memory: Shared = chosen.extension.Shared(
        segment, rank, size, lines, calls, areas, area_bytes, least_long, crowded, callbacks,
        pids, _page_map(os.getpid()),
    )  # fmt: skip
    return memory


def messages(
    segment: Any,
    rank: int,
    size: int,
    rings: int,
    ring_bytes: int,
    looks: int,
    claims: bool,
    python: Any,
    lines: int = 0,
    pids: Sequence[int] | None = None,
) -> Exchange | None:
    """Return ``exchange``, a function that sends and receives messages over shared memory.

    ``exchange(x, to, out, source, tag, deadline, heads)`` sends the array x to a rank, receives
    into out from another rank, or does both. Neither half waits for the other. To omit a half,
    pass None for its array and :data:`NOBODY` for its rank. As the source, -1 is any rank.

    With ``heads=True`` an array travels behind its head, as :meth:`collective.Communicator.send`
    sends it; with 3, the kind of an object's head, the bytes of an encoded object. With
    ``heads=False`` only the bytes travel, and the receiver must know their number. Several
    threads may call the function at a time, but for one direction, peer and tag only one after
    another.

    The function returns

    - the rank that sent the message for out, or -1 if the source is :data:`NOBODY`. From then on
      the caller may change x.
    - ``NotImplemented`` if nothing was done: an array is not plain, a rank or a tag is wrong, or
      some rank has failed.
    - the deadline of the call if x was sent, but nothing was received from the source: out is None,
      out overlaps x, or the message that has arrived does not fit out, and stays where it is.

    If a method of ``python`` raises, the exchange stays incomplete, and the ranks must not use
    their rings again.

    Args:
        segment: a writable buffer, shared and zero at first. Its first word is not 0 when a rank
            has failed.
        rank: this rank, one of ``size``.
        rings: bytes from the segment's beginning to the rings, one for each ordered pair of ranks.
            A ring has a page of counts and ``ring_bytes``, a number of whole pages.
        looks: number of polls of a ring before the processor is yielded.
        claims: whether a receiver may fetch the rest of a message if its sender is slow.
        python: an object with three methods. ``wait(advance, to, source, tag, deadline)`` returns
            when ``advance()`` returns 0. The result of ``advance()`` is the sum of 1, while a
            message is to be sent, and 2, while a message is to be received.
            ``moved(to, source, tag)`` raises an error, since an array has got other memory.
            ``refuse(rank, what, to, source, tag)`` raises an error, since a rank has sent damaged
            data.
        lines: bytes to the ranks' lines, as in :func:`shared`, which wake the ranks that nap. If
            0, no rank is woken.
        pids: the ranks' processes, if all ranks can read each other's memory.

    Returns:
        None if C is not in use.
    """
    if chosen.extension is None:
        return None
    exchange: Exchange = chosen.extension.make_messages(
        segment, rank, size, rings, ring_bytes, looks, claims, python, lines, pids,
        _page_map(os.getpid()),
    )  # fmt: skip
    return exchange


def streams(
    flag: Any,
    rank: int,
    size: int,
    sockets: list[int],
    early: list[bytes],
    idle: float,
    python: Any,
) -> Exchange | None:
    """Return ``exchange``, a function that sends and receives messages over connected sockets.

    The function is that of :func:`messages`.

    Args:
        flag: a writable buffer of 8 bytes, zero at first; not 0 when the ranks cannot go on.
        rank, size: this rank, and the number of ranks.
        sockets: descriptor of the stream socket to each rank, which does not block; that of this
            rank is ignored. C closes them, by :func:`close_streams` or when the function is freed.
        early: bytes that have been read from each socket already.
        idle: seconds without progress after which Python waits instead of C.
        python: an object with the methods ``wait``, ``refuse`` and ``moved``, as in
            :func:`messages`; ``ended(rank, what, to, source, tag)``, which raises an error, since
            the connection to a rank has ended; and ``differ(request, deadline)``, which raises the
            error of a :func:`replay` whose calls differ. There ``advance(seconds)`` first sleeps
            for at most that time, until something may move; its result has 4 added if a message has
            moved in part. In a replay the argument ``tag`` is its request.

    Returns:
        None if C is not in use.
    """
    if chosen.extension is None:
        return None
    exchange: Exchange = chosen.extension.make_streams(
        flag, rank, size, sockets, early, idle, python
    )
    return exchange


def exchange_both() -> Callable[..., Any]:
    """Return the function that sends over one transport while it receives over another.

    ``exchange_both(sending, x, to, receiving, out, source, tag, limit, heads)`` sends ``x`` to rank
    ``to`` with the function ``sending``, and receives ``out`` from rank ``source`` with the
    function ``receiving``. One of the two is of :func:`messages`, the other one of
    :func:`streams`. The other arguments and the result are those of either function. C refuses
    arrays that overlap.
    """
    function: Callable[..., Any] = cast("Any", _load()[0]).exchange_both
    return function


def cut_streams(exchange: Exchange, rank: int = -1) -> None:
    """End the connection to a rank, or all connections: every thread that waits there wakes up."""
    cast("Any", _load()[0]).cut_streams(exchange, rank)


def stream_infos(exchange: Exchange, count: int) -> list[bytes]:
    """Return the first ``count`` bytes of TCP_INFO of the connection to each rank.

    The bytes of this rank, and of a connection that is closed, are empty.
    """
    infos: list[bytes] = cast("Any", _load()[0]).stream_infos(exchange, count)
    return infos


def close_streams(exchange: Exchange, at_once: bool = False) -> None:
    """Close the sockets of a function of :func:`streams` once no thread uses them, or at once."""
    cast("Any", _load()[0]).close_streams(exchange, at_once)


def replay(exchange: Exchange, schedule: Any, inside: Exchange | None = None) -> Any | None:
    """Return the plan of a recorded call, from the function of :func:`streams`.

    The plan is a function of two Buffers and a deadline, with a method ``plain`` that takes arrays.

    Args:
        exchange: function of the rank's messages.
        schedule: a :class:`collective.algorithms.schedules.Schedule`.
        inside: function of :func:`messages` for the ranks of this host, if the call has steps on a
            second level.

    Returns:
        None if C has no fold that the schedule needs.
    """
    # The rank keeps the core that it has connected with, also if it is switched off later.
    extension, steps = cast("Any", _load()[0]), schedule.wire()
    if steps is None:
        return None
    return extension.make_replay(
        exchange, schedule.request, schedule.mark, schedule.pieces, schedule.start, schedule.nsrc,
        schedule.ndst, schedule.scratch, steps, schedule.fold,
        -1 if schedule.dtype is None else schedule.dtype.code, inside,
    )  # fmt: skip


def heads() -> Heads | None:
    """Return the functions for the heads of arrays; None if C is not in use."""
    return cast("Heads | None", chosen.extension)


switch("native" not in os.environ.get("COLLECTIVE_DISABLE", "").replace(" ", "").split(","))
