"""Builds and runs ``shared_threads.c``: ranks that are threads, under the compiler's sanitizers.

``python -m tests.native.threads`` is what ``make sanitize`` runs, longer than the tests do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_CORE = _HERE.parents[1] / "collective" / "native"
_SOURCES = (_HERE / "shared_threads.c", _CORE / "shared.c", _CORE / "staging.c")
SANITIZERS = ("none", "thread", "address,undefined")


def build(sanitizer: str, folder: Path) -> Path | None:
    """Return the program, or None if there is no compiler that has the sanitizer."""
    command = os.environ.get("CC", "cc").split()
    if shutil.which(command[0]) is None:
        return None
    program = folder / "shared_threads"
    flags = "-std=gnu11 -O2 -g -Wall -Wextra -Werror -pthread".split()
    if sanitizer != "none":
        flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        empty = folder / "empty.c"
        empty.write_text("int main(void) { return 0; }\n")
        trial = [*command, *flags, "-o", str(program), str(empty)]
        if subprocess.run(trial, capture_output=True, check=False).returncode:
            return None
    sources = map(str, _SOURCES)
    subprocess.run([*command, *flags, f"-I{_CORE}", "-o", str(program), *sources], check=True)
    return program


def run(program: Path, ranks: int, calls: int, area_bytes: int, seed: int) -> str:
    """Return what the program writes; it is about an error, but for the last line."""
    words = [str(program), *map(str, (ranks, calls, area_bytes, seed))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    return done.stderr + done.stdout


def main() -> int:
    """Run the program under sanitizers, with several numbers of ranks and lengths of areas."""
    parser = argparse.ArgumentParser(description="The native core under the sanitizers.")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 5, 8])
    parser.add_argument("--areas", type=int, nargs="+", default=[1024, 4096, 65536])
    parser.add_argument("--sanitizers", nargs="+", choices=SANITIZERS, default=SANITIZERS)
    options = parser.parse_args()
    wrong = 0
    for sanitizer in options.sanitizers:
        with tempfile.TemporaryDirectory() as folder:
            program = build(sanitizer, Path(folder))
            if program is None:
                print(f"{sanitizer}: there is no compiler that has it")
                continue
            for ranks in options.ranks:
                for area_bytes in options.areas:
                    shown = run(program, ranks, options.calls, area_bytes, ranks + area_bytes)
                    print(f"{sanitizer}, areas of {area_bytes} B: {shown.strip()}", flush=True)
                    wrong += shown != f"{options.calls} calls of {ranks} ranks\n"
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
