"""Model of the protocols of ``staging.c`` and ``shared.c``: all interleavings of a few ranks.

Each rank is a list of steps like those of the C code. In a step the rank waits for a counter,
writes or reads one slot of one area, or announces a counter. A slot holds the content that was
written last. A read of wrong content is a failure, and so is a state in which no rank can continue.
A second call follows each call to test what it leaves behind. In a small one ranks write into the
same areas before they have arrived, in a staged one after that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

POSTED, FOLDED, READ, ARRIVED = range(4)


class Wait(NamedTuple):
    """Wait until a peer's counter is at least ``value``."""

    rank: int
    counter: int
    value: int


class Write(NamedTuple):
    """Write into a slot of the rank itself."""

    area: str
    slot: int
    content: object


class Look(NamedTuple):
    """Read a peer's slot, and expect ``content`` there."""

    rank: int
    area: str
    slot: int
    content: object


class Announce(NamedTuple):
    """Set a counter of the rank itself."""

    counter: int
    value: int


Step = Wait | Write | Look | Announce


class Rules(NamedTuple):
    """Rules of the protocol; with some values the protocol is wrong.

    Attributes:
        depth: number of blocks in an area.
        ahead: number of blocks that a rank posts before it takes one.
        without: name of the wait to omit.
    """

    depth: int = 2
    ahead: int = 1
    without: str = ""


class Operation(NamedTuple):
    """The parts of the ranks in a block; a number is a rank, None stands for all ranks."""

    name: str
    sender: int | None = None
    taker: int | None = None
    folds: bool = False
    collector: int | None = None

    def sends(self, rank: int) -> bool:
        # A rank that is the only taker already has its own data in place.
        return self.sender in (None, rank) and rank != self.taker

    def takes(self, rank: int) -> bool:
        return self.taker in (None, rank)

    def collects(self, rank: int) -> bool:
        return self.folds and self.collector in (None, rank)


# Ranks that take all data, or pieces of all data, read in the same way. So do ranks that fold what
# they have read. Each way of reading is tried once.
OPERATIONS = (
    # Also stands for all_to_all, reduce_scatter, and scan, in which some ranks read less.
    Operation("all_gather"),
    Operation("broadcast", sender=0),  # also stands for scatter
    Operation("gather", taker=0),
    Operation("all_reduce", folds=True),
    Operation("reduce", folds=True, collector=0),
)
ALL_GATHER, BROADCAST, GATHER, ALL_REDUCE, REDUCE = OPERATIONS


def _wait_all(rank: int, size: int, counter: int, value: int) -> Iterator[Step]:
    for peer in range(size):
        if peer != rank:
            yield Wait(peer, counter, value)


def staged(
    operation: Operation, rank: int, size: int, blocks: int, rules: Rules, call: int = 0
) -> Iterator[Step]:
    """Yield the steps of the arrival at a long call, and of ``stage``."""
    peers = [peer for peer in range(size) if peer != rank]
    yield Announce(ARRIVED, call + 1)
    if rules.without != "arrival":
        yield from _wait_all(rank, size, ARRIVED, call + 1)

    def slot(block: int) -> int:
        return (block + call) % rules.depth  # another call cuts the areas in another way

    def post(block: int) -> Iterator[Step]:
        if block < end and operation.sends(rank):
            if block >= first + rules.depth and rules.without != "read":
                yield from _wait_all(rank, size, READ, block - rules.depth + 1)
            yield Write("given", slot(block), block)
            yield Announce(POSTED, block + 1)

    first, end = call * blocks, (call + 1) * blocks
    for block in range(first, first + rules.ahead):
        yield from post(block)
    for block in range(first, end):
        yield from post(block + rules.ahead)
        for peer in peers:
            if operation.takes(rank) and operation.sends(peer):
                if rules.without != "posted":
                    yield Wait(peer, POSTED, block + 1)
                yield Look(peer, "given", slot(block), block)
        if operation.folds:
            yield Write("results", slot(block), block)
            yield Announce(FOLDED, block + 1)
        for peer in peers:
            if operation.collects(rank):
                if rules.without != "folded":
                    yield Wait(peer, FOLDED, block + 1)
                yield Look(peer, "results", slot(block), block)
        yield Announce(READ, block + 1)
    yield Announce(POSTED, end)
    yield Announce(FOLDED, end)


def small(rank: int, size: int, blocks: int, rules: Rules) -> Iterator[Step]:
    """Yield the steps of a small call that follows a staged one: wait, write, arrive, read."""
    if rules.without != "the end":
        yield from _wait_all(rank, size, READ, blocks)
    for area in ("given", "results"):
        yield Write(area, 0, "small")
    yield Announce(ARRIVED, 2)
    yield from _wait_all(rank, size, ARRIVED, 2)
    for peer in range(size):
        if peer != rank:
            yield Look(peer, "given", 0, "small")


def small_calls(rank: int, size: int, calls: int, areas: int) -> Iterator[Step]:
    """Yield the steps of several small calls that use the areas in turn."""
    for call in range(1, calls + 1):
        yield Write("area", call % areas, call)
        yield Announce(ARRIVED, call)
        for peer in range(size):
            if peer != rank:
                yield Wait(peer, ARRIVED, call)
        for peer in range(size):
            if peer != rank:
                yield Look(peer, "area", call % areas, call)


def compared(rank: int, size: int, calls: int, early: bool) -> Iterator[Step]:
    """Yield the steps of all_reduces of one block each, whose sums the ranks announce.

    Args:
        early: whether a rank writes its sums before it has received blocks of the call.
    """
    for call in range(calls):
        if early:
            yield Write("sums", 0, call)
        yield Announce(POSTED, call + 1)
        yield from _wait_all(rank, size, POSTED, call + 1)
        if not early:
            yield Write("sums", 0, call)
        yield Announce(READ, call + 1)
        yield from _wait_all(rank, size, READ, call + 1)
        for peer in range(size):
            if peer != rank:
                yield Look(peer, "sums", 0, call)


def in_place(rank: int, size: int, calls: int, departs: bool) -> Iterator[Step]:
    """Yield the steps of all_reduces in symmetric memory, whose locations use two words in turn.

    Each rank's memory has a slot for each rank. Only that rank reads inputs from the slot and
    writes results to it. The model only has the writes to the rank's own memory.
    """
    step = 0
    for call in range(calls):
        step += 1
        for slot in range(size):
            yield Write("memory", slot, (call, "input"))
        yield Write("location", step % 2, call)
        yield Announce(ARRIVED, step)
        yield from _wait_all(rank, size, ARRIVED, step)
        for peer in range(size):
            if peer != rank:
                yield Look(peer, "location", step % 2, call)
                yield Look(peer, "memory", rank, (call, "input"))
        yield Write("memory", rank, (call, "result"))
        if departs:
            step += 1
            yield Announce(ARRIVED, step)
            yield from _wait_all(rank, size, ARRIVED, step)


def first_failure(programs: list[list[Step]]) -> str:
    """Try all interleavings; return the first failure as text, or an empty text.

    The slots and counters of a rank depend only on its position in its program, so the positions of
    all ranks are the whole state.
    """
    slots: list[list[dict[tuple[str, int], object]]] = []
    counters: list[list[tuple[int, ...]]] = []
    for program in programs:
        content: dict[tuple[str, int], object] = {}
        counts = [0, 0, 0, 0]
        slots.append([dict(content)])
        counters.append([tuple(counts)])
        for step in program:
            if isinstance(step, Write):
                content[step.area, step.slot] = step.content
            elif isinstance(step, Announce):
                assert step.value >= counts[step.counter], "a counter decreases"
                counts[step.counter] = step.value
            slots[-1].append(dict(content))
            counters[-1].append(tuple(counts))
    start = (0,) * len(programs)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        stuck = True
        for rank, at in enumerate(state):
            if at == len(programs[rank]):
                continue
            step = programs[rank][at]
            if isinstance(step, Wait) and (
                counters[step.rank][state[step.rank]][step.counter] < step.value
            ):
                continue
            if isinstance(step, Look):
                actual = slots[step.rank][state[step.rank]].get((step.area, step.slot))
                if actual != step.content:
                    return f"rank {rank} reads {actual} of {step}"
            stuck = False
            following = (*state[:rank], at + 1, *state[rank + 1 :])
            if following not in seen:
                seen.add(following)
                todo.append(following)
        if stuck and any(at < len(program) for at, program in zip(state, programs, strict=True)):
            return f"nobody can go on: {state}"
    return ""


def tried(operation: Operation, size: int, blocks: int, rules: Rules, then: str = "small") -> str:
    programs = []
    for rank in range(size):
        program = [*staged(operation, rank, size, blocks, rules)]
        if then == "small":
            program += small(rank, size, blocks, rules)
        else:
            program += staged(operation, rank, size, blocks, rules, 1)
        programs.append(program)
    return first_failure(programs)


@pytest.mark.parametrize(("size", "blocks"), [(2, 1), (2, 2), (2, 5), (3, 1), (3, 3)])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("then", ["small", "staged"])
def test_protocol_reads_correct_content_in_all_interleavings(
    then: str, operation: Operation, depth: int, size: int, blocks: int
) -> None:
    assert tried(operation, size, blocks, Rules(depth), then) == ""


# A rank that has begun to fold the next all_reduce knows that its peers have posted for it, and so
# have left the last one.
@pytest.mark.parametrize(
    "operation", [ALL_GATHER, BROADCAST, GATHER, REDUCE], ids=lambda operation: operation.name
)
def test_staged_call_without_arrival_overwrites_what_peers_read(operation: Operation) -> None:
    assert "reads" in tried(operation, 2, 3, Rules(without="arrival"), "staged")


@pytest.mark.parametrize("without", ["posted", "read", "the end"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_protocol_without_wait_fails(operation: Operation, without: str) -> None:
    if (operation, without) == (ALL_REDUCE, "read"):
        # A rank that has collected a block knows that all ranks have folded it. So the wait is only
        # needed with an area of one block, or with two blocks ahead.
        assert "reads" in tried(operation, 2, 5, Rules(ahead=2, without=without))
    else:
        assert "reads" in tried(operation, 2, 5, Rules(without=without))


@pytest.mark.parametrize("operation", [ALL_REDUCE, REDUCE], ids=["all_reduce", "reduce"])
def test_protocol_without_wait_for_results_fails(operation: Operation) -> None:
    assert "reads" in tried(operation, 2, 5, Rules(without="folded"))


def test_protocol_with_areas_of_single_block_deadlocks() -> None:
    assert "nobody can go on" in tried(ALL_REDUCE, 2, 5, Rules(depth=1))


@pytest.mark.parametrize("size", [2, 3])
def test_in_place_protocol_with_departure_is_correct(size: int) -> None:
    programs = [[*in_place(rank, size, 3, departs=True)] for rank in range(size)]
    assert first_failure(programs) == ""


def test_in_place_protocol_without_departure_fails() -> None:
    assert "reads" in first_failure([[*in_place(rank, 2, 3, departs=False)] for rank in range(2)])


@pytest.mark.parametrize(("size", "calls"), [(2, 6), (3, 4)])
def test_small_calls_with_two_areas_are_correct(size: int, calls: int) -> None:
    assert first_failure([[*small_calls(rank, size, calls, 2)] for rank in range(size)]) == ""


def test_small_calls_with_single_area_fail() -> None:
    assert "reads" in first_failure([[*small_calls(rank, 2, 3, 1)] for rank in range(2)])


@pytest.mark.parametrize("size", [2, 3])
def test_announced_sums_are_those_of_the_call_in_all_interleavings(size: int) -> None:
    assert first_failure([[*compared(rank, size, 3, False)] for rank in range(size)]) == ""


def test_sums_announced_before_peers_have_arrived_fail() -> None:
    assert "reads 1 of" in first_failure([[*compared(rank, 2, 2, True)] for rank in range(2)])
