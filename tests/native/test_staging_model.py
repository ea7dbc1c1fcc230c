"""The protocols of ``staging.c`` and ``shared.c`` in all interleavings of few ranks and blocks.

Each rank is a list of steps, as the C makes them: it waits for a counter, writes or reads one slot
of one area, or announces. A slot holds what was written there last. A read of anything but what it
is for is a failure, and so is a state in which nobody can go on. What a call leaves behind is tried
by a small call after it, through the same areas, into which ranks write before they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        ahead: how many blocks a rank posts before it folds one.
        without: the wait that is left out.
    """

    depth: int = 2
    ahead: int = 1
    without: str = ""


def _wait_all(rank: int, size: int, counter: int, value: int) -> Iterator[Step]:
    for peer in range(size):
        if peer != rank:
            yield Wait(peer, counter, value)


def all_reduce(rank: int, size: int, blocks: int, rules: Rules) -> Iterator[Step]:
    """Yield the steps of ``stage_all_reduce``."""
    peers = [peer for peer in range(size) if peer != rank]

    def post(block: int) -> Iterator[Step]:
        if block < blocks:
            yield Write("given", block % rules.depth, block)
            yield Announce(POSTED, block + 1)

    for block in range(rules.ahead):
        yield from post(block)
    for block in range(blocks):
        yield from post(block + rules.ahead)
        if rules.without != "posted":
            yield from _wait_all(rank, size, POSTED, block + 1)
        for peer in peers:
            yield Look(peer, "given", block % rules.depth, block)
        yield Write("results", block % rules.depth, block)
        yield Announce(FOLDED, block + 1)
        for peer in peers:
            if rules.without != "folded":
                yield Wait(peer, FOLDED, block + 1)
            yield Look(peer, "results", block % rules.depth, block)
        yield Announce(READ, block + 1)
    if rules.without != "the end":
        yield from _wait_all(rank, size, READ, blocks)


def broadcast(rank: int, size: int, blocks: int, rules: Rules) -> Iterator[Step]:
    """Yield the steps of ``stage_broadcast`` from rank 0."""
    for block in range(blocks):
        if rank == 0:
            if block >= rules.depth and rules.without != "read":
                yield from _wait_all(rank, size, READ, block - rules.depth + 1)
            yield Write("given", block % rules.depth, block)
            yield Announce(POSTED, block + 1)
        else:
            if rules.without != "posted":
                yield Wait(0, POSTED, block + 1)
            yield Look(0, "given", block % rules.depth, block)
            yield Announce(READ, block + 1)
    yield Announce(POSTED, blocks)
    yield Announce(READ, blocks)
    if rank == 0 and rules.without != "the end":
        yield from _wait_all(rank, size, READ, blocks)


def all_gather(rank: int, size: int, blocks: int, rules: Rules) -> Iterator[Step]:
    """Yield the steps of ``stage_all_gather``."""

    def put(block: int) -> Iterator[Step]:
        if block < blocks:
            if block >= rules.depth and rules.without != "read":
                yield from _wait_all(rank, size, READ, block - rules.depth + 1)
            yield Write("given", block % rules.depth, block)
            yield Announce(POSTED, block + 1)

    for block in range(rules.ahead):
        yield from put(block)
    for block in range(blocks):
        yield from put(block + rules.ahead)
        for peer in range(size):
            if peer != rank:
                if rules.without != "posted":
                    yield Wait(peer, POSTED, block + 1)
                yield Look(peer, "given", block % rules.depth, block)
        yield Announce(READ, block + 1)
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
    """Yield the steps of ``shared_all_reduce``, one after the other, in areas in turn."""
    for call in range(1, calls + 1):
        yield Write("area", call % areas, call)
        yield Announce(ARRIVED, call)
        for peer in range(size):
            if peer != rank:
                yield Wait(peer, ARRIVED, call)
        for peer in range(size):
            if peer != rank:
                yield Look(peer, "area", call % areas, call)


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


Operation = Callable[[int, int, int, Rules], Iterator[Step]]


def tried(operation: Operation, size: int, blocks: int, rules: Rules) -> str:
    return first_failure(
        [[*operation(rank, size, blocks, rules), *small(rank, size)] for rank in range(size)]
    )


@pytest.mark.parametrize(("size", "blocks"), [(2, 1), (2, 2), (2, 5), (3, 1), (3, 3)])
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("operation", [all_reduce, broadcast, all_gather])
def test_no_interleaving_reads_what_it_is_not_for(
    operation: Operation, depth: int, size: int, blocks: int
) -> None:
    assert tried(operation, size, blocks, Rules(depth)) == ""


@pytest.mark.parametrize(
    ("operation", "rules"),
    [
        pytest.param(operation, rules, id=f"{operation.__name__}-{name}")
        for operation, name, rules in [
            (all_reduce, "two blocks ahead", Rules(ahead=2)),
            (all_reduce, "areas of one block", Rules(depth=1)),
            (all_reduce, "not waiting for what is posted", Rules(without="posted")),
            (all_reduce, "not waiting for what is folded", Rules(without="folded")),
            (all_reduce, "not waiting at the end", Rules(without="the end")),
            (broadcast, "not waiting for what is posted", Rules(without="posted")),
            (broadcast, "not waiting for the readers", Rules(without="read")),
            (broadcast, "not waiting at the end", Rules(without="the end")),
            (all_gather, "not waiting for what is posted", Rules(without="posted")),
            (all_gather, "not waiting for the readers", Rules(without="read")),
            (all_gather, "not waiting at the end", Rules(without="the end")),
        ]
    ],
)
def test_every_rule_is_needed(operation: Operation, rules: Rules) -> None:
    assert "reads" in tried(operation, 2, 5, rules)


@pytest.mark.parametrize(("size", "calls"), [(2, 6), (3, 4)])
def test_small_calls_take_two_areas_in_turn(size: int, calls: int) -> None:
    assert first_failure([[*small_calls(rank, size, calls, 2)] for rank in range(size)]) == ""


def test_one_area_would_not_do() -> None:
    assert "reads" in first_failure([[*small_calls(rank, 2, 3, 1)] for rank in range(2)])
