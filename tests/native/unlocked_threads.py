"""Stress test of calls without the interpreter lock, while Python changes the table of these calls.

Two ranks in one process have two threads each. A thread makes calls by the core's ``run``, as XLA
does. The main thread meanwhile replaces, forgets and locks calls. ``make sanitize`` runs
``python -m tests.native.unlocked_threads``, which builds the core under each sanitizer.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from collective import native

_ROOT = Path(__file__).resolve().parents[2]
_LINE_BYTES, _AREA_BYTES, _CALLS_BYTES = 512, 4096, 64 * 256
_LINES, _AREAS = 128, 4096
_CALLS = _AREAS + 4 * _AREA_BYTES
_ALL_REDUCE, _FLOAT32 = 1, 10  # as in collective/native
_THREADS = 2
SANITIZERS = {"thread": "libtsan.so", "address,undefined": "libasan.so"}


def _run() -> Any:
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, word, word, pointer, pointer)
    return kind(address(native.runner(), b"collective.native._core.run"))


class Rank:
    """One of two ranks of this process, with its door; it has the callbacks of its ``Shared``."""

    def __init__(self, segment: mmap.mmap, rank: int, count: int) -> None:
        self.words = memoryview(segment).cast("Q")
        self.key, self.bytes = (rank, count), 4 * count
        shared = native.shared(
            segment, rank, 2, _LINES, _CALLS + rank * _CALLS_BYTES, _AREAS, _AREA_BYTES,
            _AREA_BYTES // 32 * 3, False, self,
        )  # fmt: skip
        assert shared is not None
        self.plan = shared.plan(
            _ALL_REDUCE, 7, 0, None, "sum", _FLOAT32, False, "request", b"call", print
        )
        ring = native.ring(["nowhere"])
        self.door, self.other_door = (native.door(ring, [], rank, 2) for _ in range(2))
        self.turn = native.turn()

    def unlock(self, door: Any, key: tuple[int, int]) -> None:
        arrays = (0, 1, False, False, _FLOAT32, self.bytes, self.bytes)
        assert door.unlock(*key, self.plan, "request", arrays, "a line", 60.0, self.turn)

    def wait(self, request: Any, deadline: Any, rank: int, at: int, value: int, most: int) -> None:
        while self.words[at // 8] < value:
            if self.words[0]:
                self.fail(request)
            time.sleep(0)

    def fail(self, request: Any) -> None:
        raise ConnectionError(request)

    differ = refuse = moved = fail


def _make_calls(run: Any, rank: Rank, number: int, calls: int, wrong: list[object]) -> None:
    count = rank.bytes // 4
    x, out = np.full(count, number + 1, np.float32), np.empty(count, np.float32)
    for _ in range(calls):
        out[...] = 0
        while state := run(*rank.key, x.ctypes.data, out.ctypes.data):
            if state < 0:
                wrong.append(native.failure())
                return
            time.sleep(0)
        if not (out == 3).all():
            wrong.append(out[:4].tolist())


def stress(calls: int, count: int) -> None:
    """Make calls on ``count`` elements."""
    segment = mmap.mmap(-1, _CALLS + 2 * _CALLS_BYTES)
    ranks = [Rank(segment, rank, count) for rank in range(2)]
    run, wrong = _run(), []  # type: ignore[var-annotated]
    threads = [
        threading.Thread(target=_make_calls, args=(run, rank, number, calls, wrong))
        for number, rank in enumerate(ranks)
        for _ in range(_THREADS)
    ]
    for thread in threads:
        thread.start()
    turn = 0
    while any(thread.is_alive() for thread in threads):
        turn += 1
        for rank in ranks:
            rank.unlock(rank.door, rank.key)
            rank.unlock(rank.other_door, (turn % 50, -1))
            if turn % 5 == 0:
                native.forget(*rank.key)
            if turn % 7 == 0:
                rank.other_door.lock()  # type: ignore[union-attr]
        time.sleep(0)
    assert wrong == [], wrong[:4]
    # Calls after a failure of a rank: the second error replaces the first, which nobody has taken.
    ranks[0].words[0] = 1
    ranks[0].unlock(ranks[0].door, ranks[0].key)
    x = np.empty(count, np.float32)
    assert [run(*ranks[0].key, x.ctypes.data, x.ctypes.data) for _ in range(2)] == [-1, -1]
    assert isinstance(native.failure(), ConnectionError)
    assert native.failure() is None
    print(f"{calls} calls of {count} elements, {turn} changes of the table")


def _built(sanitizer: str, folder: Path) -> Path:
    """Make a folder with the package, whose core is built with a sanitizer; return the folder."""
    native_folder = folder / "collective" / "native"
    native_folder.mkdir(parents=True)
    for file in (_ROOT / "collective").iterdir():
        if file.name != "native":
            (folder / "collective" / file.name).symlink_to(file)
    sources = _ROOT / "collective" / "native"
    for file in sources.glob("*.py"):
        (native_folder / file.name).symlink_to(file)
    (folder / "tests").symlink_to(_ROOT / "tests")
    compiler = os.environ.get("CC", "cc").split()
    flags = "-std=gnu11 -O1 -g -fPIC -shared -pthread -ffp-contract=off -Wno-tsan"
    command = [
        *compiler,
        *flags.split(),
        f"-fsanitize={sanitizer}",
        f"-I{sysconfig.get_path('include')}",
    ]
    command += ["-o", str(native_folder / "_core.abi3.so"), *map(str, sources.glob("*.c"))]
    subprocess.run(command, check=True)
    return folder


def main() -> int:
    """Build the core under the sanitizers, and run the stress test with each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--sanitizers", nargs="*", choices=SANITIZERS, default=list(SANITIZERS))
    options = parser.parse_args()
    if not options.sanitizers:
        for count in (16, 5000):
            stress(options.calls, count)
        return 0
    wrong = 0
    for sanitizer in options.sanitizers:
        with tempfile.TemporaryDirectory() as name:
            folder = _built(sanitizer, Path(name))
            compiler = os.environ.get("CC", "cc").split()[0]
            library = SANITIZERS[sanitizer]
            found = subprocess.run(
                [compiler, f"-print-file-name={library}"],
                capture_output=True,
                text=True,
                check=True,
            )
            words = ["-m", "tests.native.unlocked_threads", "--calls", str(options.calls)]
            done = subprocess.run(
                [sys.executable, *words, "--sanitizers"],
                cwd=folder, check=False,
                env={**os.environ, "PYTHONPATH": str(folder), "LD_PRELOAD": found.stdout.strip(),
                     # Python frees little of its own at the end.
                     "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"},
            )  # fmt: skip
        print(f"unlocked, {sanitizer}: exit code {done.returncode}", flush=True)
        wrong += done.returncode != 0
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
