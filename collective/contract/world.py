"""Who this process is among the ranks of its launch, and where they meet: a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .secret import Secret
from .store import Store

if TYPE_CHECKING:
    import ssl

__all__ = ["Tls", "World"]


class Tls(NamedTuple):
    """With what ranks of several hosts speak beside the transport: a connection's two sides."""

    connecting: ssl.SSLContext
    listening: ssl.SSLContext


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
        options: settings of single transports: ``shm_single_copy``, ``shm_adopt``,
            ``interface`` (empty if not set), ``across`` (the transport between hosts under
            ``hierarchical``); ``device`` (a GPU's number) and ``nccl_library``, if they are
            set; under ``nccl`` ``host`` and ``devices``: see
            :class:`collective.start.choice.Choice`.
        address: where ranks of other hosts reach this one; loopback if all are on one.
        comm: an ``MPI.Comm`` that the program made and wants used, else None.
        secret: of this job, with which ``store`` is sealed, or None.
        open: whether somebody else may have joined: ranks of several hosts meet where others
            can write, and have no secret.
        tls: with what they speak beside the transport, or None.
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
    address: str = "127.0.0.1"
    comm: Any = None
    secret: Secret | None = None
    open: bool = False
    tls: Tls | None = None
