"""Lists of hosts on which ranks start: from the command line, a file, or a batch system."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from collective.errors import ConfigError

from .launchers import tasks_per_node
from .rendezvous import HOST_NAME, expand

# Variables by which batch systems describe the hosts of a job, in the order in which they count.
_BATCH = ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS")


class HostSlots(NamedTuple):
    """A host, and how many ranks it takes.

    Attributes:
        name: name or address for ssh; ``user@`` may precede it.
        slots: number of ranks.
    """

    name: str
    slots: int


def from_text(text: str, option: str) -> list[HostSlots]:
    """Return the hosts of a list such as ``a:4,b:4``; a host without a number takes one rank.

    An IPv6 address is in brackets, such as ``[fe80::1]:4``.

    Raises:
        ConfigError: the text is not such a list.
    """
    return _added(_entry(part, f"{option} {text!r}") for part in text.split(","))


def from_file(path: Path, option: str) -> list[HostSlots]:
    """Return the hosts of a file with one host on each line.

    A line is ``a``, ``a:4``, ``a slots=4`` (Open MPI) or ``a 4``. Text after ``#`` is a comment. A
    host on several lines takes the sum.

    Raises:
        ConfigError: the file cannot be read, or a line is not of this form.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option} {path}: cannot be read: {getattr(error, 'strerror', None) or error}. Name a "
            "file with one host on each line."
        ) from error
    stripped = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    return _added(
        _entry(re.sub(r"\s+(?:slots\s*=\s*)?", ":", line), f"{option} {path}, line {number}")
        for number, line in stripped
        if line
    )


def from_batch_system(environ: Mapping[str, str]) -> list[HostSlots]:
    """Return the hosts of the job of Slurm, PBS or LSF in which this process runs.

    Raises:
        ConfigError: there is no such job, or its variables cannot be read.
    """
    found = next((name for name in _BATCH if environ.get(name, "").strip()), None)
    if found is None:
        raise ConfigError(
            f"--hosts auto: none of {', '.join(_BATCH)} is set, so this is no job of Slurm, PBS or "
            "LSF. Name the hosts, such as --hosts a:4,b:4, or run the command in a job."
        )
    value = environ[found].strip()
    if found == "SLURM_JOB_NODELIST":
        return _of_slurm(value, environ)
    if found in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):  # a line for each rank
        return from_file(Path(value), found)
    words = value.split()
    if found == "LSB_HOSTS":  # a word for each rank
        return _added(_entry(word, found) for word in words)
    if len(words) % 2:
        raise ConfigError(
            f"{found}={value!r}; it must be a list such as 'a 4 b 4', as LSF sets it."
        )
    pairs = zip(words[::2], words[1::2], strict=True)
    return _added(_entry(f"{name}:{slots}", found) for name, slots in pairs)


def _of_slurm(value: str, environ: Mapping[str, str]) -> list[HostSlots]:
    names = expand(value, "SLURM_JOB_NODELIST")
    variable = "SLURM_TASKS_PER_NODE"
    if variable not in environ:
        return [HostSlots(name, 1) for name in names]
    tasks = tasks_per_node(environ[variable], variable)
    if len(tasks) != len(names):
        raise ConfigError(
            f"launcher slurm: {variable}={environ[variable]!r} lists {len(tasks)} hosts, and "
            f"SLURM_JOB_NODELIST={value!r} {len(names)}. Set both as Slurm does, or unset both."
        )
    return [HostSlots(name, count) for name, count in zip(names, tasks, strict=True)]


_HOST = re.compile(rf"(?:({HOST_NAME})|\[([0-9A-Fa-f:.]+(?:%{HOST_NAME})?)\])(?::([0-9]+))?")


def _entry(text: str, where: str) -> HostSlots:
    match = _HOST.fullmatch(text.strip())
    slots = int(match[3] or 1) if match else 0
    if match is None or not slots:
        raise ConfigError(
            f"{where}: {text.strip()!r} is not a host. Write NAME:RANKS, such as a:4, with at "
            "least one rank."
        )
    return HostSlots(match[1] or match[2], slots)


def _added(entries: Iterable[HostSlots]) -> list[HostSlots]:
    """Return the hosts in their order, each once, with the sum of its ranks."""
    slots: dict[str, int] = {}
    for name, count in entries:
        slots[name] = slots.get(name, 0) + count
    return [HostSlots(name, count) for name, count in slots.items()]
