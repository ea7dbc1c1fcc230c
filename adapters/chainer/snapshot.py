"""Snapshots of training in several processes, which any number of ranks can resume.

A snapshot is one file, written by rank 0 in Chainer's NPZ format. ``chainer.serializers.load_npz``
can read it as well. Values that are the same on all ranks are in the file once. Other values of a
rank are in the file under the rank's number: its own shard's iterator, statistics of its own
batches, the state of NumPy's random numbers. So the same number of ranks resumes with the same
bits.
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

from collective import CollectiveError, InvalidArgumentError, UnsupportedError
from collective.inner import comm_or_current

if TYPE_CHECKING:
    from collective import Communicator

__all__ = ["MultiNodeSnapshot", "SnapshotError", "load_snapshot", "save_snapshot"]

_Extension: Any = chainer.training.Extension
_OURS = "collective/"
_RANDOM = f"{_OURS}random/"


class SnapshotError(CollectiveError):
    """Failure of rank 0 to write or read the file, or of a rank to use its contents."""


def save_snapshot(
    path: str | os.PathLike[str], target: Any, comm: Communicator | None = None
) -> None:
    """Write the state of ``target`` on all ranks to one file, atomically: completely or not at all.

    Collective: every rank calls it. When it returns, the file exists.

    Args:
        path: path of the file on rank 0's machine; paths on other ranks are ignored.
        target: Trainer, or any object that Chainer's serializers take.
        comm: ranks that take part; None: those of the current communicator.

    Raises:
        SnapshotError: the file could not be written; every rank raises it.
    """
    comm = comm_or_current(comm, "save_snapshot")
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
        # Chainer stores None as an object, which only pickle can read. These names replace it.
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
            "The previous file, if any, is unharmed."
        )


def load_snapshot(
    path: str | os.PathLike[str], target: Any, comm: Communicator | None = None
) -> None:
    """Restore ``target`` on all ranks to its state when the snapshot was written.

    On the same number of ranks, the state is restored to the bit, with NumPy's global random
    numbers. On another number of ranks, each rank gets the state of rank 0. This state differs
    from that of the other ranks only in statistics that are not shared (those of a plain
    ``BatchNormalization``). Random numbers stay unchanged then. The iterators' positions must then
    mean the same for any number of ranks, as those of ``ShardedIterator`` do.

    Collective: every rank calls it. Only rank 0 reads the file.

    Args:
        path: path of the file on rank 0's machine.
        target: object made in the same way as the one that was saved.
        comm: ranks that take part; None: those of the current communicator.

    Raises:
        SnapshotError: the file could not be read, or does not fit the target; every rank raises
            it.
        InvalidArgumentError: an iterator's position is in a shard of another number of ranks. Every
            rank raises it, and nothing is changed.
    """
    comm = comm_or_current(comm, "load_snapshot")
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
    except Exception as error:  # any error of the objects in the target
        failed = f"{type(error).__name__}: {error}"
    for rank, reason in enumerate(comm.all_gather_object(failed)):
        if reason is not None:
            raise SnapshotError(
                f"load_snapshot: {path} does not fit the target of rank {rank}: {reason} "
                f"[rank {comm.rank} of {comm.size}]. Make the target in the same way as the one "
                "that was saved."
            )


class MultiNodeSnapshot(_Extension):  # type: ignore[misc, unused-ignore]
    """Trainer extension that writes snapshots of all ranks; use it on all ranks.

    Args:
        comm: communicator that connects the ranks; None: the current one.
        filename: name of the file in the trainer's ``out``; the trainer is formatted into it.
        autoload: whether to resume from the newest such file when training starts, if there is
            one.
        retain: number of files to keep; None for all. Older files are removed once a new one
            exists.
    """

    trigger = 1, "epoch"
    priority = -100
    name = None
    default_name = "multi_node_snapshot"

    def __init__(
        self,
        comm: Communicator | None = None,
        filename: str = "snapshot_iter_{.updater.iteration}",
        *,
        autoload: bool = False,
        retain: int | None = None,
    ) -> None:
        if retain is not None and retain < 1:
            raise InvalidArgumentError(
                f"MultiNodeSnapshot: retain is {retain!r} (expected at least 1, or None)."
            )
        self._comm = comm_or_current(comm, "MultiNodeSnapshot")
        self._filename = filename
        self._autoload = autoload
        self._retain = retain

    def rebind(self, comm: Communicator) -> None:
        """Write snapshots of other ranks from now on."""
        self._comm = comm

    def initialize(self, trainer: Any) -> None:
        """Resume from the newest snapshot, if ``autoload`` is true.

        After a loss nothing is loaded, because the ranks continue from their state in memory.
        """
        if not self._autoload or (self._comm.membership.generation and trainer.updater.iteration):
            return
        files = self._files(trainer) if self._comm.rank == 0 else []
        path = self._comm.broadcast_object(str(files[-1]) if files else None)
        if path is not None:
            load_snapshot(path, trainer, self._comm)

    def __call__(self, trainer: Any) -> None:
        path = Path(trainer.out, self._filename.format(trainer))
        save_snapshot(path, trainer, self._comm)
        if self._retain is not None and self._comm.rank == 0:
            for old in self._files(trainer)[: -self._retain]:
                old.unlink(missing_ok=True)

    def _files(self, trainer: Any) -> list[Path]:
        """Return this extension's files, from the oldest to the newest."""
        before, _, rest = self._filename.partition("{")
        after = rest.rpartition("}")[2]
        with contextlib.suppress(FileNotFoundError):
            files = [
                file
                for file in Path(trainer.out).iterdir()
                if file.name.startswith(before) and file.name.endswith(after)
            ]
            return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name))
        return []


# -- the contents of a file -----------------------------------------------------------------------


def _state(target: Any) -> dict[str, Any]:
    """Return all values of this rank, by name, as NumPy arrays."""
    values = {name: np.asarray(value) for name, value in npz.serialize(target).items()}
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    if kind == "MT19937":
        values[f"{_RANDOM}keys"] = np.asarray(keys)
        values[f"{_RANDOM}rest"] = np.array([position, has_gauss, gauss], np.float64)
    return values


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
    """Return a value in a form that object messages can carry."""
    if value.dtype == object and value[()] is None:
        return None
    if value.dtype.kind == "U":
        return value.tolist()
    if value.dtype.kind not in "biufc":
        raise UnsupportedError(
            f"snapshot: {name} has dtype {value.dtype} (supported are numbers, strings and None). "
            "Change its serialize() so that it stores one of these."
        )
    return value


def _write(path: Path, entries: dict[str, Any]) -> None:
    """Write a file atomically: completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # If this process is killed here, no search for snapshots finds a file of this name.
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
    """Return the values for all ranks, and a list of the values for each rank only."""
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
    strange = sorted(name for name in shards if f"{name}/length" not in entries)
    if strange:
        raise InvalidArgumentError(
            f"the snapshot is of {saved} ranks, whose {', '.join(strange)} had shards of their "
            f"own. Positions in these shards are meaningless on {size} ranks. Use a "
            f"ShardedIterator, or {saved} ranks"
        )
    return {n: v for n, v in entries.items() if not n.startswith(_RANDOM)}, [{}] * size
