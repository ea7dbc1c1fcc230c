"""How the members of a new group find out that they mean the same one, and have room for it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.algorithms.tags import GROUP_TAG
from collective.contract.backend import Backend
from collective.contract.descriptors import shortage
from collective.contract.failure import Failure
from collective.errors import (
    AllocationError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Request, call_site, differing

__all__ = ["meet"]

_UINT8 = BY_NAME["uint8"]
# The length of what a member tells, and of what it is answered.
_NOTE_BYTES, _ANSWER_BYTES = 4 << 10, 16 << 10
# What fits there, where JSON may write a character of a path as twelve bytes: how many ranks, how
# much of the end of a path, and how much of a text.
_SHOWN, _SITE, _TEXT = 32, 250, 1000


def meet(backend: Backend, members: Sequence[int], timeout: float) -> None:
    """Return when all members are there, mean the same group and have room for it.

    The lowest of them hears what each wants, and answers all. All of ``members`` call it.

    Raises:
        MismatchError: members name other ranks, or in another order; on every member. The
            communicator is broken if some rank may wait for members that do not know of it.
        AllocationError: a member has not enough file descriptors; on every member.
        CollectiveTimeoutError, PeerLostError: a member did not come.
    """
    end = time.monotonic() + timeout
    note = _note(members, shortage(backend.descriptors(members)))
    leader, *others = sorted(members)
    mail = _MemberMail(backend, end)
    try:
        if backend.rank != leader:
            mail.send(note, leader, _NOTE_BYTES)
            answer = mail.recv(leader, _ANSWER_BYTES)
        else:
            notes = {leader: note} | {rank: mail.recv(rank, _NOTE_BYTES) for rank in others}
            answer = _answer({rank: notes[rank] for rank in sorted(notes)})
            for rank in others:
                mail.send(answer, rank, _ANSWER_BYTES)
    except (CollectiveTimeoutError, PeerLostError) as error:
        why = str(error).partition(": ")[2]
        raise type(error)(f"group({_shown(members)}): {why}", error.ranks) from error
    who = f"[rank {backend.rank} of {backend.size}]"
    if answer["mismatch"]:
        if not answer["complete"]:
            text = f"the members made different groups:\n{answer['mismatch']}"
            backend.abort(Failure("mismatch", backend.rank, text))
        raise MismatchError(
            f"group: the members made different groups {who}:\n{answer['mismatch']}\nEvery member "
            "must name the same ranks in the same order."
        )
    if answer["problem"]:
        raise AllocationError(f"group({_shown(members)}): {answer['problem']} {who}.")


def _note(members: Sequence[int], problem: str) -> dict[str, Any]:
    """Return what this rank tells."""
    call = Request("group", ranks=_shown(members))
    return {
        "order": _digest(members),
        "set": _digest(sorted(members)),
        "header": json.loads(call.header(call_site()[-_SITE:])),
        "problem": problem,
    }


def _answer(notes: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what all members are told, from what each has said."""
    mismatch, problems = "", []
    if len({note["order"] for note in notes.values()}) > 1:
        mismatch = differing({rank: note["header"] for rank, note in notes.items()})
    for rank, note in notes.items():
        if note["problem"]:
            problems.append(f"rank {rank}: {note['problem']}")
    return {
        "mismatch": mismatch[:_TEXT],
        "complete": len({note["set"] for note in notes.values()}) == 1,
        "problem": "; ".join(problems)[:_TEXT],
    }


def _shown(members: Sequence[int]) -> str:
    more = len(members) - _SHOWN
    return str(list(members[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _digest(members: Sequence[int]) -> str:
    return hashlib.blake2b(repr(list(members)).encode(), digest_size=16).hexdigest()


class _MemberMail:
    """JSON of a fixed length, between the members."""

    def __init__(self, backend: Backend, end: float) -> None:
        self._backend = backend
        self._end = end

    def send(self, message: dict[str, Any], dst: int, nbytes: int) -> None:
        raw = np.zeros(nbytes, np.uint8)
        text = np.frombuffer(json.dumps(message).encode(), np.uint8)
        raw[: text.size] = text
        self._backend.send(Buffer(raw, _UINT8), dst, GROUP_TAG, self._left())

    def recv(self, src: int, nbytes: int) -> dict[str, Any]:
        buffer = Buffer.empty(nbytes, _UINT8)
        self._backend.recv(buffer, src, GROUP_TAG, self._left())
        message: dict[str, Any] = json.loads(buffer.array.tobytes().rstrip(b"\0"))
        return message

    def _left(self) -> float:
        return max(0.001, self._end - time.monotonic())
