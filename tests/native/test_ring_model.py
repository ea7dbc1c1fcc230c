"""The protocol of ``messages.c`` in all interleavings of a sender and a receiver, and few bytes.

Each end does what the C does, at one word or one piece of data at a time, and all states that can
be reached are tried. The receiver may claim a message at any time, as if the sender
had no processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Rules(NamedTuple):
    """What the protocol is, and what it must not be.

    Attributes:
        capacity: pieces that a ring holds.
        looks_for_a_claim: whether a sender that has written all looks whether it was claimed.
        looks_again: whether a receiver that claims looks what has been announced by then.
        waits_for_room: whether the sender does.
        announces_after: whether what is announced has been written, or read, before.
    """

    capacity: int = 2
    looks_for_a_claim: bool = True
    looks_again: bool = True
    waits_for_room: bool = True
    announces_after: bool = True


class State(NamedTuple):
    """Shared words and data, and where both ends are.

    Attributes:
        head, tail, claim: as in a ring.
        ring: what each place holds: a message's number and a piece's.
        memory: the message that the sender's array holds.
        sender: the step it takes next, of which message, and how many pieces it has written.
        receiver: the step, of which message, and how many pieces it has.
    """

    head: int = 0
    tail: int = 0
    claim: int = 0
    ring: tuple[tuple[int, int], ...] = ()
    memory: int = 1
    sender: tuple[str, int, int] = ("look", 1, 0)
    receiver: tuple[str, int, int] = ("look", 1, 0)


class Wrong(Exception):
    """A receiver has something that was not sent."""


def sends(state: State, pieces: int, messages: int, rules: Rules) -> Iterator[State]:
    """Yield what a step of the sender makes of a state."""
    step, message, written = state.sender
    end = message * pieces
    position = end - pieces + written
    if step == "look":
        if state.claim == end:
            # The array is the receiver's until it has read all of it.
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
    """Yield what the steps of the receiver make of a state: it may read, or claim."""
    step, message, taken = state.receiver
    end = message * pieces
    position = end - pieces + taken
    if step == "look":
        if state.head > position:
            yield state._replace(receiver=("read", message, taken))
        # It knows of a message when there is its first piece.
        if taken and taken < pieces and state.claim != end:
            yield state._replace(claim=end, receiver=("claimed", message, taken))
    elif step == "claimed":
        there = rules.looks_again and state.head >= end
        yield state._replace(receiver=("look" if there else "fetch", message, taken))
    elif step == "fetch":
        if state.memory != message:
            raise Wrong(f"message {state.memory} in place of {message}")
        yield state._replace(receiver=("tell", message, pieces))
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
    """Try all interleavings; return what goes wrong in one of them, or nothing."""
    start = State(ring=((0, 0),) * rules.capacity)
    found, ahead = {start}, [start]
    while ahead:
        state = ahead.pop()
        try:
            following = [
                *sends(state, pieces, messages, rules),
                *receives(state, pieces, messages, rules),
            ]
        except Wrong as wrong:
            return f"reads {wrong}"
        if not following and (state.sender[0], state.receiver[0]) != ("over", "over"):
            return f"nobody can go on: {state}"
        ahead += [each for each in following if each not in found]
        found.update(following)
    return ""


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize(("pieces", "messages"), [(1, 4), (2, 3), (3, 3), (5, 2)])
def test_every_piece_is_read_once_and_in_order(pieces: int, messages: int, capacity: int) -> None:
    assert first_failure(pieces, messages, Rules(capacity)) == ""


@pytest.mark.parametrize(
    "rule", ["looks_for_a_claim", "looks_again", "waits_for_room", "announces_after"]
)
def test_every_rule_is_needed(rule: str) -> None:
    rules = Rules()._replace(**{rule: False})
    assert first_failure(3, 3, rules) != ""
