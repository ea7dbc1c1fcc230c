"""Resolution of the settings into a world: this process's rank, and where the ranks meet."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import warnings
from dataclasses import replace
from typing import Any, NoReturn

from collective.contract.world import World
from collective.control.link import Tls, listen
from collective.control.ports import Ports
from collective.control.secret import REMEDY, Secret
from collective.control.store import PrefixedStore, Store
from collective.deadline import Deadline
from collective.errors import ConfigError, RendezvousError
from collective.install import hint

from . import certificates, choice
from .choice import Choice
from .config import Config
from .keys import NO_SECRET
from .launchers import MPI_LAUNCHERS, Launched
from .network import address_of, address_toward, is_loopback, own_address
from .rendezvous import Endpoint, from_environment, from_url
from .rundir import RunStore
from .stores import FileStore, LateStore, seal
from .tcp_store import TcpStore

# Name of a launch for which its hosts share no name.
_BY_HAND = "by hand"
# Secret of jobs without a secret. It is public: a key from it only proves which launch a rank
# belongs to.
_PUBLIC = Secret(b"the ranks of this job have no secret")


def build(config: Config, chosen: Choice) -> World:
    """Return the world that ``config`` describes.

    This function exchanges nothing with other ranks. If the launcher gives its processes no
    common directory, they get a private one, which is removed when the last rank has ended.

    Args:
        config: settings of this process.
        chosen: transport that :func:`.choice.choose` has chosen for ``config``.

    Raises:
        ConfigError: there are several ranks, and no setting tells where they meet; or
            ``interface`` is not an interface of this host.
        RendezvousError: the directory where they meet cannot be trusted or created.
    """
    launched = config.launched
    if launched is not None and (config.rank, config.size) != (launched.rank, launched.size):
        launched = None  # rank and size were set by hand: see load()
    endpoint = _endpoint(config, launched)
    # Only torchrun and Slurm give a job the same name on all hosts. A server such as torchrun's
    # agent may outlive a launch, so the launches that use the server need different names.
    by_name = config.launched is not None and config.launched.launcher in ("torchrun", "slurm")
    name = str(config.launched.job) if config.launched and by_name else _BY_HAND
    secret, tls = certificates.resolve(config, name)
    spans_hosts = config.store is None and config.local_size < config.size
    over_mpi = spans_hosts and _meets_over_mpi(config, chosen)
    by_mpi = over_mpi and choice.installed("mpi4py")
    job = launched.job if launched else None
    store: Store
    if config.store is not None:
        job = job or config.store
        if endpoint is None:
            store = FileStore(config.store)
        else:
            store = LateStore(lambda: _tcp(config, endpoint, name, secret, tls))
    elif config.join != "off":
        raise _nowhere(config)
    elif config.size == 1:
        alone = f"alone-{secrets.token_hex(8)}"
        job, store = job or alone, LateStore(lambda: RunStore(alone))
    elif job is None and endpoint is None:
        raise _nowhere(config)
    else:
        job = job or f"by hand {os.geteuid()} {endpoint}"
        if not spans_hosts:
            store = RunStore(hashlib.sha256(job.encode()).hexdigest()[:32])
        elif by_mpi:
            store = LateStore(lambda: _mpi(config))
        elif endpoint is not None:
            store = LateStore(lambda: _tcp(config, endpoint, name, secret, tls))
        else:
            store = LateStore(lambda: _unreachable(config, over_mpi))
    # Anybody who connects can write to a server's store. A directory belongs to one user, and
    # mpiexec connects the ranks that meet over MPI.
    exposed = "" if by_mpi or endpoint is None else str(endpoint)
    return describe(
        config, chosen, job, seal(store, secret),
        secret=secret, tls=tls, launched=launched, toward=endpoint, exposed=exposed,
    )  # fmt: skip


def describe(
    config: Config,
    chosen: Choice,
    job: str,
    store: Store,
    *,
    secret: Secret | None,
    tls: Tls | None,
    launched: Launched | None,
    toward: Endpoint | None,
    exposed: str,
) -> World:
    """Return the world of ranks that meet in ``store``.

    Args:
        config: settings, with the place of this process.
        chosen: the transport.
        job: unique name of these ranks.
        store: the store, sealed with ``secret``.
        secret, tls: secret of the job and TLS contexts, or None.
        launched: the launcher of these ranks, or None.
        toward: an address that all hosts reach. The host's own address is chosen by it.
        exposed: where anybody who connects can write to ``store``; empty if nobody else can.

    Raises:
        ConfigError: ``interface`` is not an interface of this host.

    Warns:
        RuntimeWarning: ranks of several hosts meet at ``exposed`` without a secret, and
            ``secret`` is not "none"; the text gives the remedy. Only rank 0 warns.
    """
    is_open = secret is None and bool(exposed) and config.local_size < config.size
    if is_open and config.rank == 0 and config.secret != NO_SECRET:
        warnings.warn(
            f"rendezvous: the ranks of several hosts meet at {exposed} "
            f"without a secret; anybody who can connect there can join this job, or end it. "
            f"{REMEDY}; or set COLLECTIVE_SECRET=none to accept this and omit the warning.",
            RuntimeWarning,
            stacklevel=5,
        )
    return World(
        config.rank, config.size, config.local_rank, config.local_size, socket.gethostname(),
        launched.launcher if launched else "none", job, store,
        chosen.options, _address(config, toward),
        ports=_ports(config.port), secret=secret, open=is_open, tls=tls,
    )  # fmt: skip


def of_run(secret: Secret) -> Secret:
    """Return the secret that seals the store of ranks that `collective run` has started."""
    return secret.within(_BY_HAND)


def adopt(comm: Any, config: Config, chosen: Choice, world: World) -> World:
    """Return the world of an ``MPI.Comm`` with the settings of ``config``.

    Args:
        comm: communicator that the program made.
        config: settings, with rank and size of ``comm``.
        chosen: the transport.
        world: world that :func:`collective.start.mpi_world.world_of` returned for ``comm``.
    """
    secret, tls = certificates.resolve(config, world.job)
    return replace(
        world, comm=comm, options=chosen.options, address=_address(config, None),
        ports=_ports(config.port), store=seal(world.store, secret), secret=secret, tls=tls,
    )  # fmt: skip


def _endpoint(config: Config, launched: Launched | None) -> Endpoint | None:
    """Return the address at which the ranks meet, or None if they do not meet at an address."""
    if config.store is not None:
        endpoint = from_url(config.store) if config.store.startswith("tcp:") else None
    elif config.size == 1 or (launched and config.local_size == config.size):
        return None  # there are no other ranks, or none on other hosts
    elif launched is None and config.launched is not None:
        return None  # the variables describe the launcher's ranks, and not this world
    else:
        endpoint = from_environment(os.environ, launched)
    # Without local_rank and local_size, ranks that were set up by hand count as ranks of one host.
    # This assumption is unsafe if they meet at an address that other hosts reach.
    assumed = {"default", "launcher collective"}
    by_hand = assumed & {config.origins["local_rank"], config.origins["local_size"]}
    if endpoint is not None and config.size > 1 and by_hand and not is_loopback(endpoint.host):
        raise ConfigError(
            f"local_rank, local_size: not set, with size {config.size} "
            f"({config.origins['size']}) and the rendezvous address {endpoint} "
            f"({endpoint.origin}), which other hosts can reach. They are needed to know which "
            "ranks share a host. Set both; with one rank on each host, local_rank=0 and "
            "local_size=1."
        )
    return endpoint


def _nowhere(config: Config) -> ConfigError:
    """Return the error for a rank that no setting tells where the ranks meet."""
    if config.join != "off":
        return ConfigError(
            f"join: {config.join!r} ({config.origins['join']}), but no setting tells where the "
            "ranks to join have met. Set store=DIR or store='tcp://HOST:PORT' (COLLECTIVE_STORE) "
            "to the value that those ranks have, and give this process their secret."
        )
    return ConfigError(
        f"store: not set, with size {config.size} ({config.origins['size']}) and rank "
        f"{config.rank} ({config.origins['rank']}). Ranks without a launcher need it to meet. "
        "Start them with: collective run -n N script.py. In a notebook or a test, use "
        "collective.testing.run_ranks. Or set store=DIR, a private directory "
        "that all ranks see and no other launch uses. On several hosts, set "
        "store='tcp://HOST:PORT' with the host of rank 0."
    )


def _meets_over_mpi(config: Config, chosen: Choice) -> bool:
    """Return whether ranks of several hosts meet over MPI itself."""
    under_mpiexec = config.launched is not None and config.launched.launcher in MPI_LAUNCHERS
    return choice.in_mpi_world(config) and (under_mpiexec or chosen.over_mpi)


def _unreachable(config: Config, over_mpi: bool) -> NoReturn:
    """Raise the error for ranks of several hosts that have no store in common."""
    if over_mpi:
        raise RendezvousError(
            f"rendezvous: {config.size} ranks under mpiexec, {config.local_size} of them on "
            f"this host, cannot meet over MPI: mpi4py is not installed. Install it "
            f"({hint('mpi')}), or set MASTER_ADDR and MASTER_PORT on all ranks to the host of "
            "rank 0 and a port that is free there."
        )
    raise RendezvousError(
        f"rendezvous: {config.size} ranks, {config.local_size} of them on this host; the other "
        "hosts cannot reach a directory of this host. Set MASTER_ADDR and MASTER_PORT to the "
        "host of rank 0 and a port that is free there. Or set COLLECTIVE_STORE to a private "
        "directory that all hosts see and no other launch uses."
    )


def _mpi(config: Config) -> Store:
    from collective.backends.mpi import MpiStore
    from collective.backends.mpi.library import start

    deadline = Deadline(config.start_timeout)
    everybody = start(deadline).COMM_WORLD
    if everybody.Get_size() != config.size:
        raise RendezvousError(
            f"rendezvous: mpiexec started {config.size} ranks, but mpi4py's MPI library sees "
            f"{everybody.Get_size()} [rank {config.rank}]; mpiexec and the library belong to "
            "different MPI implementations. Use the mpiexec that came with the library, or set "
            "COLLECTIVE_STORE to a private directory that all hosts see."
        )
    store: Store = MpiStore(everybody, deadline)
    return store


def _tcp(
    config: Config, endpoint: Endpoint, name: str, secret: Secret | None, tls: Tls | None
) -> Store:
    if endpoint.served:
        # The agent's store is torch's. It accepts every connection, also from ranks of another
        # launch, so the keys get a prefix for this launch. Imported here, because only ranks of
        # torchrun need the store and the modules for its thread.
        from .torch_store import AgentStore

        prefix = f"collective/{hashlib.sha256(name.encode()).hexdigest()[:16]}/"
        return PrefixedStore(AgentStore(endpoint, Deadline(config.start_timeout)), prefix)
    by_rank = config.store_server == "rank"
    return TcpStore(
        endpoint,
        _PUBLIC.within(name) if secret is None else secret,
        serve=by_rank and config.rank == 0 and config.join == "off",
        server="rank 0" if by_rank else "the launcher",
        spans_hosts=config.local_size < config.size,
        deadline=Deadline(config.start_timeout),
        tls=tls,
    )


def _address(config: Config, endpoint: Endpoint | None) -> str:
    """Return the address at which ranks of other hosts reach this rank.

    Args:
        endpoint: address at which the ranks meet, or None.
    """
    # A process that joins is alone as yet, but the ranks may be on other hosts.
    if config.local_size == config.size and config.join == "off":
        return "127.0.0.1"
    return own_address_toward(endpoint, config.interface)


def own_address_toward(endpoint: Endpoint | None, interface: str) -> str:
    """Return the address at which other hosts reach this one, if the ranks meet at ``endpoint``.

    Args:
        endpoint: address at which the ranks meet, or None.
        interface: network interface that the ranks use; empty for the one toward ``endpoint``.

    Raises:
        ConfigError: there is no such interface.
    """
    if interface:
        return address_of(interface)
    if endpoint is not None:
        # If the name does not resolve, opening the store reports it.
        with contextlib.suppress(RendezvousError):
            local = address_toward(endpoint.host, endpoint.port)
            if is_loopback(endpoint.host) or not is_loopback(local):
                return local
    return own_address()


def listen_toward(endpoint: Endpoint, interface: str, ports: str) -> tuple[socket.socket, str]:
    """Return a socket that listens where a rank of this host would, and its address.

    Args:
        endpoint: address at which the ranks meet.
        interface: the setting ``interface``.
        ports: the setting ``port``.

    Raises:
        ConfigError: there is no such interface, or none of the ports is free.
        OSError: the address cannot be used.
    """
    address = own_address_toward(endpoint, interface)
    return listen(address, _ports(ports))[0], address


def _ports(port: str) -> Ports | None:
    """Return the ports of the setting ``port``; None for any."""
    return Ports.parse(port) if port else None
