"""Command that builds and runs ``*_threads.c``: ranks as threads, under sanitizers.

``make sanitize`` runs ``python -m tests.native.threads``, which takes longer than the tests.
:mod:`tests.native.aarch64` runs the same programs for AArch64 under an emulator.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_CORE = _HERE.parents[1] / "collective" / "native"
_ENGINE = ("messages.c", "sending.c", "flow.c", "posted.c", "rings.c")
# Source of each program, sources of the core in it, and its flags: short pieces make messages long.
PROGRAMS = {
    "shared": ("shared_threads.c", "shared.c", "staging.c", "sums.c", "-DLEAST_LEFT=2048"),
    "folds": ("shared_threads.c", "shared.c", "staging.c", "sums.c", "folds.c", "-DFOLDS",
              "-DLEAST_LEFT=2048", "-ffp-contract=off"),
    "messages": ("messages_threads.c", *_ENGINE, "streams.c", "-DCHUNK_BYTES=128",
                 "-DCLAIMED_BYTES=2048", "-DLEAST_LEFT=4096", "-DFETCHED_AT_ONCE=3072",
                 "-DWINDOW_BYTES=(16<<10)"),
    "claims": ("claims_threads.c", *_ENGINE, "-DCHUNK_BYTES=128", "-DCLAIMED_BYTES=2048",
               "-DLEAST_LEFT=2048", "-DFETCHED_AT_ONCE=1024"),
    "frames": ("frames_fuzz.c", *_ENGINE, "streams.c", "-DLEAST_LEFT=4096",
               "-DWINDOW_BYTES=(16<<10)"),
    "xla": ("xla_threads.c", "-ldl"),
}  # fmt: skip
# Bytes of an area or of a ring. A ring is shorter than a head, as long as some messages, or longer
# than two messages that a receiver may claim. A longer ring would only repeat the middle part.
# Without a ring the messages go over sockets.
AREAS = {
    "shared": (1024, 4096, 65536),
    "folds": (1024, 4096, 65536),
    "messages": (0, 1024, 4096, 16384),
    "frames": (0,),
    "claims": (1024, 4096, 16384),
    "xla": (4096,),
}
# Counters of a program begin so many calls before one of these numbers, in turn.
WRAPS = (0, 2**31, 2**32, 2**64)
SANITIZERS = ("none", "thread", "address,undefined")


def build(name: str, sanitizer: str, folder: Path) -> Path | None:
    """Return a program, or None if there is no compiler that has the sanitizer."""
    command = os.environ.get("CC", "cc").split()
    if shutil.which(command[0]) is None:
        return None
    program = folder / Path(PROGRAMS[name][0]).stem
    flags = "-std=gnu11 -O2 -g -Wall -Wextra -Werror -pthread".split()
    flags += ["-include", str(_HERE / "fetching_here.h")]
    if sanitizer != "none":
        flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        empty = folder / "empty.c"
        empty.write_text("int main(void) { return 0; }\n")
        trial = [*command, *flags, "-o", str(program), str(empty)]
        if subprocess.run(trial, capture_output=True, check=False).returncode:
            return None
    main, *parts = PROGRAMS[name]
    parts = [part if part.startswith("-") else str(_CORE / part) for part in parts]
    command += [*flags, f"-I{_CORE}", "-o", str(program), str(_HERE / main), *parts]
    subprocess.run(command, check=True)
    return program


def run(command: list[str], ranks: int, calls: int, nbytes: int, seed: int, wrap: int = 0) -> str:
    """Return the output of the program; all but the last line describes an error.

    Args:
        wrap: number near which the counters begin.
    """
    start = wrap - calls // 8 * 8 if wrap else 0
    words = [*command, *map(str, (ranks, calls, nbytes, seed, start))]
    # Without the option a frame that announces more than the memory ends the program.
    options = {**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1"}
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=600 + calls / 1000, check=False, env=options
    )
    lines = (result.stderr + result.stdout).splitlines(keepends=True)
    return "".join(line for line in lines if "failed to allocate" not in line)


def main() -> int:
    """Run the programs under sanitizers, with several numbers of ranks and lengths of memory."""
    parser = argparse.ArgumentParser(description="The native core under the sanitizers.")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 5, 8])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--areas", type=int, nargs="+", help="bytes of an area, or of a ring")
    parser.add_argument("--wraps", type=int, nargs="+", default=WRAPS, help="for the counters")
    parser.add_argument("--sanitizers", nargs="+", choices=SANITIZERS, default=SANITIZERS)
    parser.add_argument(
        "--emulator", default="", help="command that runs the programs, with its arguments"
    )
    options = parser.parse_args()
    wrong = 0
    for name, sanitizer in itertools.product(options.programs, options.sanitizers):
        with tempfile.TemporaryDirectory() as folder:
            program = build(name, sanitizer, Path(folder))
            if program is None:
                print(f"{sanitizer}: there is no compiler that has it")
                continue
            command = [*options.emulator.split(), str(program)]
            areas = options.areas or AREAS[name]
            wraps = itertools.cycle(options.wraps)
            for ranks, nbytes in itertools.product(options.ranks, areas):
                wrap = next(wraps)
                shown = run(command, ranks, options.calls, nbytes, ranks + nbytes, wrap)
                print(f"{name}, {sanitizer}, {nbytes} B, {wrap}: {shown.strip()}", flush=True)
                wrong += shown != f"{options.calls} calls of {ranks} ranks\n"
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
