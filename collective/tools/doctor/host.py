"""Facts about this host that need no library: cores, memory, names, files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import queue
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collective import CollectiveError
from collective.backends.shm.layout import Layout
from collective.inner import FileStore
from collective.platform import (
    CGROUPS,
    PROC,
    SHARED_MEMORY,
    is_file,
    shared_file,
    topology,
    usable_cores,
)
from collective.start.network import address_of, interfaces, is_loopback, own_address
from collective.tools.bench.machine import Observer

# Seconds to wait for name servers; the system itself would wait much longer.
_RESOLVE_S = 3.0
# From this share of the cores on, other processes can make an answer late. If they have less, the
# probes have more than two thirds of the cores for eight seconds, which is enough.
_BUSY = 0.25


class Files:
    """Directories of the system's files about itself; tests replace them."""

    proc = PROC
    cgroup = CGROUPS
    dev_shm = SHARED_MEMORY


def processors() -> dict[str, Any]:
    """Return the processors of this host, and which of them this process may use.

    Returns:
        ``usable`` and ``online`` processors; the ``quota`` of a container in cores, which may be a
        part of a core, and is None without a quota; ``sockets``, ``cores`` and the ``threads`` of
        a core, None where the system does not show them; ``nodes``, each with its number, its
        ``processors``, and the ``usable`` ones, as the kernel lists them: ``0-3,8``.
    """
    every, mine = topology.processors(), topology.processors(usable=True)
    cores = Counter(processor.core for processor in every)
    shown = any(topology.SYSTEM.glob("cpu/cpu[0-9]*/topology"))
    nodes = {
        processor.node: [
            topology.listed(other.number for other in group if other.node == processor.node)
            for group in (every, mine)
        ]
        for processor in every
    }
    return {
        "usable": usable_cores(),
        "online": os.cpu_count() or 1,
        "quota": _quota(),
        "sockets": len({processor.socket for processor in every}) if shown else None,
        "cores": len(cores) if shown else None,
        "threads": max(cores.values()) if shown else None,
        "nodes": [
            {"node": node, "processors": of_host, "usable": usable}
            for node, (of_host, usable) in nodes.items()
        ],
    }


class Load:
    """Observer of the processor time that other processes take."""

    def __init__(self) -> None:
        self._observer: Observer | None = None
        with contextlib.suppress(OSError, ValueError):  # a sandbox may hide the kernel's counters
            self._observer = Observer()

    def others(self) -> float | None:
        """Return how many of the usable cores other processes took; None if it is unknown."""
        return None if self._observer is None else self._observer.others()

    def busy(self) -> str:
        """Return text that says that the machine is busy, and with what; "" if it is not."""
        others, cores = self.others(), usable_cores()
        if others is None or others < _BUSY * cores:
            return ""
        return f"the machine is busy: other processes take {others:.1f} of {cores} cores"


def shared_memory() -> dict[str, Any]:
    """Return the limits of ranks that share memory; amounts are in bytes.

    Returns:
        ``memory`` and ``available`` of the host; ``limit`` of the container and ``left``
        of the limit, None without a limit; ``memfd``, whether memory is shared without a file;
        ``dev_shm`` and ``dev_shm_free``, which MPI libraries and PyTorch use; ``directory``
        in which launches meet, with ``directory_error``; ``ranks_bytes``, the memory for
        ``ranks``, which is one rank for each core, but at least 2.
    """
    cores = processors()["usable"]
    memory = _memory()
    limit, left = _memory_limit(memory["memory"])
    facts: dict[str, Any] = {**memory, "limit": limit, "left": left, "memfd": _memfd()}
    facts["dev_shm"] = facts["dev_shm_free"] = None
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(Files.dev_shm)
        facts["dev_shm"], facts["dev_shm_free"] = usage.total, usage.free
    facts["directory"], facts["directory_error"] = _directory()
    facts["ranks"] = max(2, cores)
    facts["ranks_bytes"] = Layout(max(2, cores)).nbytes
    return facts


def network(interface: str) -> dict[str, Any]:
    """Return this host's name and addresses as other hosts see them.

    Args:
        interface: name of the configured interface, or "".

    Returns:
        ``name``; its ``addresses``, whether they are all ``loopback``, and the ``error`` of
        looking up the name; ``interfaces``; ``address``, at which ranks of other hosts would
        reach this host, and ``address_error``, why there is none.
    """
    host = socket.gethostname()
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    # A daemon thread, because the system's resolver cannot be interrupted.
    threading.Thread(
        target=lambda: answers.put(_names(host, interface)), name="resolve", daemon=True
    ).start()
    try:
        names = answers.get(timeout=_RESOLVE_S)
    except queue.Empty:
        late = f"the name service did not answer within {_RESOLVE_S:g} s"
        names = {"addresses": [], "error": late, "address": "", "address_error": late}
    loopback = bool(names["addresses"]) and all(map(is_loopback, names["addresses"]))
    try:
        known = [entry._asdict() for entry in interfaces()]
    except OSError:  # a sandbox may forbid the system call
        known = []
    return {"name": host, **names, "loopback": loopback, "interfaces": known}


def _names(host: str, interface: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"addresses": [], "error": "", "address": "", "address_error": ""}
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        facts["addresses"] = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    except (OSError, UnicodeError) as error:
        facts["error"] = str(error)
    try:
        facts["address"] = address_of(interface) if interface else own_address()
    except (CollectiveError, OSError) as error:
        facts["address_error"] = str(error)
    return facts


def system() -> str:
    """Return the operating system and the processor's architecture."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


# -- memory ---------------------------------------------------------------------------------


def _memory() -> dict[str, int | None]:
    amounts: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (Files.proc / "meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                amounts[key] = int(value[:-3]) << 10
    return {"memory": amounts.get("MemTotal"), "available": amounts.get("MemAvailable")}


def _memory_limit(memory: int | None) -> tuple[int | None, int | None]:
    """Return the lowest limit of this process's control groups, and the memory left below it."""
    limits: list[tuple[int, int]] = []
    for group in _groups("memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            allowed, current = _number(group / limit), _number(group / used)
            # Without a limit the older interface reports the largest number that it can.
            if allowed is not None and (memory is None or allowed < memory):
                limits.append((allowed, max(0, allowed - (current or 0))))
    if not limits:
        return None, None
    return min(limit for limit, _ in limits), min(left for _, left in limits)


def _quota() -> float | None:
    """Return the cores' time that this process's control groups allow, in cores; None for all."""
    quotas = []
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
        allowed, period_us = (_number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if allowed is not None and allowed > 0 and period_us:
            quotas.append(allowed / period_us)
    return min(quotas, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the directories of the control groups of this process, inner ones first.

    See cgroups(7). Version 2 has one tree, version 1 a tree for each controller. In a container
    the paths may be those of the host, while only the container's own part is mounted, at the top.
    """
    try:
        lines = (Files.proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = Files.cgroup
        elif controller in controllers.split(","):
            top = Files.cgroup / controller
        else:
            continue
        group = top / path.lstrip("/")
        yield from (p for p in (group, *group.parents) if p == top or top in p.parents)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _memfd() -> bool:
    """Tell whether anonymous memory can be opened by way of its process's number."""
    try:
        descriptor, path = shared_file("doctor")
    except OSError:
        return False
    try:
        if is_file(path):
            os.unlink(path)
            return False
        os.close(os.open(path, os.O_RDWR))
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


# -- files ----------------------------------------------------------------------------------


def _directory() -> tuple[str, str]:
    """Return the temporary directory, and why launches cannot meet there, or ""."""
    folder = ""
    try:
        folder = tempfile.gettempdir()
        meeting = Path(folder) / f"collective-{os.geteuid()}"
        if os.path.lexists(meeting):
            FileStore(meeting)
        with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(descriptor)
    except CollectiveError as error:
        return folder, str(error)
    except OSError as error:
        return folder, (
            f"temporary directory {folder or 'of this system'}: {error}; launches meet in this "
            "directory. Set TMPDIR to a directory of a local file system."
        )
    return folder, ""
