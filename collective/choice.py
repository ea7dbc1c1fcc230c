"""Which transport ``auto`` takes, and why.

All ranks must choose alike, or they wait for each other in vain. So only what every rank
sees alike decides: how many ranks and hosts there are, who started them, and what is
installed. Nothing is imported to find that out.
"""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

from collective import registry
from collective.config import Config
from collective.errors import BackendUnavailableError, ConfigError
from collective.launchers import MPI_LAUNCHERS

__all__ = ["Choice", "across", "choose", "in_mpi_world", "installed"]


class Choice(NamedTuple):
    """A transport, and why it is the one.

    Attributes:
        name: as it is registered.
        reason: in words, for logs and ``collective doctor``.
    """

    name: str
    reason: str


def choose(settled: Config) -> Choice:
    """Return the transport that the settings mean; ``"auto"`` takes the nearest that works.

    One rank needs none (``threads``), ranks of one host share memory (``shm``). Ranks of
    several hosts take ``mpi`` if they are an MPI world and mpi4py is installed, and otherwise
    ``gloo``; ``hierarchical`` combines that with shared memory, unless every host has one rank
    and every rank knows it. ``"cpu:shm,cuda:nccl"`` names one for each device.

    Raises:
        BackendUnavailableError: ``auto``, the ranks are on several hosts, and nothing is
            installed that crosses hosts; with the install commands.
        ConfigError: a list by device without one for the CPU.
    """
    name, origin = settled.backend, settled.origin("backend")
    if name.startswith(("cpu:", "cuda:")):
        by_device = dict(part.strip().partition(":")[::2] for part in name.split(","))
        if "cpu" not in by_device:
            raise ConfigError(
                f"backend: {name!r} ({origin}) names none for the CPU; write 'cpu:shm,…'."
            )
        origin = f"{origin}, {name!r}"
        name = by_device["cpu"]
    if name != "auto":
        return Choice(name, f"asked for by name ({origin})")
    if settled.size == 1:
        return Choice("threads", "one rank needs no transport")
    if settled.local_size == settled.size:
        return Choice("shm", f"all {settled.size} ranks are on this host and can share memory")
    return _across_hosts(settled)


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
    told = f"{hosts} hosts" if hosts else "which others share a host is not told"
    return Choice(
        "hierarchical",
        f"{where} ({told}): shared memory inside a host, {crossing} between hosts; "
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
