"""State that training needs on every rank: kept in memory, restored, made equal on all ranks.

Each part of a state is kept as a *copy* (:mod:`.elastic_copies`) of plain data and arrays. The
copy shares no memory with the part.
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
from .preemption import Preemption
from .shares import Rebindable, Sharded

if TYPE_CHECKING:
    from collective.communicator import Communicator


class Keeper(NamedTuple):
    """Functions that copy and restore objects of a class.

    Attributes:
        copy: returns the state of an object as nested plain data and arrays. The arrays may be the
            object's own memory, because the caller copies them.
        load: puts an object into the state of a copy, and returns the object or a replacement.
            Afterwards the copy belongs to the object.
        rebind: makes an object continue over another communicator. None: call the object's own
            method ``rebind``, if it has one.
    """

    copy: Callable[[Any], Any]
    load: Callable[[Any, Any], Any]
    rebind: Callable[[Any, Communicator], Any] | None = None


@runtime_checkable
class StateDict(Protocol):
    """Object with its state as a dict: PyTorch's modules, optimizers, schedulers, samplers."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


_registered: dict[type, Keeper] = {}
#: Adapters that register their own classes, by the package that defines these classes.
_ADAPTERS = {
    "chainer": "collective.adapters.chainer.elastic",
    "torch": "collective.adapters.torch.sharded_optimizer",
}


def register(
    cls: type,
    copy: Callable[[Any], Any],
    load: Callable[[Any, Any], Any],
    rebind: Callable[[Any, Communicator], Any] | None = None,
) -> None:
    """Register functions that keep objects of ``cls``, and of classes derived from it.

    They are for parts of a :class:`State` that have no ``state_dict()`` and ``load_state_dict()``,
    and are neither arrays nor plain data.

    Args:
        copy, load, rebind: see :class:`Keeper`.
    """
    _registered[cls] = Keeper(copy, load, rebind)


def _load_state_dict(part: StateDict, kept: Any) -> StateDict:
    part.load_state_dict(kept)
    return part


def _load_array(part: Any, kept: Any) -> Any:
    # A scalar, such as a mean, is no memory to write to. The program may have assigned the part
    # since the commit, and writing to it would broadcast or cast another value in silence.
    if isinstance(part, np.generic) or not is_array(kept):
        return kept
    if (part.shape, part.dtype) != (kept.shape, kept.dtype):
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
    """Copy of the parts at one time.

    Attributes:
        number: number of the commit, from 0.
        parts: copies of the parts that are the same on all ranks, by name.
        generation: generation of the ranks over which the other parts are cut.
        shards: shards of those other parts that this rank holds, by name.
    """

    number: int
    parts: dict[str, Any]
    generation: int = 0
    shards: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> list[int]:
        """Number and generation, as a list that is greater for the later of two commits."""
        return [self.number, self.generation]

    def digests(self) -> dict[Path, bytes]:
        """Return the digest of each leaf."""
        return {path: digest_of(value) for path, value in leaves(self.parts).items()}


class State:
    """State that training continues from: named parts, with a copy of each kept in memory.

    A part may be one of:

    - an object that has ``state_dict()`` and ``load_state_dict()``: PyTorch's modules, optimizers
      and schedulers, and the library's ``ShardedSampler``
    - a link, optimizer, iterator or Trainer of Chainer
    - an array, or plain data
    - an object of a class for which the program has called :func:`register`.

    Parts are attributes: ``state.step += 1``.

    Make everything that must be the same on all ranks a part, and nothing else: after a loss all
    ranks have the parts of one of them.

    The copies of the last two commits are on the same device as the parts, and take twice the
    memory of the parts. The next commit overwrites the older copy. So an interrupted commit does
    not damage the last one, and a commit needs no new memory.

    Args:
        comm: ranks that have the state.
        parts: parts by name. No part may have the name of a method of this class.

    Attributes:
        comm: current ranks.
        commits: number of calls of :meth:`commit` on the rank that is furthest.

    Raises:
        InvalidArgumentError: a part is of an unknown kind, or its name is taken.
    """

    def __init__(self, comm: Communicator, /, **parts: Any) -> None:
        for name in parts:
            if name.startswith("_") or hasattr(State, name) or name in ("comm", "commits"):
                raise InvalidArgumentError(
                    f"State: a part called {name!r} is not allowed, because State has an attribute "
                    "of this name. Choose another name."
                )
        # __setattr__ assigns to parts, so the attributes are set in the instance's dict.
        self.__dict__.update({"comm": comm, "_parts": dict(parts), "_pending": None})
        # _synced: whether all ranks have had the same state. _grows: whether commits check for
        # processes that want to join.
        self.__dict__.update({"_synced": False, "_grows": False})
        self.__dict__["_preemption"] = Preemption()
        # Copies of the commit before the last. The next commit overwrites their arrays.
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
                f"State has no part {name!r}; it has {list(self._parts)}. Pass it to State(), on "
                "all ranks."
            )
        self._parts[name] = value

    @property
    def preemption(self) -> Preemption:
        """Whether this process has received SIGTERM in ``generations``."""
        found: Preemption = self._preemption
        return found

    @property
    def commits(self) -> int:
        """Number of calls of :meth:`commit` on the rank that is furthest."""
        number: int = self._kept.number
        return number

    def commit(self, **taken: int) -> None:
        """Keep the current values of the parts; after a loss all ranks continue from there.

        Every rank calls it after the same step. It sends nothing, with two exceptions, in which it
        is collective: a part is cut over the ranks, as a ``ShardedOptimizer`` is, or processes may
        join.

        Args:
            taken: number of samples of this iteration that this rank has used, by the part's
                name, for samplers whose loader works ahead (``num_workers``). It is passed to
                ``ShardedSampler.state_dict(taken)``.

        Raises:
            RanksJoinError: processes wait to join; the commit is complete. ``generations`` catches
                the error.
            PreemptedError: in ``generations`` this process has received SIGTERM; the commit is
                complete. The program ends, and the other ranks continue.
        """
        strange = sorted(set(taken) - set(self._parts))
        if strange:
            raise InvalidArgumentError(
                f"commit: no part {', '.join(strange)}; there are {', '.join(self._parts)}. Use "
                "the names of parts that were passed to State()."
            )
        last, rooms = self._kept, self._rooms
        # If this commit is interrupted, the arrays are then neither in the last commit nor
        # overwritten again.
        self.__dict__["_rooms"] = {}
        self._keep(last.number + 1, self._copies(taken, rooms), self.comm)
        self.__dict__["_rooms"] = last.parts
        self._preemption.check()
        if self._grows and (count := self.comm.membership.waiting()):
            raise RanksJoinError(
                f"commit: number of processes that wait to join: {count}. This error ends the body "
                "of elastic.generations, which then runs again with them. Do not catch it."
            )

    def _keep(self, number: int, parts: dict[str, Any], comm: Communicator) -> None:
        """Put a commit in place; an interruption leaves either the old commit or the new one."""
        shards = {name: part.keep_shards() for name, part in self._sharded()}
        commit = _Commit(number, parts, comm.membership.generation, shards)
        if shards:
            # After the barrier every rank has the commit in `_pending`. So if one rank has it in
            # `_kept`, every other rank has it in one of the two. To continue from a commit, the
            # ranks need all of its shards.
            self.__dict__["_pending"] = commit
            comm.barrier()
        self.__dict__.update({"_kept": commit, "_pending": None})

    def _sharded(self) -> list[tuple[str, Sharded]]:
        return [(name, self._parts[name]) for name in sorted(self._parts) if self._is_cut(name)]

    def _is_cut(self, name: str) -> bool:
        return isinstance(self._parts[name], Sharded)

    def restore(self) -> None:
        """Restore the parts on this rank to the last :meth:`commit`."""
        for name, part in self._sharded():
            part.restore_shards(self._kept.shards[name])
        self._restore_parts()

    def _restore_parts(self) -> None:
        for name in self._kept.parts:
            part = self._parts[name]
            # The commit is copied once more, because training may change a loaded copy in place.
            self._parts[name] = _keeper_of(part).load(part, copied(self._kept.parts[name]))

    def sync(self, comm: Communicator, *, grows: bool = False) -> None:
        """Give all ranks of ``comm`` the same parts, and continue with that communicator.

        All ranks go back to the last commit of the rank that is furthest; of several such ranks,
        the lowest is the source. A rank whose values differ from the source's receives the
        differing values. After a plain loss no values differ, and no part is sent. Parts with a
        method ``rebind`` are then bound to ``comm``.

        A rank that has never been in a ``sync``, where other ranks have, has joined. Its own state
        does not count, even if it is committed, and the rank receives all parts.

        Collective: every rank calls it before it continues, whatever its state is.

        Args:
            comm: ranks that take part.
            grows: whether commits check for processes that want to join: the same on all ranks.

        Raises:
            MismatchError: the ranks' states have different parts.
            StateLostError: a shard of a part that is cut over the ranks was only on lost ranks.
            CollectiveError: a call failed. The state is either unchanged or the commit that all
                ranks have gone back to.
        """
        joined = self._take_latest(comm) if self._sharded() else False
        digests = self._kept.digests()
        names = sorted(self._parts)
        mine = [self._version, digest_of(sorted(digests.items(), key=repr)), names]
        every: list[list[Any]] = comm.all_gather_object(mine)
        for rank, (_, _, peer_names) in enumerate(every):
            if peer_names != every[0][2]:
                raise MismatchError(
                    f"State: rank {rank} has parts {peer_names}, rank 0 {every[0][2]} "
                    f"[rank {comm.rank} of {comm.size}]. Make a state with the same parts on all "
                    "ranks."
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
        """List that is greater for the rank that is further, and least for a joined rank."""
        return [int(self._synced), self._kept.number]

    def _take_latest(self, comm: Communicator) -> bool:
        """Put the latest commit in place that some rank of ``comm`` has in place.

        Returns:
            Whether this rank has joined, and so holds nothing of this commit.
        """
        known = [commit.version for commit in (self._kept, self._pending) if commit is not None]
        every: list[tuple[bool, list[list[int]]]]
        every = comm.all_gather_object((self._synced, known))
        # At the very first sync no rank has been in a sync, and all ranks count.
        counting = any(synced for synced, _ in every)
        latest = max(versions[0] for synced, versions in every if synced is counting)
        behind = [
            rank
            for rank, (synced, versions) in enumerate(every)
            if synced is counting and latest not in versions
        ]
        if behind:
            raise StateLostError(
                f"State: ranks {behind} have nothing of commit {latest[0]}, so a part that "
                f"is cut over the ranks cannot be restored [rank {comm.rank} of {comm.size}]. "
                "Start all ranks again."
            )
        if self._synced is not counting:
            return True
        if self._kept.version != latest:
            self.__dict__.update({"_kept": self._pending, "_pending": None})
        return False

    def _from_first(self, group: Communicator, digests: dict[Path, bytes]) -> dict[str, Any]:
        """Return the parts of the group's rank 0; rank 0 sends only the leaves that differ."""
        every = [dict(pairs) for pairs in group.all_gather_object(list(digests.items()))]
        here = leaves(self._kept.parts)
        paths = list(every[0])
        missing = [
            number
            for number, path in enumerate(paths)
            if any(peer.get(path) != every[0][path] for peer in every[1:])
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
        leaf_by_number = dict(zip(missing, values))
        # Leaves that arrived in one message may share memory, and this class overwrites its copies
        # later. So each received leaf is copied.
        received: dict[str, Any] = mapped(
            outline,
            lambda _, number: (
                copied(leaf_by_number[number]) if number in leaf_by_number else here[paths[number]]
            ),
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
                f"State: part {name!r} holds a {type(value).__name__}{where}, which cannot be kept "
                "(expected plain data, arrays, or objects that have state_dict() and "
                "load_state_dict()). Call elastic.register(cls, copy, load) for other classes."
            ) from error
