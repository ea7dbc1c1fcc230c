"""Which transport ``auto`` takes, and why.

All ranks must choose alike, or they wait for each other in vain. So only what every rank
sees alike decides: how many ranks and hosts there are, who started them, what is installed,
and whether a host has GPUs for its ranks; hosts of one launch are taken to be alike in that.
Nothing is imported to find that out, and no library is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from collective.contract import registry
from collective.errors import BackendUnavailableError, ConfigError

from .config import Config
from .keys import by_device
from .launchers import MPI_LAUNCHERS

__all__ = ["Choice", "across", "choose", "gpus", "in_mpi_world", "installed"]

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Choice(NamedTuple):
    """A transport, and why it is the one.

    Attributes:
        name: as it is registered.
        reason: in words, for logs and ``collective doctor``.
        options: what the transport has to be told of the choice, as
            :attr:`~collective.contract.world.World.options`. For ``nccl``: ``host``, the transport
            of what is in the host's memory, and ``devices``, whose arrays are welcome.
    """

    name: str
    reason: str
    options: Mapping[str, str] = _NOTHING

    @property
    def host(self) -> str:
        """The transport of what is in the host's memory: the same, but for ``nccl``."""
        return self.options.get("host", self.name)


class DeviceFiles:
    """Where the system shows its devices; the tests have one of their own."""

    dev = Path("/dev")


def choose(settled: Config, host: str = "") -> Choice:
    """Return the transport that the settings mean; ``"auto"`` takes the nearest that works.

    One rank needs none (``threads``), ranks of one host share memory (``shm``). Ranks of
    several hosts take ``mpi`` if they are an MPI world and mpi4py is installed, and otherwise
    ``gloo``; ``hierarchical`` combines that with shared memory, unless every host has one rank
    and every rank knows it. Where there are several ranks, NCCL, and a GPU for each of them,
    that becomes the host's part of ``nccl``. ``"cpu:shm,cuda:nccl"`` names one for each device.

    Args:
        host: what connects the CPUs if nothing is named, where that is not open:
            ``"threads"`` for ranks that are threads, ``"mpi"`` for those of an ``MPI.Comm``.

    Raises:
        BackendUnavailableError: ``auto``, the ranks are on several hosts, and nothing is
            installed that crosses hosts; with the install commands.
        ConfigError: a list by device without one for the CPU, or with one for the GPU that
            does not go with it.
    """
    origin = settled.origin("backend")
    named = by_device(settled.backend)
    if not named:
        if settled.backend == "auto":
            return _with_gpus(settled, _host(settled, host))
        named, devices = {"cpu": settled.backend}, "cuda"
        if settled.backend == "nccl":
            named = {"cpu": "auto", "cuda": "nccl"}
    else:
        _check(settled.backend, origin, named)
        origin, devices = f"{origin}, {settled.backend!r}", "cpu,cuda"
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
    """Return how many NVIDIA GPUs this process is shown, as far as files and settings tell."""
    try:
        there = sum(bool(re.fullmatch(r"nvidia\d+", each)) for each in os.listdir(DeviceFiles.dev))
    except OSError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    shown = 0
    for each in visible.split(","):
        # The first that does not exist ends the list. Others are named by GPU-… or MIG-….
        number = re.match(r"\s*([+-]?\d+)", each)
        if number and not 0 <= int(number[1]) < there:
            break
        if not number and not each.strip().startswith(("GPU-", "MIG-")):
            break
        shown += 1
    return shown if there else 0


def across(settled: Config) -> str:
    """Return the transport between the hosts under ``hierarchical``."""
    if settled.across != "auto":
        return settled.across
    return "mpi" if in_mpi_world(settled) and installed("mpi4py") else "gloo"


def in_mpi_world(settled: Config) -> bool:
    """Return whether this process was started as a rank of an MPI world of all ranks."""
    launched = settled.launched
    if launched is None or (launched.rank, launched.size) != (settled.rank, settled.size):
        return False
    # srun starts MPI ranks when told to (--mpi), and passes on what they need.
    by_srun = launched.launcher == "slurm" and bool({"PMI_RANK", "PMIX_RANK"} & set(os.environ))
    return launched.launcher in MPI_LAUNCHERS or by_srun


def installed(package: str) -> bool:
    """Return whether a package is there, without importing it."""
    return importlib.util.find_spec(package) is not None


def _check(backend: str, origin: str, named: Mapping[str, str]) -> None:
    """Refuse a list by device that cannot be."""
    cpu, cuda = named.get("cpu", ""), named.get("cuda", "")
    if not cpu:
        raise ConfigError(
            f"backend: {backend!r} ({origin}) names none for the CPU; write 'cpu:shm,…'."
        )
    strange = ", ".join(sorted(set(named) - {"cpu", "cuda"}))
    if strange:
        raise ConfigError(
            f"backend: {backend!r} ({origin}); the devices are cpu and cuda, not {strange}."
        )
    if cpu == "nccl":
        raise ConfigError(
            f"backend: {backend!r} ({origin}); nccl moves what is in the memory of GPUs only. "
            "Name what carries the rest: 'cpu:auto,cuda:nccl'."
        )
    if cuda not in ("", "auto", "nccl", cpu):
        raise ConfigError(
            f"backend: {backend!r} ({origin}); for cuda it is nccl, auto, or {cpu} as for the "
            f"CPU, which then carries arrays of the GPU through the host's memory."
        )


def _host(settled: Config, host: str) -> Choice:
    """Return what connects the CPUs if nothing is named."""
    if host:
        return Choice(host, "that is what the ranks were started as")
    if settled.size == 1:
        return Choice("threads", "one rank needs no transport")
    if settled.local_size == settled.size:
        return Choice("shm", f"all {settled.size} ranks are on this host and can share memory")
    return _across_hosts(settled)


def _with_gpus(settled: Config, below: Choice) -> Choice:
    """Return ``nccl`` over ``below`` if this host has NCCL and a GPU for each of its ranks."""
    if settled.size == 1 or gpus() < settled.local_size:
        return below
    # Here and not above: most programs have no GPU.
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
    elif crossing == "gloo":
        why = "PyTorch is installed, which brings Gloo"
        if in_mpi_world(settled):
            why += " (mpi4py is not)"
        if not installed("torch"):
            raise _nothing(settled, where)
    else:
        why = f"asked for by name ({settled.origin('across')})"
    hosts = _hosts(settled)
    if hosts == settled.size:
        return Choice(crossing, f"{where}, one on each; {crossing}: {why}")
    sharing = f"{hosts} hosts" if hosts else "which others share a host is not told"
    return Choice(
        "hierarchical",
        f"{where} ({sharing}): shared memory inside a host, {crossing} between hosts; "
        f"{crossing}: {why}",
    )


def _hosts(settled: Config) -> int | None:
    """Return how many hosts there are, if all ranks know."""
    launched = settled.launched
    if settled.size == 2:
        return 2
    if launched is None or (launched.rank, launched.size) != (settled.rank, settled.size):
        return None
    return launched.hosts


def _nothing(settled: Config, where: str) -> BackendUnavailableError:
    gloo, mpi = (registry.BUILT_IN[name].install for name in ("gloo", "mpi"))
    under_mpi = "" if in_mpi_world(settled) else ", and start the ranks with mpiexec"
    return BackendUnavailableError(
        f"init: backend 'auto' with {where}; nothing is installed that crosses hosts. For gloo: "
        f"`{gloo}`; for mpi: `{mpi}`{under_mpi}. Or start all ranks on one host."
    )
