"""Timing of a transport for the cost model: ``python -m collective.tools.profile.calibrate FILE``.

All ranks run this module. The arrays are in symmetric memory, like the gradients of our adapters.
Each repetition starts after a barrier that is not timed, and its time is that of the slowest rank.
The figure is the first decile of the repetitions, because other work of the machine is not a cost
of the transport.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import collective
from collective.algorithms.model import Measured
from collective.errors import ConfigError
from collective.platform import die_with_parent

__all__ = ["load", "measure", "run"]

_SIZES = tuple(8**exponent for exponent in range(1, 9))  # bytes: 8 to 16 Mi
_SECONDS = 0.12  # for each operation and size
_REPETITIONS = 3, 200
_FIELDS = ("op", "bytes", "ranks", "seconds")
# In our benchmark, send_recv is half of a round trip, which is one message.
_OTHER_NAMES = {"send_recv": "send"}
_LONG = 1 << 20
_RUN_S = 300.0


def measure(
    comm: collective.Communicator, sizes: Sequence[int] = _SIZES, seconds: float = _SECONDS
) -> list[Measured]:
    """Time ``all_reduce``, and ``all_gather``, which does not fold, at some sizes.

    Collective: every rank calls it.

    Args:
        sizes: sizes in bytes.
        seconds: approximate time for each operation and size.
    """
    found = []
    for nbytes in sizes:
        count = max(1, nbytes // 8)
        whole = comm.empty(count, "float64")
        whole[:] = 1
        call = partial(comm.all_reduce, whole, op="max", out=whole)
        found.append(_timed(comm, "all_reduce", whole.nbytes, seconds, call))
        share = -(-count // comm.size)
        piece, joined = comm.empty(share, "float64"), comm.empty(share * comm.size, "float64")
        piece[:] = 1
        call = partial(comm.all_gather, piece, counts=[share] * comm.size, out=joined)
        found.append(_timed(comm, "all_gather", joined.nbytes, seconds, call))
    return found


def _timed(
    comm: collective.Communicator, op: str, nbytes: int, seconds: float, call: Callable[[], object]
) -> Measured:
    def once() -> float:
        comm.barrier()
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    first = comm.all_reduce(np.array([max(once() for _ in range(2))]), op="max")[0]
    fewest, most = _REPETITIONS
    repetitions = int(min(most, max(fewest, seconds / first)))
    times = np.array([once() for _ in range(repetitions)])
    slowest = comm.all_reduce(times, op="max")
    return Measured(op, nbytes, comm.size, float(np.quantile(slowest, 0.1)))


def run(ranks: Sequence[int], backend: str | None) -> list[Measured]:
    """Time a transport with each number of ranks on this host.

    Raises:
        ConfigError: the ranks failed, or took too long; the text has their output.
    """
    measured = []
    with tempfile.TemporaryDirectory(prefix="collective-") as directory:
        for size in ranks:
            file = Path(directory, f"{size}.json")
            command = [sys.executable, "-m", "collective", "run", "-n", str(size)]
            command += ["--backend", backend] if backend else []
            command += ["--timeout", "60", "-m", "collective.tools.profile.calibrate", str(file)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_RUN_S,
                    preexec_fn=die_with_parent(),
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise ConfigError(
                    f"profile: timing the transport with {size} ranks took longer than "
                    f"{_RUN_S:g} s. Use results of `collective bench --json`, with --from."
                ) from error
            if done.returncode:
                raise ConfigError(
                    f"profile: timing the transport with {size} ranks failed:\n{done.stderr}"
                )
            measured += load(file)
    return measured


def load(file: Path, backend: str | None = None) -> list[Measured]:
    """Return the measurements in a file of JSON, wherever in the file they are.

    Every object with the keys ``op``, ``bytes``, ``ranks`` and ``seconds`` is a measurement. Of the
    results of ``collective bench``, those with symmetric memory are used if there are any, because
    the gradients of our adapters are in such memory. For short calls the latency is used.

    Args:
        backend: name of a transport; measurements of other transports are skipped.

    Raises:
        ConfigError: the file cannot be read, or has no measurement.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile: {file} cannot be read as JSON: {error}.") from error
    rows = [row for row in _rows(content) if _is_usable(row, backend)]
    if any(row.get("memory") == "symmetric" for row in rows):
        rows = [row for row in rows if row.get("memory") != "ordinary"]
    if not rows:
        of = f" of backend {backend!r}" if backend else ""
        raise ConfigError(
            f"profile: {file} has no measurements{of}; it needs objects with the keys "
            f"{', '.join(_FIELDS)}, as `collective bench --json` writes them."
        )
    return [
        Measured(
            str(_OTHER_NAMES.get(row["op"], row["op"])),
            int(row["bytes"]), int(row["ranks"]), float(row["seconds"]),
        )
        for row in rows
    ]  # fmt: skip


def _rows(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, dict) and all(field in content for field in _FIELDS):
        if all(isinstance(content[field], (int, float)) for field in _FIELDS[1:]):
            yield content
    elif isinstance(content, (dict, list)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _rows(value)


def _is_usable(row: dict[str, Any], backend: str | None) -> bool:
    """Return whether a measurement is of a call as a program's step makes it."""
    # mpi/openmpi is the transport mpi with one of several libraries.
    transport = str(row.get("backend", backend)).partition("/")[0]
    if row.get("wrong") or (backend is not None and transport != backend):
        return False
    # Short calls back to back overlap each other; those of a program do not.
    return bool(row.get("method") != "bandwidth" or row["bytes"] >= _LONG)


def main() -> None:
    """Time the transport of this launch; rank 0 writes the results to the file."""
    with collective.init() as comm:
        measurements = measure(comm)
        if comm.rank == 0:
            rows = [dict(zip(_FIELDS, measurement)) for measurement in measurements]
            Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
