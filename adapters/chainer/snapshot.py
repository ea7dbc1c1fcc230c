"""Snapshots of training in several processes, from which any number of ranks can go on.

A snapshot is one file, written by rank 0 in Chainer's NPZ format: ``chainer.serializers.load_npz``
reads it as well. What is the same on all ranks is in it once; what a rank has otherwise (its own
shard's iterator, statistics of its own batches, the state of NumPy's random numbers) is in it
under the rank's number, so that as many ranks go on with the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import chainer
import numpy as np
from chainer.serializers import npz

from collective.errors import CollectiveError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["MultiNodeSnapshot", "SnapshotError", "load_snapshot", "save_snapshot"]

_Extension: Any = chainer.training.Extension
_OURS = "collective/"
_RANDOM = f"{_OURS}random/"


class SnapshotError(CollectiveError):
    """Rank 0 could not write or read the file, or a rank not use what is in it."""


def save_snapshot(path: str | os.PathLike[str], target: Any, comm: Communicator) -> None:
    """Write what ``target`` is on all ranks to one file; it is there, or not, as a whole.

    Collective: every rank calls it. When it returns, the file is there.

    Args:
        path: of the file, on rank 0's machine; others' paths are not looked at.
        target: a Trainer, or whatever Chainer's serializers take.

    Raises:
        SnapshotError: it could not be written; on all ranks.
    """
    mine = _state(target)
    digests = comm.broadcast_object({name: _digest(value) for name, value in mine.items()})
    own = {n: _packed(n, v) for n, v in mine.items() if digests.get(n) != _digest(v)}
    every = comm.gather_object(own)
    problem = None
    if comm.rank == 0:
        assert every is not None
        entries: dict[str, Any] = {**mine, f"{_OURS}size": np.array(comm.size)}
        for rank, theirs in enumerate(every):
            entries.update((f"{_OURS}rank/{rank}/{n}", np.asarray(v)) for n, v in theirs.items())
        # Read without pickle, which Chainer needs for them.
        absent = sorted(name for name, value in entries.items() if value.dtype == object)
        entries[f"{_OURS}absent"] = np.array(absent, dtype=np.str_)
        try:
            _write(Path(path), entries)
        except OSError as error:
            problem = f"{path}: {error}"
    problem = comm.broadcast_object(problem)
    if problem is not None:
        raise SnapshotError(
            f"save_snapshot: rank 0 could not write {problem} [rank {comm.rank} of {comm.size}]. "
            "What was there before is unharmed."
        )


def load_snapshot(path: str | os.PathLike[str], target: Any, comm: Communicator) -> None:
    """Make ``target`` on all ranks what it was when the snapshot was written.

    On as many ranks, to the bit, with NumPy's global random numbers. On another number of them
    each gets what rank 0 has had, which is the same but for statistics that are not shared
    (those of a plain ``BatchNormalization``); random numbers stay as they are. The iterators must
    then be such that a position means the same to any number of ranks: ``ShardedIterator``.

    Collective: every rank calls it. Only rank 0 reads the file.

    Args:
        path: of the file, on rank 0's machine.
        target: made as the one that was saved.

    Raises:
        SnapshotError: it could not be read, or does not fit to the target; on all ranks.
        InvalidArgumentError: an iterator's position is in a shard of another number of ranks; on
            all ranks, and nothing is changed.
    """
    parts: list[Any] = [None] * comm.size
    problem, base = None, None
    if comm.rank == 0:
        try:
            base, parts = _read(Path(path), comm.size)
        except InvalidArgumentError as error:
            problem = ["argument", f"load_snapshot: {error}"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
            problem = ["file", f"load_snapshot: rank 0 could not read {path}: {error!r}"]
    problem = comm.broadcast_object(problem)
    if problem is not None:
        kind = InvalidArgumentError if problem[0] == "argument" else SnapshotError
        raise kind(f"{problem[1]} [rank {comm.rank} of {comm.size}].")
    base = comm.broadcast_object(base)
    own = comm.scatter_object(parts)
    entries = {name: np.asarray(value) for name, value in {**base, **own}.items()}
    failed = None
    try:
        npz.NpzDeserializer(entries).load(target)
        _set_random(entries)
    except Exception as error:  # of whatever the target is made of
        failed = f"{type(error).__name__}: {error}"
    for rank, reason in enumerate(comm.all_gather_object(failed)):
        if reason is not None:
            raise SnapshotError(
                f"load_snapshot: {path} does not fit to the target of rank {rank}: {reason} "
                f"[rank {comm.rank} of {comm.size}]. Make it as the one that was saved."
            )


class MultiNodeSnapshot(_Extension):  # type: ignore[misc, unused-ignore]
    """A Trainer's extension that writes snapshots of all ranks; on all ranks.

    Args:
        comm: connects the ranks.
        filename: in the trainer's ``out``; the trainer is formatted into it.
        autoload: whether to go on from the newest such file when training starts, if there is
            one.
        retain: how many files are kept; None for all. Older ones are removed once a new one is
            there.
    """

    trigger = 1, "epoch"
    priority = -100
    name = None
    default_name = "multi_node_snapshot"

    def __init__(
        self,
        comm: Communicator,
        filename: str = "snapshot_iter_{.updater.iteration}",
        *,
        autoload: bool = False,
        retain: int | None = None,
    ) -> None:
        if retain is not None and retain < 1:
            raise InvalidArgumentError(f"MultiNodeSnapshot: retain {retain!r}; 1 or more, or None.")
        self._comm = comm
        self._filename = filename
        self._autoload = autoload
        self._retain = retain

    def rebind(self, comm: Communicator) -> None:
        """Write what other ranks have."""
        self._comm = comm

    def initialize(self, trainer: Any) -> None:
        """Go on from the newest snapshot, if that was asked for.

        Not after a loss, when the ranks go on from what they have in memory.
        """
        if not self._autoload or (self._comm.generation and trainer.updater.iteration):
            return
        found = self._files(trainer) if self._comm.rank == 0 else []
        path = self._comm.broadcast_object(str(found[-1]) if found else None)
        if path is not None:
            load_snapshot(path, trainer, self._comm)

    def __call__(self, trainer: Any) -> None:
        path = Path(trainer.out, self._filename.format(trainer))
        save_snapshot(path, trainer, self._comm)
        if self._retain is not None and self._comm.rank == 0:
            for old in self._files(trainer)[: -self._retain]:
                old.unlink(missing_ok=True)

    def _files(self, trainer: Any) -> list[Path]:
        """Return this extension's files, the oldest first."""
        before, _, rest = self._filename.partition("{")
        after = rest.rpartition("}")[2]
        with contextlib.suppress(FileNotFoundError):
            found = [
                each
                for each in Path(trainer.out).iterdir()
                if each.name.startswith(before) and each.name.endswith(after)
            ]
            return sorted(found, key=lambda each: (each.stat().st_mtime_ns, each.name))
        return []


# -- what is in a file ----------------------------------------------------------------------------


def _state(target: Any) -> dict[str, Any]:
    """Return all values of this rank, by name, as arrays of NumPy."""
    found = {name: np.asarray(value) for name, value in npz.serialize(target).items()}
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    if kind == "MT19937":
        found[f"{_RANDOM}keys"] = np.asarray(keys)
        found[f"{_RANDOM}rest"] = np.array([position, has_gauss, gauss], np.float64)
    return found


def _set_random(entries: dict[str, Any]) -> None:
    if f"{_RANDOM}keys" in entries:
        position, has_gauss, gauss = entries[f"{_RANDOM}rest"].tolist()
        keys = entries[f"{_RANDOM}keys"]
        np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))


def _digest(value: Any) -> str:
    if value.dtype == object:
        return "None"
    digest = hashlib.sha256(np.ascontiguousarray(value).tobytes())
    return f"{value.dtype.str}{value.shape}{digest.hexdigest()}"


def _packed(name: str, value: Any) -> Any:
    """Return a value as messages of objects take it."""
    if value.dtype == object and value[()] is None:
        return None
    if value.dtype.kind == "U":
        return value.tolist()
    if value.dtype.kind not in "biufc":
        raise UnsupportedError(
            f"snapshot: {name} of dtype {value.dtype}; supported are numbers, texts and None. "
            "Have its serialize() make one of these of it."
        )
    return value


def _write(path: Path, entries: dict[str, Any]) -> None:
    """Write a file so that it is there as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that no search for snapshots finds, should this process be killed here.
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez_compressed(file, **entries)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _read(path: Path, size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what all ranks get, and what each gets of its own."""
    with np.load(path, allow_pickle=False) as file:
        absent = set(file[f"{_OURS}absent"].tolist())
        entries: dict[str, Any] = {
            n: None if n in absent else _packed(n, file[n]) for n in file.files
        }
    saved = int(entries.pop(f"{_OURS}size"))
    entries.pop(f"{_OURS}absent")
    parts: list[dict[str, Any]] = [{} for _ in range(saved)]
    for name in [name for name in entries if name.startswith(f"{_OURS}rank/")]:
        rank, _, rest = name[len(f"{_OURS}rank/") :].partition("/")
        parts[int(rank)][rest] = entries.pop(name)
    if saved == size:
        return entries, parts
    shards = {n.rpartition("/")[0] for n in entries if "iterator:" in n}
    strange = sorted(each for each in shards if f"{each}/length" not in entries)
    if strange:
        raise InvalidArgumentError(
            f"the snapshot is of {saved} ranks, whose {', '.join(strange)} had shards of their "
            f"own; positions in them mean nothing to {size}. Use a ShardedIterator, or {saved} "
            "ranks"
        )
    return {n: v for n, v in entries.items() if not n.startswith(_RANDOM)}, [{}] * size
