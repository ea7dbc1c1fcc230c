"""Finds out who this process is among the ranks of its launch, and where they meet."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import socket
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from collective import native
from collective.contract.secret import REMEDY, Secret
from collective.contract.store import PrefixedStore, Store, WrappedStore
from collective.contract.world import Tls, World
from collective.deadline import Deadline
from collective.errors import ConfigError, RendezvousError
from collective.install import hint

from . import certificates, choice
from .config import Config
from .file_store import FileStore
from .launchers import MPI_LAUNCHERS, Launched
from .network import address_of, address_toward, is_loopback, own_address
from .rendezvous import Endpoint, from_environment, from_url
from .rundir import RunStore
from .sealed_store import seal
from .tcp_store import TcpStore
from .torch_store import AgentStore

__all__ = [
    "address",
    "adopt",
    "build",
    "in_directory",
    "name_libraries",
    "options",
    "warn_of_open",
]


# The name of a launch that has none which its hosts have in common.
_BY_HAND = "by hand"
# What the ranks of a job without a secret prove to each other that they know: which launch it is.
_PUBLIC = Secret(b"the ranks of this job have no secret")


def build(config: Config) -> World:
    """Return the world that ``config`` describes.

    Nothing is exchanged with other ranks yet. A launcher that gives its processes no
    common directory gets one, private and removed when the last rank has ended.

    Raises:
        ConfigError: more than one rank, and nothing says where they meet; or
            ``interface`` is none of this host's.
        RendezvousError: the place where they meet cannot be trusted or made.
    """
    launched = config.launched
    if launched is not None and (config.rank, config.size) != (launched.rank, launched.size):
        launched = None  # arranged by hand: see load()
    endpoint = _endpoint(config, launched)
    secret = config.resolved_secret()
    if secret is not None:
        secret = secret.within(_name(config))
    elif _is_open(config, endpoint):
        warn_of_open(config, str(endpoint))
    ours = _Credentials(config, secret, certificates.resolve(config))
    job, store = _meeting(ours, launched, endpoint)
    return World(
        config.rank,
        config.size,
        config.local_rank,
        config.local_size,
        socket.gethostname(),
        launched.launcher if launched else "none",
        job,
        seal(store, secret),
        options(config),
        address(config, endpoint),
        secret=secret,
        open=secret is None and _is_open(config, endpoint),
        tls=ours.tls,
    )


def in_directory(directory: Path, secret: Secret) -> Store:
    """Return the store of the ranks that `collective run` has started, which is a directory."""
    return seal(FileStore(directory), secret.within(_BY_HAND))


def adopt(comm: Any, config: Config, world: World) -> World:
    """Return the world of an ``MPI.Comm`` with the settings of ``config``.

    Args:
        comm: what the program made.
        config: with the communicator's ranks.
        world: what :func:`collective.start.mpi_world.world_of` says of it.
    """
    settings = options(config)
    if config.across == "auto":
        settings["across"] = "mpi"
    secret = config.resolved_secret()
    if secret is not None:
        secret = secret.within(world.job)
    return replace(
        world, comm=comm, options=settings, address=address(config, None),
        store=seal(world.store, secret), secret=secret, tls=certificates.resolve(config),
    )  # fmt: skip


def options(config: Config) -> dict[str, str]:
    """Return the settings that are for single transports only."""
    found = {
        "shm_single_copy": config.shm_single_copy,
        "shm_adopt": config.shm_adopt,
        "interface": config.interface,
        "across": choice.across(config),
    }
    if config.device is not None:
        found["device"] = str(config.device)
    if config.nccl_library:
        found["nccl_library"] = config.nccl_library
    return found


def name_libraries(config: Config) -> None:
    """Let this whole process know of the libraries that are named: each is loaded once.

    And of the native core, if it is not to be used.

    What loads them looks at the environment, since it also serves without settings.
    """
    for key in ("cuda_library", "nccl_library"):
        if getattr(config, key):
            os.environ[f"COLLECTIVE_{key.upper()}"] = getattr(config, key)
    if config.origin("native") != "default":
        native.switch(config.native == "on")


def _endpoint(config: Config, launched: Launched | None) -> Endpoint | None:
    """Return the address at which the ranks meet, if one was agreed on."""
    if config.store is not None:
        endpoint = from_url(config.store) if config.store.startswith("tcp:") else None
    elif config.size == 1 or (launched and config.local_size == config.size):
        return None  # nobody to meet, or nobody elsewhere
    elif launched is None and config.launched is not None:
        return None  # what there is was made for the launcher's own ranks
    else:
        endpoint = from_environment(os.environ, launched)
    # Where ranks are arranged by hand, one host is what is assumed if nothing is said.
    assumed = {"default", "launcher collective"}
    by_hand = assumed & {config.origin("local_rank"), config.origin("local_size")}
    if endpoint is not None and config.size > 1 and by_hand and not is_loopback(endpoint.host):
        raise ConfigError(
            f"local_rank, local_size: not given, with size {config.size} "
            f"({config.origin('size')}) and a meeting place that other hosts reach, {endpoint} "
            f"({endpoint.origin}); which ranks share a host decides what connects them. Give both: "
            "with one rank a host, local_rank=0 and local_size=1."
        )
    return endpoint


class _Credentials(NamedTuple):
    """With what this rank comes to where the ranks meet."""

    config: Config
    secret: Secret | None
    tls: Tls | None


def _meeting(
    ours: _Credentials, launched: Launched | None, endpoint: Endpoint | None
) -> tuple[str, Store]:
    """Return the job's name and its store."""
    config = ours.config
    job = launched.job if launched else None
    if config.store is not None:
        if endpoint is not None:
            return job or config.store, _LateStore(lambda: _tcp(ours, endpoint))
        return job or config.store, FileStore(config.store)
    if config.join != "off":
        raise ConfigError(
            f"join: {config.join!r} ({config.origin('join')}), and nothing says where the ranks "
            "are. Give store=DIR or store='tcp://HOST:PORT' (COLLECTIVE_STORE), as they have it, "
            "and their secret."
        )
    if config.size == 1:
        alone = f"alone-{secrets.token_hex(8)}"
        return job or alone, _LateStore(lambda: RunStore(alone))
    if job is None and endpoint is not None:
        job = f"by hand {os.geteuid()} {endpoint}"
    if job is None:
        raise ConfigError(
            f"store: not given, with size {config.size} ({config.origin('size')}) and rank "
            f"{config.rank} ({config.origin('rank')}); ranks that no launcher started need "
            "store=DIR, a private directory that all of them see and no other launch uses, or, on "
            "several hosts, store='tcp://HOST:PORT' with the host of rank 0. Give it, or start "
            "them with: collective run -n N script.py"
        )
    if config.local_size < config.size:
        return job, _LateStore(lambda: _across_hosts(ours, endpoint))
    return job, RunStore(hashlib.sha256(job.encode()).hexdigest()[:32])


def _over_mpi(config: Config) -> bool:
    """Return whether ranks of several hosts are to meet over MPI itself."""
    under_mpiexec = config.launched is not None and config.launched.launcher in MPI_LAUNCHERS
    wanted = choice.choose(config).host
    over_mpi = wanted == "mpi" or (wanted == "hierarchical" and choice.across(config) == "mpi")
    return choice.in_mpi_world(config) and (under_mpiexec or over_mpi)


def _across_hosts(ours: _Credentials, endpoint: Endpoint | None) -> Store:
    """Return the store of ranks on several hosts."""
    config = ours.config
    if _over_mpi(config):
        if choice.installed("mpi4py"):
            return _mpi(config)
        if endpoint is None:
            raise RendezvousError(
                f"rendezvous: {config.size} ranks under mpiexec, {config.local_size} of them on "
                f"this host, and no mpi4py to meet through. Install it ({hint('mpi')}), "
                "or set MASTER_ADDR and MASTER_PORT on all ranks: the host of rank 0 "
                "and a port that is free there."
            )
    if endpoint is None:
        raise RendezvousError(
            f"rendezvous: {config.size} ranks, {config.local_size} of them on this host; a "
            "directory of this host cannot serve the others. Set MASTER_ADDR and MASTER_PORT to "
            "the host of rank 0 and a port that is free there, or COLLECTIVE_STORE to a private "
            "directory that all hosts see and no other launch uses."
        )
    return _tcp(ours, endpoint)


def _mpi(config: Config) -> Store:
    from collective.backends.mpi import MpiStore
    from collective.backends.mpi.library import start

    deadline = Deadline(config.start_timeout)
    everybody = start(deadline).COMM_WORLD
    if everybody.Get_size() != config.size:
        raise RendezvousError(
            f"rendezvous: mpiexec started {config.size} ranks, and mpi4py's library sees "
            f"{everybody.Get_size()} [rank {config.rank}]; mpiexec and library are of different "
            "vendors. Use the mpiexec that came with the library, or set COLLECTIVE_STORE to a "
            "private directory that all hosts see."
        )
    store: Store = MpiStore(everybody, deadline)
    return store


def _name(config: Config) -> str:
    """Return the name of this launch that ranks of all hosts have in common."""
    # An agent, or a server that several launches know of, outlives a launch. The other
    # launchers' names for a job are one host's.
    launched = config.launched
    known = launched is not None and launched.launcher in ("torchrun", "slurm")
    return str(launched.job) if launched and known else _BY_HAND


def _is_open(config: Config, endpoint: Endpoint | None) -> bool:
    """Return whether ranks of several hosts meet where anybody can write who gets there.

    A directory is of one user, and MPI's ranks are those that mpiexec has connected.
    """
    if config.local_size == config.size or endpoint is None:
        return False
    over_mpi = config.store is None and _over_mpi(config) and choice.installed("mpi4py")
    return not over_mpi


def warn_of_open(config: Config, where: str) -> None:
    """Warn that ranks of several hosts meet without a secret: rank 0, and if it is not silenced.

    Args:
        where: at what.

    Warns:
        RuntimeWarning: with the remedy.
    """
    if config.rank == 0 and config.insecure == "off":
        warnings.warn(
            f"rendezvous: the ranks of several hosts meet at {where} "
            f"without a secret; whoever reaches it can join this job, or end it. "
            f"{REMEDY}; or set COLLECTIVE_INSECURE=1 to do without.",
            RuntimeWarning,
            stacklevel=4,
        )


def _tcp(ours: _Credentials, endpoint: Endpoint) -> Store:
    config = ours.config
    if endpoint.served:
        # An agent's is torch's, and lets in whoever comes, also the ranks of another launch.
        prefix = f"collective/{hashlib.sha256(_name(config).encode()).hexdigest()[:16]}/"
        return PrefixedStore(AgentStore(endpoint, Deadline(config.start_timeout)), prefix)
    return TcpStore(
        endpoint,
        _PUBLIC.within(_name(config)) if ours.secret is None else ours.secret,
        serve=config.rank == 0 and config.join == "off",
        spans_hosts=config.local_size < config.size,
        deadline=Deadline(config.start_timeout),
        tls=ours.tls,
    )


def address(config: Config, endpoint: Endpoint | None) -> str:
    """Return where ranks of other hosts reach this one, which meet at ``endpoint``, if at one."""
    if config.local_size == config.size:
        return "127.0.0.1"
    if config.interface:
        return address_of(config.interface)
    if endpoint is not None:
        # A name that does not resolve is told of when the store is opened.
        with contextlib.suppress(RendezvousError):
            found = address_toward(endpoint.host, endpoint.port)
            if is_loopback(endpoint.host) or not is_loopback(found):
                return found
    return own_address()


class _LateStore(WrappedStore):
    """A store that is opened when it is first used, which may be never."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open = open_store

    @functools.cached_property
    def _store(self) -> Store:  # type: ignore[override]  # an attribute elsewhere
        return self._open()

    @property
    def _is_open(self) -> bool:
        return "_store" in vars(self)

    def __str__(self) -> str:
        return super().__str__() if self._is_open else "a store that is not open yet"

    def close(self) -> None:
        if self._is_open:
            super().close()
