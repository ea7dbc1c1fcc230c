"""Model of AArch64's order of memory accesses, and the protocols of ``shm`` in this model.

x86 keeps stores in order and loads in order, so no test on x86 finds a missing acquire or release.
An emulator on x86 finds none either. The model is that of the Arm Architecture Reference Manual
(section "Definition of the Armv8 memory model"), without its dependencies. Without dependencies the
model permits more executions than the processor, so what it forbids cannot happen.

A program has one list of accesses for each thread. Each read names the value that it must return.
:func:`is_possible` tries all executions: each read takes its value from any write, and the writes
of each word have any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal, NamedTuple

import pytest

from collective.backends.shm import fence

Order = Literal["", "acquire", "acquire-pc", "release"]


class Access(NamedTuple):
    """Read, write or barrier.

    Attributes:
        kind: ``"read"``, ``"write"``, or the barrier ``"dmb"``, ``"dmb ld"`` or ``"dmb st"``.
        word: name of the word in memory.
        value: value that is written, or that the read must return.
        order: ``acquire`` is LDAR, ``acquire-pc`` is LDAPR, ``release`` is STLR.
        paired: whether the next access is the write of the same exclusive pair (LDXR, STXR).
    """

    kind: str
    word: str = ""
    value: int = 0
    order: Order = ""
    paired: bool = False


def read(word: str, value: int, order: Order = "", paired: bool = False) -> Access:
    return Access("read", word, value, order, paired)


def write(word: str, value: int, order: Order = "") -> Access:
    return Access("write", word, value, order)


DMB, DMB_LD, DMB_ST = Access("dmb"), Access("dmb ld"), Access("dmb st")


class Event(NamedTuple):
    """Access of a thread, or the first value of a word (``thread`` is -1)."""

    thread: int
    at: int
    access: Access


Edges = set[tuple[Event, Event]]


class Choice(NamedTuple):
    """Possible communication over one word.

    Attributes:
        sources: each read and the write from which it takes its value.
        writes: all writes, in the order in which memory has them.
    """

    sources: tuple[tuple[Event, Event], ...]
    writes: tuple[Event, ...]

    def edges(self) -> Iterator[tuple[str, Event, Event]]:
        """Yield reads-from, coherence and from-read: what memory does earlier, and what later."""
        rank = {event: index for index, event in enumerate(self.writes)}
        for earlier, later in itertools.combinations(self.writes, 2):
            yield "coherence", earlier, later
        for reader, source in self.sources:
            yield "reads-from", source, reader
            for later in self.writes[rank[source] + 1 :]:
                yield "from-read", reader, later


def has_cycle(edges: Iterable[tuple[Event, Event]]) -> bool:
    following: dict[Event, list[Event]] = {}
    for earlier, later in edges:
        following.setdefault(earlier, []).append(later)
    done: set[Event] = set()

    def leads_back(event: Event, path: frozenset[Event]) -> bool:
        if event in path:
            return True
        if event in done:
            return False
        longer = path | {event}
        found = any(leads_back(later, longer) for later in following.get(event, ()))
        done.add(event)
        return found

    return any(leads_back(event, frozenset()) for event in following)


def choices(word: str, events: Sequence[Event]) -> Iterator[Choice]:
    """Yield what can happen to one word: each thread sees it change in one order."""
    of_word = [event for event in events if event.access.word == word]
    first = Event(-1, 0, write(word, 0))
    reads = [event for event in of_word if event.access.kind == "read"]
    writes = [event for event in of_word if event.access.kind == "write"]
    pairs = {
        event: later
        for event in reads
        for later in writes
        if event.access.paired and later[:2] == (event.thread, event.at + 1)
    }
    program = {(a, b) for a in of_word for b in of_word if a.thread == b.thread and a.at < b.at}
    for order in itertools.permutations(writes):
        memory = (first, *order)
        fitting = [[w for w in memory if w.access.value == event.access.value] for event in reads]
        for sources in itertools.product(*fitting):
            choice = Choice(tuple(zip(reads, sources)), memory)
            rank = {event: index for index, event in enumerate(memory)}
            # No other write comes between the two accesses of a pair.
            atomic = all(
                rank[pairs[event]] == rank[source] + 1
                for event, source in choice.sources
                if event in pairs
            )
            if atomic and not has_cycle(program | {(a, b) for _, a, b in choice.edges()}):
                yield choice


def barrier_edges(thread: Sequence[Event]) -> Edges:
    """Return the pairs of accesses of one thread whose order the processor keeps."""
    edges: Edges = set()
    for a, b in itertools.combinations(thread, 2):
        between = {event.access.kind for event in thread[a.at + 1 : b.at]}
        reads, acquires = a.access.kind == "read", a.access.order.startswith("acquire")
        if (
            (reads and acquires)
            or b.access.order == "release"
            or (a.access.order == "release" and b.access.order == "acquire")
            or "dmb" in between
            or ("dmb ld" in between and reads)
            or ("dmb st" in between and (a.access.kind, b.access.kind) == ("write", "write"))
            or (a.access.paired and b.at == a.at + 1)
        ):
            edges.add((a, b))
    return edges


def is_possible(*threads: Sequence[Access]) -> bool:
    """Return whether some execution gives every read its value."""
    program = [
        [Event(number, at, access) for at, access in enumerate(thread)]
        for number, thread in enumerate(threads)
    ]
    events = [event for thread in program for event in thread]
    kept: Edges = set().union(*(barrier_edges(thread) for thread in program))
    exclusive = {
        thread[event.at + 1] for thread in program for event in thread if event.access.paired
    }
    words = sorted({event.access.word for event in events if event.access.word})
    for execution in itertools.product(*(list(choices(word, events)) for word in words)):
        edges = set(kept)
        for choice in execution:
            for name, earlier, later in choice.edges():
                forwarded = (
                    name == "reads-from"
                    and earlier in exclusive
                    and later.access.order.startswith("acquire")
                )
                if earlier.thread != later.thread or forwarded:
                    edges.add((earlier, later))
        if not has_cycle(edges):
            return True
    return False


# -- the model itself ------------------------------------------------------------------------------


def message_passing(sender: Sequence[Access], receiver: Sequence[Access]) -> bool:
    """Return whether the receiver can see the flag and then old data."""
    return is_possible(
        [write("data", 1), *sender, write("flag", 1)],
        [read("flag", 1), *receiver, read("data", 0)],
    )


def store_buffering(between: Sequence[Access], stored: Order, loaded: Order) -> bool:
    """Return whether two threads can store and then both miss the other's store."""
    return is_possible(
        [write("x", 1, stored), *between, read("y", 0, loaded)],
        [write("y", 1, stored), *between, read("x", 0, loaded)],
    )


@pytest.mark.parametrize(
    ("possible", "result"),
    [
        pytest.param(message_passing([], []), True, id="MP"),
        pytest.param(message_passing([DMB_ST], []), True, id="MP+dmb.st+po"),
        pytest.param(message_passing([DMB_ST], [DMB_LD]), False, id="MP+dmb.st+dmb.ld"),
        pytest.param(message_passing([DMB], [DMB]), False, id="MP+dmbs"),
        pytest.param(store_buffering([], "", ""), True, id="SB"),
        pytest.param(store_buffering([DMB_ST], "", ""), True, id="SB+dmb.sts"),
        pytest.param(store_buffering([DMB], "", ""), False, id="SB+dmbs"),
        pytest.param(store_buffering([], "release", "acquire"), False, id="SB+rel-acqs"),
        pytest.param(store_buffering([], "release", "acquire-pc"), True, id="SB+rel-acqpcs"),
        pytest.param(store_buffering([], "release", ""), True, id="SB+rel-pos"),
        pytest.param(
            is_possible([read("x", 1), write("y", 1)], [read("y", 1), write("x", 1)]),
            True,
            id="LB",
        ),
        pytest.param(
            is_possible(
                [read("x", 1), write("y", 1, "release")], [read("y", 1), write("x", 1, "release")]
            ),
            False,
            id="LB+po-rels",
        ),
        pytest.param(is_possible([write("x", 1)], [read("x", 1), read("x", 0)]), False, id="CoRR"),
        pytest.param(
            is_possible(
                [write("x", 1)],
                [write("y", 1)],
                [read("x", 1, "acquire"), read("y", 0)],
                [read("y", 1, "acquire"), read("x", 0)],
            ),
            False,
            id="IRIW+acq-pos",
        ),
        pytest.param(
            is_possible(
                [write("x", 1)],
                [write("y", 1)],
                [read("x", 1), read("y", 0)],
                [read("y", 1), read("x", 0)],
            ),
            True,
            id="IRIW",
        ),
    ],
)
def test_model_agrees_with_published_litmus_tests(possible: bool, result: bool) -> None:
    assert possible == result


# -- shm -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", ["acquire", "acquire-pc", ""])
@pytest.mark.parametrize("stored", ["release", ""])
def test_announced_data_arrives_whole(stored: Order, loaded: Order) -> None:
    # A count is announced behind the data; the other end reads the data behind the count.
    stale = is_possible(
        [write("data", 1), write("count", 1, stored)],
        [read("count", 1, loaded), read("data", 0)],
    )
    assert stale == (stored == "" or loaded == "")


@pytest.mark.parametrize("loaded", ["acquire", ""])
@pytest.mark.parametrize("stored", ["release", ""])
def test_place_is_written_again_after_it_was_read(stored: Order, loaded: Order) -> None:
    # The reader announces that it has read the data; the writer sees that and writes there again.
    overwritten = is_possible(
        [read("data", 1), write("read", 1, stored)],
        [read("read", 1, loaded), write("data", 1)],
    )
    assert overwritten == (stored == "" or loaded == "")


class Claim(NamedTuple):
    """Accesses that look for a claim, and that follow one; see the top of rings.c.

    Attributes:
        sent: order of the store that announces the whole message.
        claimed: order of the store of the claim.
        looked: order of the loads behind both stores.
        between: barriers between each store and its load.
        before: barriers before each store, as an emulator has them.
    """

    sent: Order = "release"
    claimed: Order = "release"
    looked: Order = "acquire"
    between: tuple[Access, ...] = ()
    before: tuple[Access, ...] = ()


def fetched_too_late(claim: Claim) -> bool:
    """Return whether a receiver can fetch what the sender's caller wrote after the message.

    The array has the message, 1. The counter of the sender is 1 behind the head and 2 behind the
    message. A sender that sees no claim returns, and its caller writes 2 to the array. A receiver
    that sees the counter below 2 after its claim fetches the array.
    """
    return is_possible(
        [
            write("array", 1),
            write("sent", 1, "release"),
            *claim.before,
            write("sent", 2, claim.sent),
            *claim.between,
            read("claim", 0, claim.looked),
            DMB_LD,
            write("array", 2),
        ],
        [
            read("sent", 1, "acquire"),
            *claim.before,
            write("claim", 1, claim.claimed),
            *claim.between,
            read("sent", 1, claim.looked),
            DMB_LD,
            read("array", 2),
        ],
    )


def test_claimed_message_is_fetched_before_sender_returns() -> None:
    assert not fetched_too_late(Claim())


@pytest.mark.parametrize(
    "claim",
    [
        Claim(sent=""),
        Claim(claimed=""),
        Claim(looked=""),
        Claim(looked="acquire-pc"),
    ],
    ids=["plain announcement", "plain claim", "plain looks", "looks by LDAPR"],
)
def test_claim_with_weaker_order_fetches_too_late(claim: Claim) -> None:
    assert fetched_too_late(claim)


def test_claim_under_emulator_needs_barrier_behind_store() -> None:
    # QEMU on x86 has STLR as a barrier and a store, and LDAR as a load and a barrier.
    emulated = Claim(sent="", claimed="", looked="", before=(DMB,))
    assert fetched_too_late(emulated)
    assert not fetched_too_late(emulated._replace(between=(DMB,)))


def test_sender_that_sees_claim_returns_after_fetch() -> None:
    assert not is_possible(
        [
            write("sent", 2, "release"),
            read("claim", 1, "acquire"),
            read("received", 2, "acquire"),
            write("array", 2),
        ],
        [write("claim", 1, "release"), read("array", 2), write("received", 2, "release")],
    )


def lock_turns(name: str, turns: int) -> list[Access]:
    """Acquire and release a lock by exclusive pairs, as glibc's semaphores do."""
    turn = [
        read(name, 0, "acquire", paired=True),
        write(name, 1),
        read(name, 1, paired=True),
        write(name, 0, "release"),
    ]
    return turn * turns


@pytest.mark.parametrize(("turns", "ordered"), [(1, False), (2, True)])
def test_two_turns_of_lock_order_announcement(turns: int, ordered: bool) -> None:
    stale = message_passing(lock_turns("one", turns), lock_turns("two", turns))
    assert stale == (not ordered)


@pytest.mark.parametrize(("turns", "ordered"), [(1, False), (2, True)])
def test_two_turns_of_lock_order_store_before_load(turns: int, ordered: bool) -> None:
    both_miss = is_possible(
        [write("x", 1), *lock_turns("one", turns), read("y", 0)],
        [write("y", 1), *lock_turns("two", turns), read("x", 0)],
    )
    assert both_miss == (not ordered)


class CountedLock:
    """Lock that counts its turns."""

    def __init__(self) -> None:
        self.turns = 0

    def __enter__(self) -> None:
        self.turns += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


def test_fence_in_python_orders_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = CountedLock()
    monkeypatch.setattr(fence, "ORDERED", False)
    monkeypatch.setattr(fence, "_lock", lock)
    fence.fence()
    assert not message_passing(lock_turns("one", lock.turns), lock_turns("two", lock.turns))


@pytest.mark.parametrize(("barriers", "ordered"), [((), False), ((DMB_LD,), True)])
def test_wait_in_python_needs_fence_before_data(
    barriers: tuple[Access, ...], ordered: bool
) -> None:
    # Python loads a counter without order, and C reads the data behind it.
    stale = is_possible(
        [write("data", 1), write("count", 1, "release")],
        [read("count", 1), *barriers, read("data", 0)],
    )
    assert stale == (not ordered)
