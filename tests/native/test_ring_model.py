"""Model of the protocol of ``rings.c``: all interleavings of one sender and one receiver.

Each end makes the same steps as the C code, with one word or one piece of data at a time, and the
test visits every reachable state. The receiver may claim a message at any time, as if the sender
were not scheduled, and the kernel may refuse the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Rules(NamedTuple):
    """Rules of the protocol; a false value makes the protocol wrong.

    Attributes:
        capacity: number of pieces that a ring holds.
        looks_for_a_claim: whether a sender that has written all checks for a claim.
        looks_again: whether a receiver reads ``head`` again after its claim.
        waits_for_room: whether the sender waits for room in the ring.
        announces_after: whether the sender announces each piece after writing it.
    """

    capacity: int = 2
    looks_for_a_claim: bool = True
    looks_again: bool = True
    waits_for_room: bool = True
    announces_after: bool = True


class State(NamedTuple):
    """Shared words and data, and the positions of both ends.

    Attributes:
        head, tail, claim: words as in a ring.
        ring: content of each place: number of the message and number of the piece.
        memory: number of the message in the sender's array.
        sender: next step, number of its message, and number of pieces written.
        receiver: next step, number of its message, and number of pieces received.
    """

    head: int = 0
    tail: int = 0
    claim: int = 0
    ring: tuple[tuple[int, int], ...] = ()
    memory: int = 1
    sender: tuple[str, int, int] = ("look", 1, 0)
    receiver: tuple[str, int, int] = ("look", 1, 0)


class Wrong(Exception):
    """A receiver has data that was not sent."""


def sends(state: State, pieces: int, messages: int, rules: Rules) -> Iterator[State]:
    """Yield the states that can follow a step of the sender."""
    step, message, written = state.sender
    end = message * pieces
    position = end - pieces + written
    if step == "look":
        if state.claim == end:
            # The receiver owns the array until it has read all of it.
            if state.tail == end:
                yield state._replace(sender=("return", message, pieces))
        elif written == pieces:
            yield state._replace(sender=("return", message, pieces))
        elif position - state.tail < rules.capacity or not rules.waits_for_room:
            yield state._replace(sender=("write", message, written))
    elif step == "write":
        ring = list(state.ring)
        ring[position % rules.capacity] = message, written
        announce = "announce" if rules.announces_after else "look"
        yield state._replace(ring=tuple(ring), sender=(announce, message, written + 1))
    elif step == "announce":
        done = written == pieces and not rules.looks_for_a_claim
        yield state._replace(head=position, sender=("return" if done else "look", message, written))
    elif step == "return" and message <= messages:
        following = ("look" if message < messages else "over", message + 1, 0)
        yield state._replace(head=end, memory=message + 1, sender=following)


def receives(state: State, pieces: int, messages: int, rules: Rules) -> Iterator[State]:
    """Yield the states that can follow a step of the receiver: a read or a claim."""
    step, message, taken = state.receiver
    end = message * pieces
    position = end - pieces + taken
    if step == "look":
        if state.head > position:
            yield state._replace(receiver=("read", message, taken))
        # The receiver knows of a message once it has read the first piece.
        if taken and taken < pieces and state.claim != end:
            yield state._replace(claim=end, receiver=("claimed", message, taken))
    elif step == "claimed":
        there = rules.looks_again and state.head >= end
        yield state._replace(receiver=("withdraw" if there else "fetch", message, taken))
    elif step == "fetch":
        if state.memory != message:
            raise Wrong(f"message {state.memory} in place of {message}")
        yield state._replace(receiver=("tell", message, pieces))
        yield state._replace(receiver=("withdraw", message, taken))
    elif step == "withdraw":
        yield state._replace(claim=0, receiver=("look", message, taken))
    elif step == "read":
        if state.ring[position % rules.capacity] != (message, taken):
            raise Wrong(f"{state.ring[position % rules.capacity]} for {(message, taken)}")
        yield state._replace(receiver=("tell", message, taken + 1))
    elif step == "tell":
        following = ("look", message, taken)
        if taken == pieces:
            following = ("look" if message < messages else "over", message + 1, 0)
        yield state._replace(tail=position, receiver=following)


def first_failure(pieces: int, messages: int, rules: Rules) -> str:
    """Try all interleavings; return the first failure as text, or an empty text."""
    start = State(ring=((0, 0),) * rules.capacity)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        try:
            following = [
                *sends(state, pieces, messages, rules),
                *receives(state, pieces, messages, rules),
            ]
        except Wrong as wrong:
            return f"reads {wrong}"
        if not following and (state.sender[0], state.receiver[0]) != ("over", "over"):
            return f"nobody can go on: {state}"
        todo += [successor for successor in following if successor not in seen]
        seen.update(following)
    return ""


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize(("pieces", "messages"), [(1, 4), (2, 3), (3, 3), (5, 2)])
def test_receiver_reads_each_piece_once_in_order(pieces: int, messages: int, capacity: int) -> None:
    assert first_failure(pieces, messages, Rules(capacity)) == ""


@pytest.mark.parametrize(
    "rule", ["looks_for_a_claim", "looks_again", "waits_for_room", "announces_after"]
)
def test_protocol_without_rule_fails(rule: str) -> None:
    rules = Rules()._replace(**{rule: False})
    assert first_failure(3, 3, rules) != ""
