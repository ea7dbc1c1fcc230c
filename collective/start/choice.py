"""Choice of the transport for ``auto``, with the reason for it.

All ranks must choose the same transport, or they wait for each other in vain. So the choice
depends only on facts that every rank sees alike. These are the number of ranks and hosts, the
launcher, the installed packages, and whether a host has a GPU for each of its ranks. The hosts of
one launch are assumed to have the same packages and GPUs. Finding this out imports none of these
packages and loads no library.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from collective.errors import ConfigError

from .config import Config
from .keys import by_device
from .launchers import MPI_LAUNCHERS

#: Directory in which the system lists its devices.
DEVICES = Path("/dev")
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Choice(NamedTuple):
    """A transport, and the reason for choosing it.

    Attributes:
        name: registered name of the transport.
        reason: explanation in words, for logs and ``collective doctor``.
        options: :attr:`~collective.contract.world.World.options`. For ``nccl`` they contain
            ``host``, the transport for arrays in the host's memory, and ``devices``, the devices
            whose arrays it accepts.
    """

    name: str
    reason: str
    options: Mapping[str, str] = _NOTHING

    @property
    def host(self) -> str:
        """Transport for arrays in the host's memory: :attr:`name`, except for ``nccl``."""
        return self.options.get("host", self.name)

    @property
    def over_mpi(self) -> bool:
        """Whether the transport moves data between hosts over MPI."""
        crossing = self.options["across"] if self.host == "hierarchical" else self.host
        return crossing == "mpi"


def choose(settled: Config, host: str = "") -> Choice:
    """Return the transport that the settings select; ``"auto"`` takes the closest one that works.

    A single rank needs no transport (``threads``), and ranks of one host share memory (``shm``).
    Ranks of several hosts use ``mpi`` if they are an MPI world and mpi4py is installed, and
    otherwise ``tcp``. ``hierarchical`` combines that transport with shared memory, except if
    every host has one rank and all ranks know this. If there are several ranks, NCCL is installed
    and each rank has a GPU, the choice is ``nccl``, and the transport above serves the arrays in
    the host's memory. ``"cpu:shm,cuda:nccl"`` names one transport for each device.

    Args:
        host: transport for the CPUs if the settings name none and the kind of ranks decides it:
            ``"threads"`` for ranks that are threads, ``"mpi"`` for the ranks of an ``MPI.Comm``.

    Raises:
        ConfigError: a list by device has no transport for the CPU, or its transport for the GPU
            cannot be combined with the one for the CPU.
    """
    general = options(settled, host)
    picked = _picked(settled, host)
    return picked._replace(options={**general, **picked.options})


def options(settled: Config, host: str = "") -> dict[str, str]:
    """Return the settings that only single transports use.

    Args:
        settled: all settings.
        host: as for :func:`choose`.
    """
    of_comm = host == "mpi" and settled.across == "auto"
    values = {
        "disable": settled.disable,
        "interface": settled.interface,
        "across": "mpi" if of_comm else across(settled),
    }
    if settled.device is not None:
        values["device"] = str(settled.device)
    if settled.nccl_library:
        values["nccl_library"] = settled.nccl_library
    return values


def _picked(settled: Config, host: str) -> Choice:
    """Return the choice with the options of ``nccl`` alone; see :func:`choose`."""
    named = by_device(settled.backend)
    if not named:
        if settled.backend == "auto":
            return _with_gpus(settled, _host(settled, host))
        origin = settled.origins["backend"]
        named, devices = {"cpu": settled.backend}, "cuda"
        if settled.backend == "nccl":
            named = {"cpu": "auto", "cuda": "nccl"}
    else:
        origin, devices = f"{settled.origins['backend']}, {settled.backend!r}", "cpu,cuda"
        _check(settled.backend, settled.origins["backend"], named)
    cpu, cuda = named["cpu"], named.get("cuda", "")
    below = _host(settled, host) if cpu == "auto" else Choice(cpu, f"asked for by name ({origin})")
    if cuda == "auto":
        return _with_gpus(settled, below)
    if cuda != "nccl":
        return below
    reason = f"asked for by name ({origin})"
    if cpu == "auto":
        reason += f"; in the host's memory {below.name}: {below.reason}"
    return Choice("nccl", reason, {"host": below.name, "devices": devices})


def gpus() -> int:
    """Return how many NVIDIA GPUs this process sees, by device files and CUDA_VISIBLE_DEVICES."""
    try:
        total = sum(bool(re.fullmatch(r"nvidia\d+", entry)) for entry in os.listdir(DEVICES))
    except OSError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return total
    shown = 0
    for entry in visible.split(","):
        # The first GPU that does not exist ends the list. Entries are numbers, or names that
        # begin with GPU- or MIG-.
        number = re.match(r"\s*([+-]?\d+)", entry)
        if number and not 0 <= int(number[1]) < total:
            break
        if not number and not entry.strip().startswith(("GPU-", "MIG-")):
            break
        shown += 1
    return shown if total else 0


def across(settled: Config) -> str:
    """Return the transport between the hosts under ``hierarchical``."""
    if settled.across != "auto":
        return settled.across
    return "mpi" if in_mpi_world(settled) and installed("mpi4py") else "tcp"


def in_mpi_world(settled: Config) -> bool:
    """Return whether this process was started as a rank of an MPI world that has all ranks."""
    launched = settled.launched
    if launched is None or (launched.rank, launched.size) != (settled.rank, settled.size):
        return False
    # These launchers start MPI ranks only on request, and then set the variables that MPI needs.
    on_request = launched.launcher in ("slurm", "flux", "jsrun")
    on_request = on_request and bool({"PMI_RANK", "PMIX_RANK"} & set(os.environ))
    return launched.launcher in MPI_LAUNCHERS or on_request


def installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def _check(backend: str, origin: str, named: Mapping[str, str]) -> None:
    """Raise ConfigError for a list by device that cannot work."""
    cpu, cuda = named.get("cpu", ""), named.get("cuda", "")
    if not cpu:
        raise ConfigError(
            f"backend: {backend!r} ({origin}) names no transport for the CPU; write 'cpu:shm,…'."
        )
    strange = ", ".join(sorted(set(named) - {"cpu", "cuda"}))
    if strange:
        raise ConfigError(
            f"backend: {backend!r} ({origin}); the devices are cpu and cuda, not {strange}."
        )
    if cpu == "nccl":
        raise ConfigError(
            f"backend: {backend!r} ({origin}); nccl only transfers arrays in the memory of GPUs. "
            "Name a transport for the other arrays: 'cpu:auto,cuda:nccl'."
        )
    if cuda not in ("", "auto", "nccl", cpu):
        raise ConfigError(
            f"backend: {backend!r} ({origin}); the transport for cuda must be nccl, auto, or "
            f"{cpu} as for the CPU, which then copies GPU arrays through the host's memory."
        )


def _host(settled: Config, host: str) -> Choice:
    """Return the transport for the CPUs if the settings name none."""
    if host:
        return Choice(host, "the way in which the ranks were started requires it")
    if settled.size == 1:
        return Choice("threads", "one rank needs no transport")
    if settled.local_size == settled.size:
        return Choice("shm", f"all {settled.size} ranks are on this host and can share memory")
    return _across_hosts(settled)


def _with_gpus(settled: Config, below: Choice) -> Choice:
    """Return ``nccl`` over ``below`` if this host has NCCL and a GPU for each of its ranks."""
    if settled.size == 1 or gpus() < settled.local_size:
        return below
    # Imported here because most programs have no GPU.
    from collective.backends.nccl import library

    path = library.find(settled.nccl_library)
    if path is None:
        return below
    return Choice(
        "nccl",
        f"{gpus()} GPUs for {settled.local_size} ranks of this host, and NCCL is installed "
        f"({path}); in the host's memory {below.name}: {below.reason}",
        {"host": below.name, "devices": "cpu,cuda"},
    )


def _across_hosts(settled: Config) -> Choice:
    crossing = across(settled)
    where = f"{settled.size} ranks on several hosts, {settled.local_size} of them on this one"
    if crossing == "mpi":
        why = "they are an MPI world, and mpi4py is installed"
    elif settled.across == "auto":
        why = "it needs nothing but a network"
        if in_mpi_world(settled):
            why += ", and mpi4py is not installed"
    else:
        why = f"asked for by name ({settled.origins['across']})"
    hosts = _hosts(settled)
    if hosts == settled.size:
        return Choice(crossing, f"{where}, one on each; {crossing}: {why}")
    sharing = f"{hosts} hosts" if hosts else "how the other ranks share hosts is unknown"
    return Choice(
        "hierarchical",
        f"{where} ({sharing}): shared memory inside a host, {crossing} between hosts; "
        f"{crossing}: {why}",
    )


def _hosts(settled: Config) -> int | None:
    """Return the number of hosts, or None if not all ranks know it."""
    launched = settled.launched
    if settled.size == 2:
        return 2
    if launched is None or (launched.rank, launched.size) != (settled.rank, settled.size):
        return None
    return launched.hosts
