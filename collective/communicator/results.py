"""Comparison of the ranks' results after a call (``COLLECTIVE_CHECK=results``).

A bit that flips in memory or in a message changes the result on some ranks only. After a call each
rank computes checksums of its result, and the ranks exchange them. Where no two ranks have the same
values, as in a ``reduce_scatter``, the ranks make the call twice, and each rank compares its two
results.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import native
from collective.deadline import Deadline
from collective.errors import CollectiveError, CorruptionError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Disagreement, Request, call_site, name_ranks

from .calls.call import Planned

if TYPE_CHECKING:
    from collective.contract.recorder import Recorder

    from .calls.heads import Head
    from .path import Path

    #: Head and payload of a message.
    Parts = tuple[Head, Buffer | None]

_UINT8 = BY_NAME["uint8"]
# Operations that only move data: the rank that sends a piece knows it.
_MOVES = ("all_gather", "all_to_all", "broadcast", "gather", "scatter")
# Bits of the greatest number of each floating-point type that is no NaN, infinity included.
_GREATEST = {
    "float8_e4m3fn": 0x7E, "float8_e5m2": 0x7C, "float16": 0x7C00, "bfloat16": 0x7F80,
    "float32": 0x7F80_0000, "complex64": 0x7F80_0000,
    "float64": 0x7FF0 << 48, "complex128": 0x7FF0 << 48,
}  # fmt: skip
# Reductions of which each rank has another result, or only one rank has any.
_TWICE = ("reduce", "reduce_scatter", "scan")
_CAUSE = (
    "A bit of memory or of a message has changed, or the ranks' processors or libraries compute "
    "differently. Repeat the step, or continue without a faulty rank by comm.shrink(exclude=...)."
)

Array = np.ndarray[Any, Any]
#: Result of a plan's method ``summed``; see :data:`collective.contract.backend.Plan`.
_Report = tuple[int, int, int, "bytes | None"]


def interval_of(check: str) -> int:
    """Return the interval of the calls whose results are compared; 0 if no results are.

    Args:
        check: value of the setting: ``"results"``, ``"results:10"`` for every tenth call, or
            another word.
    """
    word, _, interval = check.partition(":")
    return int(interval or 1) if word == "results" else 0


class ResultComparison:
    """Comparison of the results of one communicator's calls.

    Args:
        interval: interval of the calls whose results are compared; 1 for every call.
        recorder: recorder of the communicator, which counts the calls until the next one.
    """

    def __init__(self, interval: int, recorder: Recorder) -> None:
        self._ring = recorder.ring
        self._ring.interval = interval
        self._ring.left = interval - 1

    def around(self, path: Path, planned: Planned, src: Any, dst: Any, deadline: Deadline) -> None:
        """Run a call, and compare its results on all ranks.

        Args:
            path: path of the communicator.
            planned, src, dst: plan of the call, and its buffers.

        Raises:
            CorruptionError: the results are not what they must be; on all ranks.
        """
        run = _RUNS.get(planned.request.operation)
        if run is None or planned.compares:
            path.run_recorded(planned, src, dst, deadline)
            return
        # A call that fails has failed on all ranks, or breaks the communicator. So the ranks count
        # only the calls that have succeeded. All ranks then have the same number of calls left,
        # whether C or Python has made a call.
        if self._ring.left > 0:
            path.run_recorded(planned, src, dst, deadline)
            self._count()
            return
        with _telling_peers(path):
            checksums = run(path, planned, src, dst, deadline)
        self._count()
        _gather_and_check(path, planned.request, checksums, dst, deadline)

    def _count(self) -> None:
        """Count a call that has succeeded."""
        ring = self._ring
        ring.left = ring.left - 1 if ring.left > 0 else ring.interval - 1

    def compare(
        self, path: Path, request: Request, report: _Report, dst: Buffer, deadline: Deadline
    ) -> None:
        """Compare the results of an ``all_reduce`` that C has made.

        Args:
            path: path of the communicator.
            request, report, dst: request of the call, its report, and its result.

        Raises:
            CorruptionError: as :meth:`around`.
        """
        with _telling_peers(path):
            checksums = _of_report(report, dst)
        _gather_and_check(path, request, checksums, dst, deadline)


@contextmanager
def _telling_peers(path: Path) -> Iterator[None]:
    """Break the communicator if the body fails on this rank only.

    The peers would wait for this rank: in the call, or for its checksums.
    """
    try:
        yield
    except (CollectiveError, Disagreement):
        raise
    except BaseException as error:
        path.fail_halfway(error)
        raise


# -- one call, and this rank's checksums -----------------------------------------------------------


def _run_equal(
    path: Path, planned: Planned, src: Any, dst: Any, deadline: Deadline
) -> Array | bytes:
    """Run a call whose result is the same on all ranks; return the checksum of the result.

    A plan in C may compute the checksum on the way, and announce it to the other ranks.
    """
    summed = getattr(planned.plan, "summed", None)
    if summed is None:
        path.run_recorded(planned, src, dst, deadline)
        return np.array([checksum(dst.array)], np.uint64)
    reports: list[_Report] = []

    def run(src: Any, dst: Any, deadline: Deadline) -> None:
        reports.append(summed(src, dst, deadline))

    path.run_recorded(Planned(planned.request, run, fixed=planned.fixed), src, dst, deadline)
    return _of_report(reports[0], dst)


def _of_report(report: _Report, dst: Buffer) -> Array | bytes:
    """Return the rows that all ranks have announced; or else the checksum of this rank's result.

    A row has two words that make up the checksum, and a third one; see :class:`_Checksums`.
    """
    total, placed, nbytes, announced = report
    if announced is not None:
        return announced
    summed = nbytes == dst.nbytes
    return np.array(
        [_joined([(total, placed, nbytes)]) if summed else checksum(dst.array)], np.uint64
    )


def _run_moves(path: Path, planned: Planned, src: Any, dst: Any, deadline: Deadline) -> Array:
    """Run a call that moves data; return the checksums of the pieces sent and received."""
    size, rank = path.size, path.rank
    words = np.zeros(2 * size, np.uint64)
    # The checksums of the input come before the call: the result may overwrite the input.
    for peer, piece in _sent(planned.request, rank, src):
        words[peer] = checksum(piece)
    path.run_recorded(planned, src, dst, deadline)
    for peer, piece in _received(planned.request, rank, dst):
        words[size + peer] = checksum(piece)
    return words


def _run_twice(path: Path, planned: Planned, src: Any, dst: Any, deadline: Deadline) -> Array:
    """Run a call twice; return the checksums of this rank's two results."""
    words = np.zeros(2, np.uint64)
    # The first result goes to memory of its own: the second may overwrite the input.
    first = None if dst is None else Buffer.empty(dst.count, dst.dtype, dst.array)
    path.run_recorded(planned, src, first, deadline)
    path.run_recorded(planned, src, dst, deadline)
    if first is not None:
        words[:] = checksum(first.array), checksum(dst.array)
        if words[0] != words[1]:
            left, right = _without_payloads(first), _without_payloads(dst)
            if left is not None and right is not None and np.array_equal(left, right):
                words[1] = words[0]
    return words


_RUNS: dict[str, Callable[[Path, Planned, Any, Any, Deadline], Array | bytes]] = {
    "all_reduce": _run_equal,
    **dict.fromkeys(_MOVES, _run_moves),
    **dict.fromkeys(_TWICE, _run_twice),
}


def _without_payloads(buffer: Buffer) -> Array | None:
    """Return the bits of a result that has NaN, with the same bits for each NaN; else None.

    Which NaN a fold of two has depends on the instruction, and so on where the arrays begin. An MPI
    library may also fold in another order on each rank.
    """
    greatest = _GREATEST.get(buffer.dtype.name)
    if greatest is None:
        return None
    array = _on_host(buffer.array)
    width = array.itemsize // (2 if buffer.dtype.kind == "c" else 1)
    bits = array.view(f"u{width}")
    nan = (bits & bits.dtype.type((1 << (8 * width - 1)) - 1)) > greatest
    return np.where(nan, bits.dtype.type(greatest + 1), bits) if nan.any() else None


# -- all ranks' checksums --------------------------------------------------------------------------


class _Checksums:
    """Checksums of all ranks' results.

    The last word of a rank's row is the complement of the exclusive or of the others, so that a
    flip in a message is not mistaken for a flip in a result.

    Args:
        rows: words of 64 bits, one row for each rank.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Array) -> None:
        self._rows = rows

    @property
    def alike(self) -> bool:
        """Whether all ranks have the same row, undamaged."""
        first = self._rows[:1]
        return bool((self._rows == first).all()) and not _damaged(first)

    def read(self) -> tuple[Array, list[int]]:
        """Return the checksums, one row for each rank, and the ranks whose row was damaged."""
        return self._rows[:, :-1], _damaged(self._rows)


def _damaged(rows: Array) -> list[int]:
    ranks: list[int] = np.flatnonzero(~np.bitwise_xor.reduce(rows, axis=1)).tolist()
    return ranks


class _ChecksumGather(Planned):
    """Plan that gathers the checksums of a request's calls, with buffers for all these calls.

    Args:
        path: path of the communicator.
        call: request of the calls.
        count: number of checksums of each rank.
    """

    __slots__ = ("_dst", "_received", "_sent", "_src")

    def __init__(self, path: Path, call: Request, count: int) -> None:
        self._sent = np.empty(count + 1, np.uint64)
        self._received = np.empty((path.size, count + 1), np.uint64)
        self._src, self._dst = (
            Buffer(words.reshape(-1).view(np.uint8), _UINT8)
            for words in (self._sent, self._received)
        )
        request = call.comparing_results([self._sent.nbytes] * path.size)
        super().__init__(request, path.backend.plan(request), fixed=True, compares=True)

    def run(self, path: Path, words: Array, deadline: Deadline) -> _Checksums:
        """Gather the checksums, of which this rank's are ``words``."""
        self._received.fill(0)  # a row of zeros counts as damaged
        self._sent[:-1] = words
        self._sent[-1] = ~np.bitwise_xor.reduce(words)
        path.run_recorded(self, self._src, self._dst, deadline)
        return _Checksums(self._received)


def _gather_and_check(
    path: Path, call: Request, checksums: Array | bytes, dst: Any, deadline: Deadline
) -> None:
    """Check the checksums of the call that was made last, after gathering them if necessary.

    Args:
        path: path of the communicator.
        call: request of the call.
        checksums: those of this rank, or the rows of all ranks as bytes.
        dst: buffer of this rank's result.

    Raises:
        CorruptionError: as :func:`_refuse_damaged` and :func:`_refuse_wrong`.
    """
    number = path.recorder.started
    if isinstance(checksums, bytes):
        shared = _Checksums(np.frombuffer(checksums, np.uint64).reshape(path.size, -1))
    else:
        shared = _gather_checksums(path, call, checksums, deadline)
    if call.operation == "all_reduce" and shared.alike:
        return
    table, damaged = shared.read()
    _refuse_damaged(path, call, number, damaged)
    if call.operation == "all_reduce" and call.dtype is not None and call.dtype.name in _GREATEST:
        # All ranks have the same table, and come here. The results may differ in NaNs alone.
        with _telling_peers(path):
            bits = _without_payloads(dst)
            words = np.array([checksum(table[path.rank] if bits is None else bits)], np.uint64)
        shared = _gather_checksums(path, call, words, deadline)
        table, damaged = shared.read()
        _refuse_damaged(path, call, number, damaged)
    _refuse_wrong(path, call, number, table)


def _gather_checksums(path: Path, call: Request, words: Array, deadline: Deadline) -> _Checksums:
    """Gather the checksums of a call from all ranks, on every rank."""
    key = "results", call
    gather = path.plans.get(key)
    if gather is None:
        gather = path.remember(key, _ChecksumGather(path, call, words.size))
    assert isinstance(gather, _ChecksumGather)
    return gather.run(path, words, deadline)


def _refuse_damaged(path: Path, call: Request, number: int, damaged: Sequence[int]) -> None:
    """Check that no rank's checksums were damaged on their way to this rank.

    If some were, break the communicator. The other ranks have read their checksums, so they go on
    or compare again. This rank cannot know which, and its next call would meet another one.

    Args:
        number: number of the call.
        damaged: ranks whose checksums do not fit their complements.

    Raises:
        CorruptionError: some were damaged; raised on this rank only.
    """
    if damaged:
        error = CorruptionError(
            f"{call.operation}: the checksums of {name_ranks(damaged)} for call {number} arrived "
            f"damaged {path.who}. {_CAUSE}",
            (path.rank,),
        )
        path.tell_failure(error)
        raise error


def _refuse_wrong(path: Path, request: Request, number: int, table: Array) -> None:
    """Check that the results are what they must be, by the checksums of all ranks.

    Args:
        number: number of the call.
        table: the checksums, one row for each rank.

    Raises:
        CorruptionError: they are not; raised on all ranks.
    """
    size, operation = path.size, request.operation
    if operation == "all_reduce":
        ranks, fault = _find_unequal([row.tobytes() for row in table])
    elif operation in _TWICE:
        ranks, fault = _find_unrepeated(table)
    else:
        sent, received = table[:, :size], table[:, size:]
        ranks, fault = _find_changed_pieces(operation, request.root, sent, received)
    if ranks:
        site = call_site()
        raise CorruptionError(
            f"{operation}: {fault}, in call {number}, {request}{f' at {site}' if site else ''} "
            f"{path.who}. {_CAUSE}",
            tuple(ranks),
        )


# -- messages -------------------------------------------------------------------------------------


def compare_messages(
    path: Path, what: str, sent: Parts | None, received: Parts | None, dst: int | None,
    src: int | None, tag: int, deadline: Deadline,
) -> None:  # fmt: skip
    """Exchange the checksums of a message sent and one received, and compare the received one.

    Args:
        path, what: path of the communicator, and the operation.
        sent, received: heads and payloads of the two messages; None where there is no message.
        dst, src, tag: destination, source and tag of the messages.
        deadline: deadline of the call.

    Raises:
        CorruptionError: the received message has changed; only this rank knows.
    """
    ours = None if sent is None else _message(*sent)
    second = tag + path.payload_tag
    arrived = Buffer.empty(16, _UINT8)
    if received is None:
        path.transfer(path.backend.send, ours, dst, second, deadline)
        return
    if ours is None:
        path.transfer(path.backend.recv, arrived, src, second, deadline)
    else:
        path.transfer(path.backend.sendrecv, ours, dst, arrived, src, second, deadline)
    if not np.array_equal(arrived.array, _message(*received).array):
        raise CorruptionError(
            f"{what}: the message with tag {tag} from rank {src} is not the one that rank {src} "
            f"sent {path.who}. {_CAUSE}",
            (path.rank,),
        )


def _message(head: Head, payload: Buffer | None) -> Buffer:
    """Return the checksum of a message and its complement, as bytes."""
    arrays = [head.buffer.array] if payload is None else [head.buffer.array, payload.array]
    word = np.uint64(checksum(*arrays))
    return Buffer(np.array([word, ~word]).view(np.uint8), _UINT8)


def _pieces(buffer: Any, elements: Sequence[int]) -> Iterator[Any]:
    limits = list(accumulate(elements, initial=0))
    for start, stop in pairwise(limits):
        yield buffer.array[start:stop]


def _sent(request: Request, rank: int, src: Any) -> Iterator[tuple[int, Any]]:
    """Return the pieces that this rank sends, each with the rank that gets it.

    A piece that all ranks get is listed once, under this rank.
    """
    operation = request.operation
    if src is None or (operation in ("broadcast", "scatter") and request.root != rank):
        return
    if operation in ("scatter", "all_to_all"):
        yield from enumerate(_pieces(src, request.elements))
    else:
        yield rank if operation != "gather" else request.root, src.array


def _received(request: Request, rank: int, dst: Any) -> Iterator[tuple[int, Any]]:
    """Return the pieces that this rank has received, each with the rank that sent it."""
    operation = request.operation
    if dst is None or (operation == "gather" and request.root != rank):
        return
    if operation in ("broadcast", "scatter"):
        yield request.root, dst.array
    else:
        lengths = request.incoming if operation == "all_to_all" else request.elements
        yield from enumerate(_pieces(dst, lengths))


def _find_unequal(sums: Sequence[bytes]) -> tuple[list[int], str]:
    """Return the ranks whose checksum differs, and a text; no ranks if all are equal.

    If no checksum has a majority, all ranks are returned.
    """
    groups: dict[bytes, list[int]] = {}
    for rank, value in enumerate(sums):
        groups.setdefault(value, []).append(rank)
    if len(groups) == 1:
        return [], ""
    largest = max(groups.values(), key=len)
    if 2 * len(largest) > len(sums):
        others = [rank for rank in range(len(sums)) if rank not in largest]
        has = "has" if len(others) == 1 else "have"
        return others, f"{name_ranks(others)} {has} another result than {name_ranks(largest)}"
    parts = "; ".join(name_ranks(ranks) for ranks in groups.values())
    return list(range(len(sums))), f"the ranks have different results, and no majority: {parts}"


def _find_unrepeated(table: Array) -> tuple[list[int], str]:
    """Return the ranks whose two results differ, and a text; no ranks if all are equal."""
    ranks = [rank for rank, (first, second) in enumerate(table) if first != second]
    if not ranks:
        return [], ""
    has = "has" if len(ranks) == 1 else "have"
    return ranks, f"{name_ranks(ranks)} {has} another result when the call is made twice"


def _find_changed_pieces(
    operation: str, root: int | None, sent: Array, received: Array
) -> tuple[list[int], str]:
    """Return the ranks that hold other pieces than were sent, and a text.

    Args:
        sent: for each rank, the checksum of the piece that it sends to each rank.
        received: for each rank, the checksum of the piece that it has from each rank.
    """
    size = len(sent)
    faults: dict[int, list[int]] = {}
    for src in range(size):
        if operation in ("broadcast", "scatter") and src != root:
            continue
        for dst in range(size):
            if operation == "gather" and dst != root:
                continue
            common = operation in ("broadcast", "all_gather")
            if sent[src, src if common else dst] != received[dst, src]:
                faults.setdefault(src, []).append(dst)
    parts = [
        f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} another piece than rank {src} "
        "sent"
        for src, ranks in faults.items()
    ]
    return sorted({rank for ranks in faults.values() for rank in ranks}), "; ".join(parts)


# -- checksums, with the same value in C and in NumPy ----------------------------------------------

# The same numbers as in collective/native/sums.c.
_BLOCK_WORDS = 1 << 13
_BLOCK_WEIGHT = 0x9E3779B97F4A7C15
# NumPy adds the words of a block by rows and by columns. The index of a word is the sum of its
# column and of the index at which its row begins.
_COLUMNS = 128
_SHAPE = _BLOCK_WORDS // _COLUMNS, _COLUMNS
# Number of blocks that NumPy adds at a time, so that intermediate arrays stay in the caches.
_AT_ONCE = 4

#: The sum of the words, and the sum of the words times their weights, both modulo 2**64.
Sums = tuple[int, int]


def checksum(*arrays: Any) -> int:
    """Return a checksum of 64 bits of the bytes of contiguous arrays.

    Any single flipped bit changes the checksum, and so does any exchange of bytes, unless sums of
    64 bits happen to be equal.
    """
    views = [_on_host(array) for array in arrays]
    return _joined([(*sums_of(view), view.nbytes) for view in views])


def _on_host(array: Any) -> Array:
    """Return the array of a buffer as a NumPy array; a copy if it is on a GPU."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.to_host())


def _joined(parts: list[tuple[int, int, int]]) -> int:
    """Return the checksum of arrays from the sums and the number of bytes of each."""
    words = [word for part in parts for word in part]
    packed = struct.pack(f"<{len(words)}Q", *words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def sums_of(array: Array) -> Sums:
    """Return the two sums of an array's bytes; ``collective/native/sums.h`` says what they are."""
    data = array.reshape(-1).view(np.uint8)
    in_c = native.sums()
    return _sums_by_numpy(data) if in_c is None else in_c(data)


def _sums_by_numpy(data: Array) -> Sums:
    whole = data.size // 8 * 8
    words = data[:whole].view(np.uint64)
    if whole < data.size:
        rest = np.zeros(8, np.uint8)
        rest[: data.size - whole] = data[whole:]
        words = np.concatenate([words, rest.view(np.uint64)])
    full = words.size // _BLOCK_WORDS
    blocks = words[: full * _BLOCK_WORDS].reshape(full, *_SHAPE)
    parts = [blocks[start : start + _AT_ONCE] for start in range(0, full, _AT_ONCE)]
    if words.size % _BLOCK_WORDS:
        last = np.zeros(_BLOCK_WORDS, np.uint64)
        last[: words.size % _BLOCK_WORDS] = words[full * _BLOCK_WORDS :]
        parts.append(last.reshape(1, *_SHAPE))
    total = placed = 0
    rows = np.arange(0, _BLOCK_WORDS, _COLUMNS, dtype=np.uint64)
    columns = np.arange(_COLUMNS, dtype=np.uint64)
    first = 1
    for part in parts:  # NumPy's arithmetic on arrays wraps silently
        counted = part + (part >> np.uint64(32))
        of_rows, of_columns = counted.sum(axis=2), counted.sum(axis=1)
        of_blocks = of_rows.sum(axis=1)
        weights = np.arange(first, first + len(part), dtype=np.uint64) * np.uint64(_BLOCK_WEIGHT)
        total += int(of_blocks.sum())
        for weighted in (of_blocks * weights, of_rows * rows, of_columns * columns):
            placed += int(weighted.sum())
        first += len(part)
    return total % 2**64, placed % 2**64
