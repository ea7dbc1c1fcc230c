"""Communicators that are made from others: groups of their ranks, and next generations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collective.algorithms.messages import GROUP_TAG
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.process import shortage
from collective.contract.stalls import FamilyMember
from collective.deadline import Deadline
from collective.errors import (
    AllocationError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    RankError,
)
from collective.generations.lineage import Lineage
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Request, call_site, differing

from .calls.call import Call
from .host_calls import ObjectCalls

if TYPE_CHECKING:
    from .communicator import Communicator

C = TypeVar("C", bound="Communicator")
_UINT8 = BY_NAME["uint8"]
# Length of a member's note to the leader, and of the leader's answer.
_NOTE_BYTES, _ANSWER_BYTES = 4 << 10, 16 << 10
# Limits that make notes and answers fit: number of ranks shown, characters kept at the end of a
# path, and characters of a text. JSON may write one character of a path as twelve bytes.
_SHOWN, _SITE, _TEXT = 32, 250, 1000


def group(comm: C, ranks: Sequence[int], deadline: Deadline | None = None) -> C:
    """Return a communicator among ``ranks`` of ``comm``; see ``Communicator.group``.

    Args:
        deadline: deadline of a call that has begun, and makes this group; None for a new one.
    """
    members = [comm._path.check_rank("group", "rank", rank) for rank in ranks]
    if len(set(members)) != len(members):
        raise RankError(f"group: ranks {members}; expected each rank once {comm._path.who}.")
    if comm.rank not in members:
        raise RankError(
            f"group: ranks {members}; only these call it, and rank {comm.rank} is not one of them "
            f"{comm._path.who}. Do not make the call on this rank; or have every rank call "
            "split(color), with None on ranks that join no group."
        )
    child: C = comm._path.make(_Grouping(comm, members), deadline, False)
    return child


class _Grouping(Call):
    """Part of :func:`group` that is ordered with the other calls of the communicator."""

    operation = "group"

    def __init__(self, comm: Communicator, members: Sequence[int]) -> None:
        super().__init__(comm._path)
        self._comm = comm
        self._members = members

    def run(self, deadline: Deadline) -> Any:
        comm, members = self._comm, self._members
        backend = self.path.transfer(self._connect, deadline)
        child = _child(comm, backend, members, deadline)
        try:
            for listener in self.path.listeners.all:
                listener.group(child, members)
        except BaseException as error:
            # The other members already have the group, and would wait in it for this rank.
            comm.inner.fail(error)
            raise
        return child

    def _connect(self, deadline: Deadline) -> Backend:
        """Return the group's transport, after all members have arrived."""
        _meet(self.path.backend, self._members, deadline)
        return self.path.backend.group(self._members, deadline)


def _child(comm: C, backend: Backend, members: Sequence[int], deadline: Deadline) -> C:
    """Return the communicator over a group's transport, as a child of ``comm``."""
    child = made_alike(comm, backend, backend.rank, backend.size, None)
    comm.inner.children.add(child.inner)  # so that it is closed with comm, even if this fails
    child.inner.family = FamilyMember(child._path, comm.inner.family, members)
    lineage = comm.inner.succession.lineage
    if lineage is not None:
        name = child.inner.family.name
        child.inner.succession.lineage = lineage.group(backend, members, name)
    if comm.capabilities.across_hosts:
        hosts = _hosts(child, comm.host, deadline)
        child.local_rank = hosts[: child.rank].count(comm.host)
        child.local_size = hosts.count(comm.host)
    return child


def split(comm: C, color: int | str | None, key: int) -> C | None:
    """Return the communicator of the ranks with one colour; see ``Communicator.split``."""
    for name, value in (("color", color), ("key", key)):
        if name == "color" and value in (None, "host"):
            continue
        if not isinstance(value, (int, np.integer, np.bool_)):  # a comparison is a colour, too
            raise InvalidArgumentError(
                f"split: {name} {value!r} is not an integer {comm._path.who}."
            )
        if not -(2**63) <= int(value) < 2**63:
            raise InvalidArgumentError(
                f"split: {name} {value!r}; expected an integer of 64 bits {comm._path.who}."
            )
    deadline = _begun(comm)
    if color == "host":
        color = _hosts(comm, comm.host, deadline).index(comm.host)
    mine = np.array([[color is not None, color or 0, key]], np.int64)
    table = comm.inner.on_host.all_gather(mine, counts=[1] * comm.size, timeout=deadline)
    if color is None:
        return None
    members = [r for r in range(comm.size) if table[r, 0] and table[r, 1] == color]
    return group(comm, sorted(members, key=lambda r: (table[r, 2], r)), deadline)


def _begun(comm: Communicator) -> Deadline:
    """Return the deadline of a call of several steps, once its turn has come."""
    comm._path.lane.drain(Deadline.never())  # each call in the lane has a deadline of its own
    return Deadline(comm._path.timeout)


def _hosts(comm: Communicator, host: str, deadline: Deadline) -> list[str]:
    """Return the ranks' hosts; this rank's is ``host``."""
    calls = ObjectCalls(comm._path, "group", pickle=False, open_to_others=False)
    return calls.all_gather(host, deadline)


def _meet(backend: Backend, members: Sequence[int], deadline: Deadline) -> None:
    """Wait until all members have arrived; check that they name the same group and can connect.

    All of ``members`` call it. The lowest member is the leader: it receives a note from each member
    and sends the same answer to all.

    Raises:
        MismatchError: members name other ranks, or the same ranks in another order; raised on every
            member. The communicator breaks if some rank may be waiting for members that do not
            know of the call.
        AllocationError: a member does not have enough file descriptors; raised on every member.
        CollectiveTimeoutError, PeerLostError: a member did not arrive.
    """
    note = _note(members, shortage(backend.descriptors(members)))
    leader, *others = sorted(members)
    mail = _MemberMail(backend, deadline)
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
    """Return this rank's note to the leader."""
    call = Request("group", ranks=_shown(members))
    return {
        "order": _digest(members),
        "set": _digest(sorted(members)),
        "header": json.loads(call.header(call_site()[-_SITE:])),
        "problem": problem,
    }


def _answer(notes: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the leader's answer to all members, from their notes."""
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
    """Messages between the members: JSON, padded to a fixed length."""

    def __init__(self, backend: Backend, deadline: Deadline) -> None:
        self._backend = backend
        self._deadline = deadline

    def send(self, message: dict[str, Any], dst: int, nbytes: int) -> None:
        raw = np.zeros(nbytes, np.uint8)
        text = np.frombuffer(json.dumps(message).encode(), np.uint8)
        raw[: text.size] = text
        self._backend.send(Buffer(raw, _UINT8), dst, GROUP_TAG, self._deadline)

    def recv(self, src: int, nbytes: int) -> dict[str, Any]:
        buffer = Buffer.empty(nbytes, _UINT8)
        self._backend.recv(buffer, src, GROUP_TAG, self._deadline)
        message: dict[str, Any] = json.loads(buffer.array.tobytes().rstrip(b"\0"))
        return message


# -- next generations ---------------------------------------------------------------------


def made_alike(
    comm: C, backend: Backend, local_rank: int, local_size: int, lineage: Lineage | None
) -> C:
    """Return a communicator over another transport, otherwise with the settings of ``comm``."""
    return type(comm)(
        backend,
        local_rank=local_rank,
        local_size=local_size,
        host=comm.host,
        timeout=comm.timeout,
        check=comm._path.check,
        lineage=lineage,
        open_to_others=comm.inner.open_to_others,
    )


def succeed(comm: C, backend: Backend, lineage: Lineage, deadline: Deadline) -> C:
    """Return the communicator of the next generation, and close ``comm``.

    Args:
        comm: communicator of the last generation.
        backend: transport of the next generation.
        lineage: lineage of the next generation.
        deadline: deadline for the wait for background calls of ``comm``.
    """
    successor = made_alike(comm, backend, lineage.local_rank, lineage.local_size, lineage)
    members = [rank for rank in range(comm.size) if rank not in lineage.lost]
    succession = comm.inner.succession
    succession.hand_over(successor.inner.succession, backend.name, successor.rank == 0)
    try:
        for listener in comm._path.listeners.all:
            listener.group(successor, members)
        if succession.on_next is not None:
            succession.on_next(successor)
    except BaseException as error:
        # The other ranks already have the next generation, and would wait in it for this rank.
        successor.inner.fail(error)
        raise
    comm.inner.close(deadline)
    return successor
