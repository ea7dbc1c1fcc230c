"""Communicators of some of the ranks, or of all of them once more."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from collective.algorithms.messages import GROUP_TAG
from collective.contract.backend import Backend
from collective.contract.descriptors import shortage
from collective.contract.failure import Failure
from collective.contract.stalls import Membership
from collective.errors import (
    AllocationError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    RankError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Request, call_site, differing

from .deadline import Deadline
from .foreign_names import explained
from .grid import Grid
from .lifecycle import Life
from .object_calls import ObjectCalls

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.elastic.lineage import Lineage

__all__ = ["Groups"]

_UINT8 = BY_NAME["uint8"]
# The length of what a member tells, and of what it is answered.
_NOTE_BYTES, _ANSWER_BYTES = 4 << 10, 16 << 10
# What fits there, where JSON may write a character of a path as twelve bytes: how many ranks, how
# much of the end of a path, and how much of a text.
_SHOWN, _SITE, _TEXT = 32, 250, 1000


class Groups(Life, ObjectCalls):
    """The part of a communicator that makes groups."""

    @explained
    def group(self, ranks: Sequence[int]) -> Self:
        """Return a communicator among ``ranks``, which become 0, 1, … in that order.

        Collective among ``ranks`` only: the others neither call it nor notice.

        Args:
            ranks: distinct ranks, this one among them, in the same order everywhere.

        Raises:
            RankError: a rank is outside, or twice there, or this one is missing.
            MismatchError: a member names other ranks, or in another order.
            AllocationError: a member has not enough file descriptors left; on every member.
            CollectiveTimeoutError: a member did not call it.

        See Also:
            MPI_Comm_create_group.
        """
        members = [self._rank("group", "rank", rank) for rank in ranks]
        if len(set(members)) != len(members):
            raise RankError(f"group: ranks {members}; each of them once {self._who}.")
        if self.rank not in members:
            raise RankError(
                f"group: ranks {members}; only these call it, and rank {self.rank} is none of them "
                f"{self._who}. Leave the call out here, or have every rank call split(color), with "
                "None where it takes no part."
            )

        def make() -> Backend:
            deadline = Deadline(self.timeout)
            _meet(self._backend, members, deadline)
            return self._backend.group(members, deadline.left())

        def run() -> Any:
            child = self._child(self._transport(make), members)
            try:
                for listener in self._listeners:
                    listener.group(child, members)
            except BaseException as error:
                # The other members have the group, and would wait in it for this rank.
                self._abort(Failure.caused_by(self.rank, error))
                raise
            return child

        child: Self = self._go("group", run, False)  # type: ignore[assignment]
        return child

    def _alike(
        self, backend: Backend, local_rank: int, local_size: int, lineage: Lineage | None = None
    ) -> Self:
        """Return a communicator over another transport, for the rest as this one is."""
        made = type(self)(
            backend,
            local_rank=local_rank,
            local_size=local_size,
            host=self.host,
            timeout=self.timeout,
            check=self._check,
            lineage=lineage,
        )
        made._open = self._open
        return made

    def _child(self, backend: Backend, members: Sequence[int]) -> Self:
        child = self._alike(backend, backend.rank, backend.size)
        child._membership = Membership(child, self._membership, members)
        if self._lineage is not None:
            child._lineage = self._lineage.group(backend, members, child._membership.name)
        if self.capabilities.across_hosts:
            hosts = child.all_gather_object(self.host)
            child.local_rank = hosts[: child.rank].count(self.host)
            child.local_size = hosts.count(self.host)
        self._children.add(child)
        return child

    @overload
    def split(self, color: int, key: int = 0) -> Self: ...

    @overload
    def split(self, color: None, key: int = 0) -> None: ...

    @overload
    def split(self, color: int | None, key: int = 0) -> Self | None: ...

    @explained
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Part the ranks by colour: return the communicator of those with this one's.

        Collective: every rank calls it.

        Args:
            color: an integer; ranks with the same come together. None takes no part.
            key: orders the ranks of a colour; ties by rank here.

        Returns:
            The new communicator, or None if ``color`` is None.

        See Also:
            MPI_Comm_split.
        """
        for name, value in (("color", color), ("key", key)):
            if value is None and name == "color":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise InvalidArgumentError(
                    f"split: {name} {value!r} is not an integer {self._who}."
                )
            if not -(2**63) <= value < 2**63:
                raise InvalidArgumentError(
                    f"split: {name} {value!r}; an integer of 64 bits {self._who}."
                )
        mine = np.array([[color is not None, color or 0, key]], np.int64)
        table = self._hosted().all_gather(mine, counts=[1] * self.size)
        if color is None:
            return None
        members = [r for r in range(self.size) if table[r, 0] and table[r, 1] == color]
        return self.group(sorted(members, key=lambda r: (table[r, 2], r)))

    @explained
    def split_by_host(self) -> Self:
        """Return the communicator of this host's ranks.

        Collective: every rank calls it.

        See Also:
            MPI_Comm_split_type with MPI_COMM_TYPE_SHARED.
        """
        hosts = self.all_gather_object(self.host)
        return self.group([r for r in range(self.size) if hosts[r] == self.host])

    @explained
    def dup(self) -> Self:
        """Return a communicator of the same ranks whose calls don't mix with these.

        Collective: every rank calls it.

        See Also:
            MPI_Comm_dup.
        """
        return self.group(range(self.size))

    @explained
    def grid(
        self,
        shape: int | Sequence[int | None] | None,
        periodic: bool | Sequence[bool] = False,
    ) -> Grid[Self]:
        """Return the ranks as the points of a grid: this one's coordinates and neighbours.

        It sends nothing. Ranks that give different shapes see different grids.

        Args:
            shape: how many ranks there are along each axis. What is None or -1 is computed, and
                several of these as near to each other as may be, the larger first: ``(None,
                None)`` is 3 by 2 of six ranks.
            periodic: whether the last rank of an axis is next to the first, for all axes or each.

        Raises:
            InvalidArgumentError: the grid has not as many points as there are ranks.

        See Also:
            MPI_Cart_create, MPI_Dims_create.
        """
        return Grid(self, shape, periodic)


def _meet(backend: Backend, members: Sequence[int], deadline: Deadline) -> None:
    """Return when all members are there, mean the same group and have room for it.

    The lowest of them hears what each wants, and answers all. All of ``members`` call it.

    Raises:
        MismatchError: members name other ranks, or in another order; on every member. The
            communicator is broken if some rank may wait for members that do not know of it.
        AllocationError: a member has not enough file descriptors; on every member.
        CollectiveTimeoutError, PeerLostError: a member did not come.
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

    def __init__(self, backend: Backend, deadline: Deadline) -> None:
        self._backend = backend
        self._deadline = deadline

    def send(self, message: dict[str, Any], dst: int, nbytes: int) -> None:
        raw = np.zeros(nbytes, np.uint8)
        text = np.frombuffer(json.dumps(message).encode(), np.uint8)
        raw[: text.size] = text
        self._backend.send(Buffer(raw, _UINT8), dst, GROUP_TAG, self._deadline.left())

    def recv(self, src: int, nbytes: int) -> dict[str, Any]:
        buffer = Buffer.empty(nbytes, _UINT8)
        self._backend.recv(buffer, src, GROUP_TAG, self._deadline.left())
        message: dict[str, Any] = json.loads(buffer.array.tobytes().rstrip(b"\0"))
        return message
