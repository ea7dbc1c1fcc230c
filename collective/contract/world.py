"""Place of this process among the ranks of its launch, and the store where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from collective.control.link import Tls
from collective.control.ports import Ports
from collective.control.secret import Secret
from collective.control.store import Store


@dataclass(frozen=True, slots=True)
class World:
    """Information that a transport needs to connect.

    Attributes:
        rank: number of this process among all, from 0.
        size: number of processes.
        local_rank: number of this process among those of its host, from 0.
        local_size: number of processes on this host.
        host: name of this host.
        launcher: ``collective``, ``torchrun``, ``openmpi``, ``mpich``, ``intelmpi``,
            ``slurm``, or ``none``.
        job: a text that all ranks of one launch on this host share, and that no other launch
            running on this host has.
        store: the store where the ranks meet.
        options: settings of single transports: ``disable`` (what ``shm`` switches off),
            ``interface`` (empty if not set), ``across`` (the transport between hosts under
            ``hierarchical``); ``device`` (the number of a GPU) and ``nccl_library``, if they are
            set; under ``nccl`` also ``host`` and ``devices``: see
            :class:`collective.start.choice.Choice`.
        address: address at which ranks of other hosts reach this process; loopback if all ranks
            are on one host.
        ports: the ports at which this process may listen for ranks of other hosts, and over ``tcp``
            also for those of this one; None for any.
        comm: an ``MPI.Comm`` that the program has made for this purpose, else None.
        secret: secret of this job, which seals ``store``, or None.
        open: whether a stranger may have joined: the ranks are on several hosts, others can write
            to the store, and there is no secret.
        tls: TLS contexts for connections between hosts: the control connections beside the
            transport, and those of ``tcp`` with the arrays; or None.
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
    ports: Ports | None = None
    comm: Any = None
    secret: Secret | None = None
    open: bool = False
    tls: Tls | None = None

    @property
    def own_host(self) -> str | None:
        """Address at which ranks of other hosts reach this one; None if all are on one host."""
        return None if self.local_size == self.size else self.address
