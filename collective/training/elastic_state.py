"""What training has to have on every rank: kept in memory, gone back to, made equal again.

A part of a state is kept as a *copy* (:mod:`.elastic_copies`) of plain data and arrays, which are
the part's own no longer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from collective.communicator.objects import encode
from collective.errors import (
    InvalidArgumentError,
    MismatchError,
    RanksJoinError,
    StateLostError,
)
from collective.memory.arrays import is_array

from .elastic_copies import Path, copied, digest_of, leaves, mapped, plain
from .rebinding import Rebindable
from .shards import Sharded

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["Keeper", "State", "StateDict", "register"]


class Keeper(NamedTuple):
    """How objects of a class are kept.

    Attributes:
        copy: returns what an object is, as nested plain data and arrays; they may be the object's
            own memory, for whoever asks copies them.
        load: makes an object what a copy says, and returns it, or another in its place. The copy
            is the object's from then on.
        rebind: has an object go on over another communicator; None where that is what its own
            method ``rebind`` does, if it has one.
    """

    copy: Callable[[Any], Any]
    load: Callable[[Any, Any], Any]
    rebind: Callable[[Any, Communicator], Any] | None = None


@runtime_checkable
class StateDict(Protocol):
    """What has its state as a dict: modules, optimizers, schedulers, samplers of PyTorch."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state."""


_registered: dict[type, Keeper] = {}
#: Adapters with kinds of their own, by the package whose classes those are for.
_ADAPTERS = {"chainer": "collective.adapters.chainer.elastic"}


def register(
    cls: type,
    copy: Callable[[Any], Any],
    load: Callable[[Any, Any], Any],
    rebind: Callable[[Any, Communicator], Any] | None = None,
) -> None:
    """Have objects of ``cls``, and of classes derived from it, kept by functions.

    For parts of a :class:`State` that have neither ``state_dict()`` and ``load_state_dict()``, nor
    are arrays or plain data.

    Args:
        copy, load, rebind: see :class:`Keeper`.
    """
    _registered[cls] = Keeper(copy, load, rebind)


def _load_state_dict(part: StateDict, kept: Any) -> StateDict:
    part.load_state_dict(kept)
    return part


def _load_array(part: Any, kept: Any) -> Any:
    if isinstance(part, np.generic):  # a number, such as a mean: it is no memory to write to
        return kept
    (part.detach() if hasattr(part, "detach") else part)[...] = kept
    return part


_STATE_DICT = Keeper(lambda part: part.state_dict(), _load_state_dict)
_ARRAY = Keeper(lambda part: part, _load_array)
_PLAIN = Keeper(lambda part: part, lambda part, kept: kept)


def _keeper_of(part: Any) -> Keeper:
    for cls in type(part).__mro__:
        names = cls.__module__.split(".")
        root = names[2] if names[:2] == ["collective", "adapters"] else names[0]
        if root in _ADAPTERS:
            importlib.import_module(_ADAPTERS[root])
        if cls in _registered:
            return _registered[cls]
    if isinstance(part, StateDict):
        return _STATE_DICT
    return _ARRAY if is_array(part) else _PLAIN


# -- the state ------------------------------------------------------------------------------------


@dataclass
class _Commit:
    """What the parts were at one time.

    Attributes:
        number: of the commit, from 0.
        parts: a copy of each that is the same on all ranks, by name.
        generation: of the ranks over which the other parts are cut.
        shards: what this rank holds of those, by name.
    """

    number: int
    parts: dict[str, Any]
    generation: int = 0
    shards: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> list[int]:
        """What is greater for the later of two."""
        return [self.number, self.generation]

    def digests(self) -> dict[Path, bytes]:
        """Return the digest of each leaf."""
        return {path: digest_of(value) for path, value in leaves(self.parts).items()}


class State:
    """What training goes on from: parts by name, of which a copy is kept in memory.

    A part is what has ``state_dict()`` and ``load_state_dict()`` (PyTorch's modules, optimizers and
    schedulers, and our ``ShardedSampler``), a link, optimizer, iterator or Trainer of Chainer's, an
    array, or plain data; :func:`register` takes others. Parts are attributes: ``state.step += 1``.

    What is to be the same on all ranks is a part, and nothing else: after a loss all ranks have the
    parts of one of them.

    The copies of the last two commits are on the device of what they are of, and cost twice as much
    memory as that: the next one is written over the older one, so that one that is interrupted
    harms none, and costs no new memory.

    Args:
        comm: the ranks that have the state.
        parts: by name. None may be called as a method of this class is.

    Attributes:
        comm: the ranks of now.
        commits: how often :meth:`commit` was called by those that are furthest.

    Raises:
        InvalidArgumentError: a part is of no known kind, or its name is taken.
    """

    def __init__(self, comm: Communicator, /, **parts: Any) -> None:
        for name in parts:
            if name.startswith("_") or hasattr(State, name) or name in ("comm", "commits"):
                raise InvalidArgumentError(
                    f"State: a part called {name!r}, which is a name of the class's own. Choose "
                    "another."
                )
        # Assignments go to parts.
        self.__dict__.update({"comm": comm, "_parts": dict(parts), "_pending": None})
        # Whether it has been the same on all ranks, and whether commits look who wants to join.
        self.__dict__.update({"_synced": False, "_grows": False})
        # The copies of the commit before the last, whose arrays the next one is written to.
        self.__dict__["_rooms"] = {}
        self._keep(0, self._copies({}, {}), comm)
        for path, value in leaves(self._kept.parts).items():
            self._refuse_unknown(path, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._parts:
            raise AttributeError(f"State has no part {name!r}; it has {list(self._parts)}.")
        return self._parts[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._parts:
            raise AttributeError(
                f"State has no part {name!r}; it has {list(self._parts)}. Give it to State(), on "
                "all ranks."
            )
        self._parts[name] = value

    @property
    def commits(self) -> int:
        """How often :meth:`commit` was called by those that are furthest."""
        number: int = self._kept.number
        return number

    def commit(self, **taken: int) -> None:
        """Keep what the parts are now: where all ranks go on from after a loss.

        Every rank calls it after the same step. It sends nothing, unless a part is cut over the
        ranks, as a ``ShardedOptimizer``, or processes may join: then it is collective.

        Args:
            taken: for samplers whose loader works ahead (``num_workers``), by the part's name: how
                many samples of this iteration this rank has used, as
                ``ShardedSampler.state_dict(taken)`` takes it.

        Raises:
            RanksJoinError: processes wait to join; the commit is made. ``generations`` takes it.
        """
        strange = sorted(set(taken) - set(self._parts))
        if strange:
            raise InvalidArgumentError(
                f"commit: no part {', '.join(strange)}; there are {', '.join(self._parts)}."
            )
        last, rooms = self._kept, self._rooms
        # Whatever interrupts this, they are neither in the last commit nor written to again.
        self.__dict__["_rooms"] = {}
        self._keep(last.number + 1, self._copies(taken, rooms), self.comm)
        self.__dict__["_rooms"] = last.parts
        if self._grows and (count := self.comm.waiting()):
            raise RanksJoinError(
                f"commit: {count} to join; the body of elastic.generations ends here, and runs "
                "again with all. Let this error pass."
            )

    def _keep(self, number: int, parts: dict[str, Any], comm: Communicator) -> None:
        """Put a commit in place: only as a whole, whatever interrupts it."""
        shards = {name: part.keep_shards() for name, part in self._sharded()}
        made = _Commit(number, parts, comm.generation, shards)
        if shards:
            # Where one rank has it in place, all others have it here, or in place: who goes on
            # from it needs all shards.
            self.__dict__["_pending"] = made
            comm.barrier()
        self.__dict__.update({"_kept": made, "_pending": None})

    def _sharded(self) -> list[tuple[str, Sharded]]:
        return [(name, self._parts[name]) for name in sorted(self._parts) if self._is_cut(name)]

    def _is_cut(self, name: str) -> bool:
        return isinstance(self._parts[name], Sharded)

    def restore(self) -> None:
        """Make the parts what they were at the last :meth:`commit`, on this rank."""
        for name, part in self._sharded():
            part.restore_shards(self._kept.shards[name])
        self._restore_parts()

    def _restore_parts(self) -> None:
        for name in self._kept.parts:
            part = self._parts[name]
            # Copied once more: what is loaded may be changed in place from now on.
            self._parts[name] = _keeper_of(part).load(part, copied(self._kept.parts[name]))

    def sync(self, comm: Communicator, *, grows: bool = False) -> None:
        """Have the same parts on all ranks of ``comm``, and go on with that communicator.

        All ranks go back to the last commit of the one that is furthest, the lowest of those.
        Who has other values than that one gets them from it; after a plain loss nobody has, and
        no part is sent. Parts with a method ``rebind`` are then bound to ``comm``.

        Who has not been in a ``sync`` yet, where others have, has joined: it has nothing that
        counts, whatever it has committed, and gets all.

        Collective: every rank calls it, whatever it has, before it goes on.

        Args:
            comm: the ranks.
            grows: whether commits look for processes that want to join: the same on all ranks.

        Raises:
            MismatchError: the ranks' states have other parts.
            StateLostError: something of a part that is cut over the ranks was on lost ones alone.
            CollectiveError: of the calls; the state is as it was, or is what all have gone back to.
        """
        joined = self._take_latest(comm) if self._sharded() else False
        digests = self._kept.digests()
        names = sorted(self._parts)
        mine = [self._version, digest_of(sorted(digests.items(), key=repr)), names]
        every: list[list[Any]] = comm.all_gather_object(mine)
        for rank, (_, _, theirs) in enumerate(every):
            if theirs != every[0][2]:
                raise MismatchError(
                    f"State: rank {rank} has parts {theirs}, rank 0 {every[0][2]} "
                    f"[rank {comm.rank} of {comm.size}]. Make the same state on all ranks."
                )
        source = max(range(comm.size), key=lambda rank: (every[rank][0], -rank))
        others = [rank for rank in range(comm.size) if every[rank][1] != every[source][1]]
        kept = self._kept.parts
        if others and comm.rank in (source, *others):
            with comm.group([source, *others]) as group:
                kept = self._from_first(group, digests)
        before, number = self._kept, every[source][0][1]
        self.__dict__["_kept"] = _Commit(number, kept, before.generation, before.shards)
        self._restore_parts()
        for name, part in self._sharded():
            part.regain_shards(comm, None if joined else before.shards[name])
        self._keep(number, kept, comm)
        self.__dict__.update({"comm": comm, "_synced": True, "_grows": grows})
        for name in names:
            part = self._parts[name]
            rebind = _keeper_of(part).rebind
            if rebind is not None:
                rebind(part, comm)
            elif isinstance(part, Rebindable):
                part.rebind(comm)

    @property
    def _version(self) -> list[int]:
        """What is greater for the rank that is further, and least for one that has joined."""
        return [int(self._synced), self._kept.number]

    def _take_latest(self, comm: Communicator) -> bool:
        """Have in place the latest commit that some rank of ``comm`` has there.

        Returns:
            Whether this rank has joined, and holds nothing of it.
        """
        known = [each.version for each in (self._kept, self._pending) if each is not None]
        every: list[tuple[bool, list[list[int]]]]
        every = comm.all_gather_object((self._synced, known))
        # At the very first nobody has been in a sync, and all count.
        counting = any(synced for synced, _ in every)
        latest = max(versions[0] for synced, versions in every if synced is counting)
        behind = [
            rank
            for rank, (synced, versions) in enumerate(every)
            if synced is counting and latest not in versions
        ]
        if behind:
            raise StateLostError(
                f"State: ranks {behind} have nothing of commit {latest[0]}, and a part is cut over "
                f"the ranks [rank {comm.rank} of {comm.size}]. Start all ranks again."
            )
        if self._synced is not counting:
            return True
        if self._kept.version != latest:
            self.__dict__.update({"_kept": self._pending, "_pending": None})
        return False

    def _from_first(self, group: Communicator, digests: dict[Path, bytes]) -> dict[str, Any]:
        """Return the parts of the group's rank 0, of which only what differs is sent."""
        every = [dict(each) for each in group.all_gather_object(list(digests.items()))]
        here = leaves(self._kept.parts)
        paths = list(every[0])
        missing = [
            number
            for number, path in enumerate(paths)
            if any(theirs.get(path) != every[0][path] for theirs in every[1:])
        ]
        sent = None
        if group.rank == 0:
            numbers = iter(range(len(paths)))
            outline = mapped(self._kept.parts, lambda path, value: next(numbers))
            sent = [plain(outline), [here[paths[number]] for number in missing]]
        outline, values = group.broadcast_object(sent)
        if group.rank == 0:
            kept: dict[str, Any] = self._kept.parts
            return kept
        found = dict(zip(missing, values))
        # Copied, as what was received together may share memory, and is written to later.
        received: dict[str, Any] = mapped(
            outline,
            lambda _, number: copied(found[number]) if number in found else here[paths[number]],
        )
        return received

    def _copies(self, taken: Mapping[str, int], rooms: Mapping[str, Any]) -> dict[str, Any]:
        names = [name for name in self._parts if not self._is_cut(name)]
        return {name: copied(self._copy(name, taken), rooms.get(name)) for name in names}

    def _copy(self, name: str, taken: Mapping[str, int]) -> Any:
        part = self._parts[name]
        return part.state_dict(taken[name]) if name in taken else _keeper_of(part).copy(part)

    def _refuse_unknown(self, path: Path, value: Any) -> None:
        try:
            encode(value)
        except InvalidArgumentError as error:
            name, *rest = path
            where = f" (at {'.'.join(map(str, rest))})" if rest else ""
            raise InvalidArgumentError(
                f"State: part {name!r} holds a {type(value).__name__}{where}; plain data, arrays, "
                "and what has state_dict() and load_state_dict() can be kept. For others call "
                "elastic.register(cls, copy, load)."
            ) from error
