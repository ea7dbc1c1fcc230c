"""Python side of the plug-in: makes XLA's calls over communicators.

The C library imports this module and calls :func:`begin` when XLA calls ``MPI_Init_thread``. From
then on XLA's threads call :class:`Calls` through the function that ``begin`` installs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from collective import CollectiveError, Communicator, UnsupportedError
from collective.communicator.repeated import RepeatedCall, view
from collective.inner import dtypes, native
from collective.ops import NAMES
from collective.request import in_thread

from .cliques import install
from .library import VARIABLE, check_interface, runner
from .world import connect_processes

# The numbers are also in plugin.c.
_SPLIT, _FREE, _SIZE, _ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _EXCHANGE, _FINALIZE = range(8)
_NAMES = {
    _ALL_REDUCE: "MPI_Allreduce", _ALL_GATHER: "MPI_Allgather",
    _REDUCE_SCATTER: "MPI_Reduce_scatter", _EXCHANGE: "a message",
}  # fmt: skip
# XLA's buffer for the text of an error, less the zero at the end.
_TEXT_BYTES = 511
# Handles below this are MPI's constants.
_FIRST_HANDLE = 16
_INT32 = 3  # code of the dtype


class _Clique:
    """Group of processes for which XLA has made a communicator.

    Attributes:
        ranks: the processes, in XLA's order; None if they are unknown.
        comm: communicator of the processes; None before the first call.
        token: number that announces the clique; None once it has come.
        refusal: why calls fail; "" if they do not.
        lock: lock that a call holds, since XLA's calls come from several threads. It is the lock
            of all processes' communicator if the clique has all of them.
        repeated: calls of the communicator, by the numbers by which C makes them again.
    """

    def __init__(self, ranks: Sequence[int] | None, token: int | None, refusal: str) -> None:
        self.ranks = ranks
        self.comm: Communicator | None = None
        self.token = token
        self.refusal = refusal
        self.lock = native.turn()
        self.repeated: dict[tuple[int, int], RepeatedCall] = {}


class _Arguments(NamedTuple):
    """Arguments of XLA's call, in the order in which C passes them; unused ones are 0 or None.

    Attributes:
        source, target: addresses of the input and of the result.
        elements, dtype, op: number of elements, code of their dtype, and code of the operator.
        dst, src: peers of a message, below 0 for none; in a split, its colour and its key.
        received: number of bytes that a message brings.
    """

    source: int | None
    target: int | None
    elements: int
    dtype: int
    op: int
    dst: int
    src: int
    received: int


class _Announcement:
    """Communicator that the plug-in makes XLA ask for, and the token that follows."""

    def __init__(self, color: int, ranks: Sequence[int], token: int) -> None:
        self.color = color
        self.ranks = ranks
        self.token = token
        self.clique: _Clique | None = None


class Calls:
    """Calls of XLA over the communicators of its cliques.

    Args:
        world: communicator of all processes, or the error for which there is none.
        fail: function that keeps an error's text in C, and returns the code that stands for it. Its
            second argument tells whether the error is a KeyboardInterrupt.
    """

    def __init__(self, world: Communicator | BaseException, fail: Any) -> None:
        self._world = world
        self._fail = fail
        self._cliques: dict[int, _Clique] = {}
        self._next = _FIRST_HANDLE
        # Protects the table and the announcement. A thread that holds it waits for no rank.
        self._table = threading.Lock()
        self._announcement: _Announcement | None = None
        # Only one thread may use the communicator of all processes at a time.
        self._world_lock = native.turn()

    # -- called by the compilation ---------------------------------------------------------

    def check(self) -> None:
        """Raise the error that has ended the connection of the ranks, if any."""
        if isinstance(self._world, BaseException):
            raise self._world

    def announce(self, color: int, ranks: Sequence[int], token: int) -> None:
        """Expect a communicator of ``ranks``, and then an addition of ``token`` over it.

        Args:
            color: number of the first device, which XLA passes to ``MPI_Comm_split``.
        """
        with self._table:
            self._announcement = _Announcement(color, list(ranks), token)

    def announced(self) -> bool:
        """End the announcement; return whether communicator and token have come."""
        with self._table:
            announcement, self._announcement = self._announcement, None
        clique = announcement.clique if announcement is not None else None
        return clique is not None and clique.token is None

    # -- called by XLA -----------------------------------------------------------------------

    def __call__(self, call: int, handle: int, *values: Any) -> int:
        """Make a call of XLA; return the value that ``call_function`` in ``plugin.c`` describes.

        Args:
            call: number of the call.
            handle: handle of the clique; ``MPI_Comm_size`` has the rank above it.
            values: the other arguments, in the order of :class:`_Arguments`.
        """
        try:
            arguments, number = _Arguments(*values), handle & 0xFFFFFFFF
            if call == _SPLIT:
                return self._split(arguments.dst, arguments.src)
            if call == _SIZE:
                return self._size(number, (handle >> 32) - 1)
            if call == _FREE:
                self._free(number)
            elif call == _FINALIZE:
                self._finalize()
            else:
                clique = self._cliques[number]
                with clique.lock, _called_by_xla(call):
                    self._transfer(clique, number, call, arguments)
            return 0
        except BaseException as error:  # C cannot receive an exception
            return int(self._fail(_text(error), isinstance(error, KeyboardInterrupt)))

    def _split(self, color: int, key: int) -> int:
        with self._table:
            number, self._next = self._next, self._next + 1
            announcement = self._announcement
            if (
                announcement is not None
                and announcement.clique is None
                and announcement.color == color
                and 0 <= key < len(announcement.ranks)
            ):
                clique = _Clique(announcement.ranks, announcement.token, "")
                if self._is_everybody(clique.ranks):
                    clique.lock = self._world_lock
                announcement.clique = clique
            else:
                clique = _Clique(
                    None, None,
                    f"a communicator whose first device is {color}, with this process at place "
                    f"{key}: XLA does not say which other processes take part, and no program that "
                    "JAX compiled in this process names them. Let JAX compile the program instead "
                    "of loading an executable.",
                )  # fmt: skip
            self._cliques[number] = clique
        return number

    def _size(self, number: int, rank: int) -> int:
        clique = self._cliques.get(number)
        if clique is None or clique.ranks is None:
            # At least two, or XLA would copy instead of making a call that fails.
            return max(2, rank + 1)
        return len(clique.ranks)

    def _free(self, number: int) -> None:
        with self._table:
            clique = self._cliques.pop(number, None)
        if clique is None:
            return
        for repeated in clique.repeated.values():
            repeated.forget()
        if clique.comm is not None and clique.comm is not self._world:
            clique.comm.close()

    def _finalize(self) -> None:
        with self._table:
            cliques, self._cliques = list(self._cliques.values()), {}
        for clique in cliques:
            if clique.comm is not None and clique.comm is not self._world:
                clique.comm.close()
        if isinstance(self._world, Communicator):
            self._world.inner.leave()

    def _transfer(
        self, clique: _Clique, number: int, call: int, arguments: _Arguments
    ) -> None:  # fmt: skip
        if clique.refusal:
            raise UnsupportedError(f"jax: {clique.refusal}")
        if clique.token is not None:
            self._answer_announcement(clique, call, arguments)
            return
        if call == _EXCHANGE:
            self._exchange(clique, arguments)
            return
        source, target, count, dtype, op, *_ = arguments
        comm = clique.comm
        if comm is None:
            comm = clique.comm = self._connect(clique)
        kind = dtypes.BY_CODE[dtype].storage
        whole = comm.size * count
        x = view(source, (whole if call == _REDUCE_SCATTER else count,), kind)
        out = view(target, (whole if call == _ALL_GATHER else count,), kind)
        if call == _ALL_REDUCE:
            method = functools.partial(comm.all_reduce, x, op=NAMES[op], out=out)
        elif call == _ALL_GATHER:
            # With the counts, unlike lengths are a mismatch that names each process's call.
            method = functools.partial(comm.all_gather, x, out=out, counts=[count] * comm.size)
        else:
            method = functools.partial(comm.reduce_scatter, x, op=NAMES[op], out=out)
        key = number | call << 32 | dtype << 40 | op << 48, count  # as in plugin.c
        repeated = clique.repeated.get(key)
        if repeated is None:
            repeated = clique.repeated[key] = RepeatedCall(comm, key, turn=clique.lock)
        repeated.make(method, x, out)

    def _exchange(self, clique: _Clique, arguments: _Arguments) -> None:
        """Send bytes to ``dst`` and receive bytes from ``src``; a peer below 0 is none.

        The messages travel over the communicator of all processes: members of a clique that neither
        send nor receive make no call, so the clique's own communicator could not be connected.
        """
        world, ranks = self._connected(), clique.ranks or ()
        source, target, count, _, _, dst, src, received = arguments
        data, room = view(source, (count,), _BYTE), view(target, (received,), _BYTE)
        with contextlib.ExitStack() as stack:
            if clique.lock is not self._world_lock:
                stack.enter_context(self._world_lock)
            if dst >= 0 and src >= 0:
                world.sendrecv(data, ranks[dst], ranks[src], out=room)
            elif dst >= 0:
                world.send(data, ranks[dst])
            elif src >= 0:
                world.recv(room, ranks[src])

    def _answer_announcement(self, clique: _Clique, call: int, arguments: _Arguments) -> None:
        source, target, count, dtype, *_ = arguments
        token = view(source, (1,), np.dtype(np.int32))
        if (call, count, dtype) != (_ALL_REDUCE, 1, _INT32) or token[0] != clique.token:
            clique.refusal = (
                f"the communicator of processes {clique.ranks}: another program used it while the "
                "plug-in announced it, so XLA may mean other processes. Let JAX compile the "
                "program instead of loading an executable."
            )
            raise UnsupportedError(f"jax: {clique.refusal}")
        view(target, (1,), np.dtype(np.int32))[0] = token[0]
        clique.token = None

    def _connect(self, clique: _Clique) -> Communicator:
        """Return the communicator of a clique; all its members call this for the same call."""
        world = self._connected()
        if clique.ranks is None or self._is_everybody(clique.ranks):
            return world  # the caller holds the lock
        with self._world_lock:
            return world.group(clique.ranks)

    def _connected(self) -> Communicator:
        """Return the communicator of all processes, or raise why there is none."""
        self.check()
        return cast(Communicator, self._world)

    def _is_everybody(self, ranks: Sequence[int] | None) -> bool:
        world = self._world
        return isinstance(world, Communicator) and ranks == list(range(world.size))


_BYTE = np.dtype(np.uint8)


@contextlib.contextmanager
def _called_by_xla(call: int) -> Iterator[None]:
    """Name XLA's call in errors, instead of a line of this package."""
    in_thread.site = f"{_NAMES[call]}, called by XLA"
    try:
        yield
    finally:
        in_thread.site = None  # the slot in C outlives the thread


def _text(error: BaseException) -> bytes:
    """Return the text of an error for XLA; write it to standard error if XLA cannot hold it."""
    text = str(error) if isinstance(error, CollectiveError) else repr(error)
    whole = f"{type(error).__name__}: {text}".encode(errors="replace")
    if len(whole) <= _TEXT_BYTES:
        return whole
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"collective: the whole text of an error in XLA:\n{whole.decode()}\n")
        sys.stderr.flush()
    return whole[: _TEXT_BYTES - 3].decode(errors="ignore").encode() + "…".encode()


# Functions of plugin.c.
_FAIL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int)
_INSTALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def begin(interface: int = 0, fail: int = 0, install_function: int = 0) -> None:
    """Connect the ranks, and install the function that XLA calls.

    XLA ignores an error here. So the first program that needs other processes raises it. If the C
    library is of another version, that program raises the error before XLA calls the library.

    Args:
        interface: version of the interface of the C library that calls this; an older library
            passes nothing.
        fail, install_function: addresses of ``collective_xla_fail`` and
            ``collective_xla_install`` in that library.
    """
    world: Communicator | BaseException
    is_of_this_version = False
    try:
        check_interface(interface, f"the plug-in for XLA ({os.environ.get(VARIABLE, 'loaded')})")
        is_of_this_version = True
        world = connect_processes()
    except BaseException as error:  # C would print it only
        world = error
    calls = Calls(world, _FAIL(fail))
    install(calls)
    if is_of_this_version:
        _INSTALL(install_function)(_callback(calls), runner())


_kept: list[object] = []


def _callback(calls: Calls) -> Any:
    """Return ``calls`` as a function of C, which lives as long as the process."""
    word, pointer, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    kind = ctypes.CFUNCTYPE(
        word, word, number, word, pointer, pointer, word, number, number, number, number, word
    )
    function = kind(lambda ticket, *arguments: ~ticket - calls(*arguments))
    _kept.append(function)
    return function
