"""The protocols of ``staging.c`` and ``shared.c`` in all interleavings of few ranks and blocks.

Each rank is a list of steps, as the C makes them: it waits for a counter, writes or reads one slot
of one area, or announces. A slot holds what was written there last. A read of anything but what it
is for is a failure, and so is a state in which nobody can go on. What a call leaves behind is tried
by a small call after it, through the same areas, into which ranks write before they have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

POSTED, FOLDED, READ, ARRIVED = range(4)


class Wait(NamedTuple):
    """Until a peer's counter is at least ``value``."""

    rank: int
    counter: int
    value: int


class Write(NamedTuple):
    """Into a slot of one's own."""

    area: str
    slot: int
    content: object


class Look(NamedTuple):
    """At a peer's slot, for what was written there."""

    rank: int
    area: str
    slot: int
    content: object


class Announce(NamedTuple):
    """A counter of one's own."""

    counter: int
    value: int


Step = Wait | Write | Look | Announce


class Rules(NamedTuple):
    """What the protocol is, and what it must not be.

    Attributes:
        depth: how many blocks an area holds.
        ahead: how many blocks a rank posts before it takes one.
        without: the wait that is left out.
    """

    depth: int = 2
    ahead: int = 1
    without: str = ""


class Operation(NamedTuple):
    """Which ranks do what with a block; a number is a rank, None all of them."""

    name: str
    sender: int | None = None
    taker: int | None = None
    folds: bool = False
    collector: int | None = None

    def sends(self, rank: int) -> bool:
        # Who alone takes has its own where it is.
        return self.sender in (None, rank) and rank != self.taker

    def takes(self, rank: int) -> bool:
        return self.taker in (None, rank)

    def collects(self, rank: int) -> bool:
        return self.folds and self.collector in (None, rank)


# What all want or all get pieces of is read alike; so is what is folded where it ends.
OPERATIONS = (
    Operation("all_gather"),  # and all_to_all, reduce_scatter; scan, of which some read less
    Operation("broadcast", sender=0),  # and scatter
    Operation("gather", taker=0),
    Operation("all_reduce", folds=True),
    Operation("reduce", folds=True, collector=0),
)
ALL_GATHER, BROADCAST, GATHER, ALL_REDUCE, REDUCE = OPERATIONS


def _wait_all(rank: int, size: int, counter: int, value: int) -> Iterator[Step]:
    for peer in range(size):
        if peer != rank:
            yield Wait(peer, counter, value)


def staged(operation: Operation, rank: int, size: int, blocks: int, rules: Rules) -> Iterator[Step]:
    """Yield the steps of ``stage``."""
    peers = [peer for peer in range(size) if peer != rank]

    def post(block: int) -> Iterator[Step]:
        if block < blocks and operation.sends(rank):
            if block >= rules.depth and rules.without != "read":
                yield from _wait_all(rank, size, READ, block - rules.depth + 1)
            yield Write("given", block % rules.depth, block)
            yield Announce(POSTED, block + 1)

    for block in range(rules.ahead):
        yield from post(block)
    for block in range(blocks):
        yield from post(block + rules.ahead)
        for peer in peers:
            if operation.takes(rank) and operation.sends(peer):
                if rules.without != "posted":
                    yield Wait(peer, POSTED, block + 1)
                yield Look(peer, "given", block % rules.depth, block)
        if operation.folds:
            yield Write("results", block % rules.depth, block)
            yield Announce(FOLDED, block + 1)
        for peer in peers:
            if operation.collects(rank):
                if rules.without != "folded":
                    yield Wait(peer, FOLDED, block + 1)
                yield Look(peer, "results", block % rules.depth, block)
        yield Announce(READ, block + 1)
    yield Announce(POSTED, blocks)
    yield Announce(FOLDED, blocks)
    if rules.without != "the end":
        yield from _wait_all(rank, size, READ, blocks)


def small(rank: int, size: int) -> Iterator[Step]:
    """Yield the steps of a small call after it: write, arrive, read."""
    for area in ("given", "results"):
        yield Write(area, 0, "small")
    yield Announce(ARRIVED, 1)
    yield from _wait_all(rank, size, ARRIVED, 1)
    for peer in range(size):
        if peer != rank:
            yield Look(peer, "given", 0, "small")


def small_calls(rank: int, size: int, calls: int, areas: int) -> Iterator[Step]:
    """Yield the steps of calls through areas, one after the other, in areas in turn."""
    for call in range(1, calls + 1):
        yield Write("area", call % areas, call)
        yield Announce(ARRIVED, call)
        for peer in range(size):
            if peer != rank:
                yield Wait(peer, ARRIVED, call)
        for peer in range(size):
            if peer != rank:
                yield Look(peer, "area", call % areas, call)


def in_place(rank: int, size: int, calls: int, departs: bool) -> Iterator[Step]:
    """Yield the steps of all_reduces in symmetric memory, and where that is, in words in turn.

    Each rank's memory has a slot for each rank, which alone reads inputs there and writes results;
    that is shown for the writer's own memory alone.
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
    """Try all interleavings; return what goes wrong in one of them, or nothing.

    What a rank has written and announced depends on how far it is alone, so that this is all the
    state there is.
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
                assert step.value >= counts[step.counter], "a counter goes back"
                counts[step.counter] = step.value
            slots[-1].append(dict(content))
            counters[-1].append(tuple(counts))
    start = (0,) * len(programs)
    seen, ahead = {start}, [start]
    while ahead:
        state = ahead.pop()
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
                found = slots[step.rank][state[step.rank]].get((step.area, step.slot))
                if found != step.content:
                    return f"rank {rank} reads {found} of {step}"
            stuck = False
            following = (*state[:rank], at + 1, *state[rank + 1 :])
            if following not in seen:
                seen.add(following)
                ahead.append(following)
        if stuck and any(at < len(program) for at, program in zip(state, programs, strict=True)):
            return f"nobody can go on: {state}"
    return ""


def tried(operation: Operation, size: int, blocks: int, rules: Rules) -> str:
    return first_failure(
        [
            [*staged(operation, rank, size, blocks, rules), *small(rank, size)]
            for rank in range(size)
        ]
    )


@pytest.mark.parametrize(("size", "blocks"), [(2, 1), (2, 2), (2, 5), (3, 1), (3, 3)])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_no_interleaving_reads_what_it_is_not_for(
    operation: Operation, depth: int, size: int, blocks: int
) -> None:
    assert tried(operation, size, blocks, Rules(depth)) == ""


@pytest.mark.parametrize("without", ["posted", "read", "the end"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_wait_is_needed(operation: Operation, without: str) -> None:
    if (operation, without) == (ALL_REDUCE, "read"):
        # Whoever has collected a block knows that all have folded it; but an area of one block,
        # or two blocks ahead, would not do.
        assert "reads" in tried(operation, 2, 5, Rules(ahead=2, without=without))
    else:
        assert "reads" in tried(operation, 2, 5, Rules(without=without))


@pytest.mark.parametrize("operation", [ALL_REDUCE, REDUCE], ids=["all_reduce", "reduce"])
def test_results_are_waited_for(operation: Operation) -> None:
    assert "reads" in tried(operation, 2, 5, Rules(without="folded"))


def test_areas_of_one_block_would_not_do() -> None:
    assert "nobody can go on" in tried(ALL_REDUCE, 2, 5, Rules(depth=1))


@pytest.mark.parametrize("size", [2, 3])
def test_memory_is_read_where_it_is_until_all_have_departed(size: int) -> None:
    programs = [[*in_place(rank, size, 3, departs=True)] for rank in range(size)]
    assert first_failure(programs) == ""


def test_without_departing_inputs_are_overwritten_while_they_are_read() -> None:
    assert "reads" in first_failure([[*in_place(rank, 2, 3, departs=False)] for rank in range(2)])


@pytest.mark.parametrize(("size", "calls"), [(2, 6), (3, 4)])
def test_small_calls_take_two_areas_in_turn(size: int, calls: int) -> None:
    assert first_failure([[*small_calls(rank, size, calls, 2)] for rank in range(size)]) == ""


def test_one_area_would_not_do() -> None:
    assert "reads" in first_failure([[*small_calls(rank, 2, 3, 1)] for rank in range(2)])
