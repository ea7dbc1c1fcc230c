"""The native core: C under what costs most, and only there.

It is an extension module that is built where there is a C compiler; the whole house works without.
:func:`status` says whether it is in use, and why if it isn't. ``COLLECTIVE_NATIVE=off``, or the
setting ``native = "off"``, does without it. What it computes has the bits that Python's side gives.

The C is in the files beside this one. ``folds.c`` and ``fold_loops.h`` have the arithmetic of
reductions, ``shared.c`` and ``staging.c`` the collectives over shared memory, ``messages.c`` the
messages between two ranks; ``module.c``, ``plan_type.c`` and ``messages_type.c`` are Python's
sides of these. ``views.c`` finds out where an array's elements are, ``record.c`` keeps what the
flight recorder tells, and ``door.c`` makes plain calls of communicators without Python in between.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from collective.deadline import Deadline

if TYPE_CHECKING:
    from ._core import Door, InThread, Ring, Shared

__all__ = ["HEAD_BYTES", "HEAD_ROOM", "NOBODY", "PROTOCOL", "Chosen", "Exchange", "Heads",
           "cached_bytes", "chosen", "door", "fold", "gate", "handle", "heads", "in_thread",
           "messages", "method", "ring", "see_tensors", "shared", "status", "switch",
           "viewer"]  # fmt: skip

#: What this package and the extension, and the cores of two ranks, have to agree on.
PROTOCOL = 14

#: The bytes of a head, and how many of them can be those of a short array behind what it says.
HEAD_BYTES, HEAD_ROOM = 1024, 896
#: In place of a rank to which nothing is sent, or from which nothing is received.
NOBODY = -2
#: ``exchange(x, to, out, source, tag, deadline, heads)``; see :func:`messages`.
Exchange = Callable[[Any, int, Any, int, int, Deadline, bool], Any]
_Function = TypeVar("_Function")
_REBUILD = "build it again: pip install -e ."
# Where Linux tells the length of the last cache of a processor, in KiB: of the first, as of all.
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_USUAL, _LEAST = 32 << 20, 16 << 20
# A longer one serves more than the ranks of a job: other machines, if this is a virtual one.
_MOST = 96 << 20


class Callbacks(Protocol):
    """What Python does for calls over shared memory."""

    def wait(
        self, request: Any, deadline: Deadline, rank: int, offset: int, value: int, most: int
    ) -> None:
        """Return when the counter at an offset in bytes, which ``rank`` writes, is ``value``.

        It may be more, up to ``most``. Raise if it is beyond that, or does not come.
        """

    def differ(self, request: Any, deadline: Deadline) -> None:
        """Raise that the ranks' calls differ."""

    def fail(self, request: Any) -> None:
        """Raise why the ranks cannot go on."""

    def refuse(self, request: Any, rank: int, what: str) -> None:
        """Raise that ``rank`` has written to shared memory what no rank writes."""

    def note(self, request: Any) -> int:
        """Describe a call for peers that wonder; return its number, from 1, which then grows."""


class Heads(Protocol):
    """What plain arrays travel behind: as :meth:`collective.Communicator.send` has them.

    A head is an array of uint8: 128 bytes that say what follows, and room for what is short.
    """

    def write_head(self, x: Any, head: Any) -> int | None:
        """Write the head of ``x``, and ``x`` into it if there is room; return the bytes of ``x``.

        None, and nothing is written, if ``x`` is not plain.
        """

    def read_head(self, head: Any, out: Any) -> bool:
        """Return whether ``out`` takes what ``head`` says, which is in it then if it was inside."""

    def room_in(self, out: Any) -> int | None:
        """Return how many bytes ``out`` takes; None if it is not plain, or read-only."""

    def view(self, array: Any) -> tuple[int, int, int, tuple[int, ...], bool] | None:
        """Return address, bytes, dtype, shape and whether it is writable; None if not plain."""


class Chosen:
    """What is in use.

    Attributes:
        extension: the extension, or None.
        reason: why it is None.
    """

    def __init__(self) -> None:
        self.extension: ModuleType | None = None
        self.reason = ""


#: What is in use now; :func:`switch` sets it.
chosen = Chosen()


def switch(on: bool) -> None:
    """Use the extension from now on, if there is one, or don't.

    Folds that were given out before are not taken back: they have the same bits.
    """
    chosen.extension, chosen.reason = _load() if on else (None, "switched off")


def _load() -> tuple[ModuleType | None, str]:
    try:
        from . import _core
    except ImportError as error:
        if error.name == f"{__name__}._core" or "cannot import name '_core'" in str(error):
            return None, "not built: a wheel without it, or no C compiler at installation"
        return None, f"cannot be loaded: {error}"
    return _checked(_core)


def _checked(extension: ModuleType) -> tuple[ModuleType | None, str]:
    theirs = getattr(extension, "PROTOCOL", None)
    if theirs != PROTOCOL:
        return None, f"built for protocol {theirs}, while this is {PROTOCOL}; {_REBUILD}"
    extension.set_cached(cached_bytes())
    return extension, ""


def cached_bytes() -> int:
    """Return how many bytes the last cache holds of a call's arrays, of all ranks of a host.

    From there on, copies go around the caches.
    """
    nbytes = _USUAL
    with contextlib.suppress(OSError, ValueError):
        nbytes = int(_CACHE.read_text().removesuffix("K\n")) << 10
    return min(max(nbytes, _LEAST), _MOST)


def status() -> str:
    """Return ``"in use (avx2)"``, with the instructions its loops take, or why it is not in use."""
    if chosen.extension is None:
        return f"not in use: {chosen.reason}"
    return f"in use ({chosen.extension.LEVELS[-1]})"


def door(ring: Any, queue: list[Any], rank: int, size: int) -> Door | None:
    """Return the way in C from a communicator's methods to a transport's plans.

    It makes calls on plain arrays; all others are made as without C. See :func:`method`.

    Args:
        ring: where calls are recorded, of :func:`ring`.
        queue: of the communicator's lane: it is empty when nothing is under way.
        rank, size: the communicator's.

    Returns:
        None where C is not in use, or the ring isn't C's.
    """
    extension = chosen.extension
    if extension is None or not isinstance(ring, extension.Ring):
        return None
    made: Door = extension.Door(ring, queue, rank, size)
    return made


class _NoExtension:
    """Base class where there is no extension."""


def gate() -> type:
    """Return the class that paths of calls derive from.

    With the extension its attributes ``timeout``, ``door``, ``door_of_pieces``,
    ``door_of_scatter``, ``exchange`` and ``lanes`` are members in C, so that no call has to find
    them by name; without it the class is empty.
    """
    extension, _ = _load()
    return _NoExtension if extension is None else cast("type", extension.Gate)


def handle() -> type:
    """Return the class that communicators derive from.

    With the extension its attribute ``_path`` is a member in C; without it the class is empty.
    """
    extension, _ = _load()
    return _NoExtension if extension is None else cast("type", extension.Handle)


def method(function: _Function, kind: type) -> _Function | None:
    """Return a method in C that stands in front of a communicator's method in Python.

    It makes a plain call through the door of the communicator's path, or by its ``exchange``, and
    passes every other call to ``function``. Where C makes the call, Python needs no frame, sorts no
    arguments and does not search who called it. The method has the name, docstring, signature and
    source of ``function``.

    Args:
        function: all_reduce, reduce, scan, reduce_scatter, broadcast, scatter, all_gather, gather,
            all_to_all, barrier, send, recv or sendrecv.
        kind: the class of the calls, which the path is passed when C needs a plan, or cannot go on.

    Returns:
        None where there is no C.
    """
    extension, _ = _load()
    if extension is None:
        return None
    in_c = extension.Method(function, kind)
    return cast("_Function", functools.update_wrapper(in_c, cast("Callable[..., Any]", function)))


def fold(op: str, dtype: int, reference: _Function) -> _Function:
    """Return ``reference`` in C: ``fold(a, b, out=c)`` sets c to ``a op b``, elementwise.

    It takes arrays that are contiguous and aligned, of one length and of the dtype's storage, of
    which c may be a or b; ``reference`` is called with all others. Python's lock is let go of
    while it computes. Of two NaNs that a sum or product meets the left one stays.

    Args:
        op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"band"``, ``"bor"``, ``"bxor"``,
            ``"land"`` or ``"lor"``.
        dtype: the code of the element type, as in :mod:`collective.memory.dtypes`.
        reference: the same in Python.

    Returns:
        ``reference`` itself where C is not in use or has no such fold.
    """
    if chosen.extension is None:
        return reference
    made: _Function = chosen.extension.make_fold(op, dtype, reference)
    return made


def in_thread() -> InThread | None:
    """Return an object whose ``site`` is another in each thread, None at first; None without C.

    It says where the calls of a thread come from: in every :func:`ring`, too.
    """
    extension, _ = _load()
    if extension is None:
        return None
    made: InThread = extension.InThread()
    return made


def ring(package: str) -> Ring | None:
    """Return what keeps the last calls of a communicator, for its flight recorder.

    Args:
        package: what the names of the files begin with that are not the program's.

    Returns:
        None where C is not in use.
    """
    if chosen.extension is None:
        return None
    made: Ring = chosen.extension.Ring(package)
    return made


def see_tensors(tensor: Any, parameter: type) -> None:
    """Have C see PyTorch's tensors as it sees NumPy's arrays, which spares calls into Python.

    It goes by the functions that DLPack 1.2 has for this, where the version of PyTorch has them.

    Args:
        tensor, parameter: the classes ``torch.Tensor`` and ``torch.nn.Parameter``, of exactly which
            the tensors are.
    """
    extension, _ = _load()
    functions = getattr(tensor, "__dlpack_c_exchange_api__", None)
    if extension is not None and functions is not None:
        extension.see_tensors(functions, tensor, parameter)


def viewer() -> Callable[[Any], tuple[Any, ...] | None] | None:
    """Return what says where an array's elements are, as :meth:`Heads.view` does.

    Whether C is in use makes no difference, as nothing is computed.

    Returns:
        None where there is no C.
    """
    extension, _ = _load()
    return None if extension is None else cast("Heads", extension).view


def shared(
    segment: Any,
    rank: int,
    size: int,
    lines: int,
    areas: int,
    area_bytes: int,
    least_long: int,
    looks: int,
    callbacks: Callbacks,
) -> Shared | None:
    """Return what collectives in C need of memory that the ranks of one host share.

    All ranks make the same calls, one at a time. They let go of Python's lock where that pays, and
    ask ``callbacks`` when they have waited for a moment in vain. Where the ranks' digests differ
    nothing has been written. After anything else that these raise a call is in the middle, and the
    ranks must not go on with this object.

    Args:
        segment: a writable buffer, shared and zero at first; its first word is not 0 when the
            ranks cannot go on.
        rank, size: this one, of how many.
        lines: the bytes from the segment's beginning to the ranks' lines, of 64 words each, which
            collective/native/shared.h names.
        areas: the same to their areas, two of each rank.
        area_bytes: of one area, a multiple of 64.
        least_long: bytes from which on a call is a long one, a quarter of an area at most.
        looks: how often a word is looked at before it is waited for.
        callbacks: what Python does for it.

    Returns:
        None where C is not in use.
    """
    if chosen.extension is None:
        return None
    made: Shared = chosen.extension.Shared(
        segment, rank, size, lines, areas, area_bytes, least_long, looks, callbacks
    )
    return made


def messages(
    segment: Any,
    rank: int,
    size: int,
    rings: int,
    ring_bytes: int,
    streamed: int,
    looks: int,
    single_copy: bool,
    python: Any,
    lines: int = 0,
) -> Exchange | None:
    """Return ``exchange``, which sends and receives messages over memory that ranks share.

    ``exchange(x, to, out, source, tag, deadline, heads)`` sends the array x to a rank, receives
    into out from another, or does both, neither waiting for the other. What is None is not done,
    with :data:`NOBODY` for its rank; -1 as the source is any rank. With ``heads`` an array travels
    behind its head, as :meth:`collective.Communicator.send` does it; without, its bytes do, of
    which the receiver knows the number. Any number of threads may be in it, those of one direction,
    peer and tag one after the other. It returns

    - the rank from which something was received, when x may be changed;
    - ``NotImplemented`` where nothing was done: an array is not plain, a rank or a tag is wrong,
      some rank has failed, or what has come and stays is not what out takes;
    - None where x was sent and the rest is to be received: out is None, overlaps x, or is not what
      has come.

    What a method of ``python`` raises leaves it in the middle: the ranks must not go on with their
    rings.

    Args:
        segment: a writable buffer, shared and zero at first; its first word is not when a rank has
            failed.
        rank: this one, of ``size``.
        rings: bytes from the segment's beginning to the rings, of each ordered pair one: a page of
            counts and ``ring_bytes``, whole pages.
        streamed: bytes of a message from which on the receiver fetches it at once, if it can.
        looks: how often a ring is looked at before the processor is yielded.
        single_copy: whether ranks can read each other's memory.
        python: ``wait(advance, to, source, tag, deadline)`` returns when ``advance()`` does 0,
            which is 1 while something is to be sent, added to 2 while something is to be received.
            ``fetch(rank, address, out, tag)`` fills a buffer from a rank's memory.
            ``refuse(rank, what)`` raises because what a rank sends is damaged.
        lines: bytes to the ranks' lines, as :func:`shared` has them, by which a rank that naps is
            woken; 0 wakes nobody.

    Returns:
        None where C is not in use.
    """
    if chosen.extension is None:
        return None
    made: Exchange = chosen.extension.make_messages(
        segment, rank, size, rings, ring_bytes, streamed, looks, single_copy, python, lines
    )
    return made


def heads() -> Heads | None:
    """Return what writes and reads the heads of arrays; None where C is not in use."""
    return cast("Heads | None", chosen.extension)


switch(os.environ.get("COLLECTIVE_NATIVE", "").lower() != "off")
