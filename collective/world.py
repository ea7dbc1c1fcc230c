"""Who this process is among the ranks of its launch, and where they meet."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from collective.config import Config
from collective.errors import ConfigError, RendezvousError
from collective.launchers import Launched, detect
from collective.rundir import RunStore
from collective.store import FileStore, Store

__all__ = ["Launched", "World", "build", "detect"]


@dataclass(frozen=True, slots=True)
class World:
    """What a transport needs to know before it is connected.

    Attributes:
        rank: this process among all, from 0.
        size: how many processes there are.
        local_rank: this process among those of its host, from 0.
        local_size: how many processes its host has.
        host: the name of this host.
        launcher: ``collective``, ``torchrun``, ``openmpi``, ``mpich``, ``intelmpi``,
            ``slurm``, or ``none``.
        job: a text that all ranks of one launch on this host share, and no other launch
            that runs there does.
        store: where the ranks meet.
        options: settings of single transports, such as ``shm_single_copy``.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    launcher: str
    job: str
    store: Store
    options: Mapping[str, str] = field(default_factory=dict)


def build(config: Config) -> World:
    """Return the world that ``config`` describes.

    Nothing is exchanged with other ranks yet. A launcher that gives its processes no
    common directory gets one, private and removed when the last rank has ended.

    Raises:
        ConfigError: more than one rank, and nothing says where they meet.
        RendezvousError: the place where they meet cannot be trusted or made.
    """
    launched = config.launched
    if launched is not None and (config.rank, config.size) != (launched.rank, launched.size):
        launched = None  # arranged by hand: see load()
    job, store = _meeting(config, launched)
    return World(
        config.rank,
        config.size,
        config.local_rank,
        config.local_size,
        socket.gethostname(),
        launched.launcher if launched else "none",
        job,
        store,
        {"shm_single_copy": config.shm_single_copy},
    )


def _meeting(config: Config, launched: Launched | None) -> tuple[str, Store]:
    """Return the job's name and its store."""
    job = launched.job if launched else None
    if config.store is not None:
        return job or config.store, FileStore(config.store)
    if config.size == 1:
        alone = f"alone-{secrets.token_hex(8)}"
        return job or alone, _LateStore(lambda: RunStore(alone))
    if job is None:
        raise ConfigError(
            f"store: not given, with size {config.size} ({config.origin('size')}) and rank "
            f"{config.rank} ({config.origin('rank')}); ranks that no launcher started need "
            "store=DIR, a private directory that all of them see and no other launch uses. "
            "Give it, or start them with: collective run -n N script.py"
        )
    if config.local_size < config.size:
        return job, _LateStore(lambda: _refuse_many_hosts(config))
    return job, RunStore(hashlib.sha256(job.encode()).hexdigest()[:32])


def _refuse_many_hosts(config: Config) -> Store:
    raise RendezvousError(
        f"rendezvous: {config.size} ranks, {config.local_size} of them on this host; a "
        "directory of this host cannot serve the others. Set COLLECTIVE_STORE to a private "
        "directory that all hosts see and no other launch uses."
    )


class _LateStore(Store):
    """A store that is opened when it is first used, which may be never."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open = open_store
        self._opened: Store | None = None

    def _store(self) -> Store:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def set(self, key: str, value: bytes) -> None:
        self._store().set(key, value)

    def get(self, key: str, deadline: float) -> bytes:
        return self._store().get(key, deadline)

    def try_get(self, key: str) -> bytes | None:
        return self._store().try_get(key)

    def delete(self, key: str) -> None:
        self._store().delete(key)
