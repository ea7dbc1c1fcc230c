"""The native core and the kit over ``shm``, for AArch64: ``python -m tests.native.aarch64``.

The folder ``.aarch64`` gets Debian's Python for arm64 and NumPy's wheel. Nothing is installed on
the machine. Each part prints a line or a table. The command takes an hour or more on two cores.

QEMU on x86 does not keep a store with release order before a later load with acquire order, which
AArch64 does (docs/decisions/0072-aarch64-emulated.md). So the core is compiled here with a barrier
behind each such store. The barrier changes nothing on a processor.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.native.threads import AREAS, PROGRAMS, run

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_CORE = _ROOT / "collective" / "native"
_COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
#: Programs that the machine must have -> the Debian packages that have them.
_NEEDED = {
    _EMULATOR: "qemu-user",
    _COMPILER: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
_PACKAGES = ("python3", "libpython3-dev", "libstdc++6")
_FLAGS = ("-std=gnu11", "-g", "-Wall", "-Wextra", "-pthread")
#: As in setup.py.
_CORE_FLAGS = ("-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC")
_PARTS = ("emulator", "threads", "kit")
#: Runs of the kit, each with its COLLECTIVE_DISABLE.
_CORES = {"on": "", "off": "native"}
# Ranks may take this long to start, and to end a case: the emulated interpreter is slow.
_TIMEOUT_S = 1800
# Starts the emulated Python, also for processes that it starts: the kernel cannot run it itself.
_STARTER = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
exec {emulator} -L "$here/../.." -0 "$0" "$here/{python}" "$@"
"""


class MissingError(Exception):
    """The machine lacks something, which the text names in one line."""


def check_tools() -> None:
    """Check that the machine has the tools.

    Raises:
        MissingError: it lacks some of them.
    """
    missing = [tool for tool in _NEEDED if shutil.which(tool) is None]
    if missing:
        packages = " ".join(_NEEDED[tool] for tool in missing)
        raise MissingError(
            f"there is no {' and no '.join(missing)}. As root on Debian: apt-get install {packages}"
        )


def fetched(command: Sequence[str], what: str) -> None:
    """Run a command that downloads.

    Raises:
        MissingError: the command failed; its last line is in the text.
    """
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        raise MissingError(f"cannot fetch {what}, is there no network? {lines[-1]}")


def make_system(folder: Path) -> Path:
    """Unpack Python and NumPy for arm64, and return the command that starts this Python."""
    system, apt, site = folder / "system", folder / "apt", folder / "site"
    starter = system / "usr" / "bin" / "python-emulated"
    if not starter.exists():
        for name in ("state/lists/partial", "cache/archives/partial"):
            (apt / name).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        # The machine's own sources, with another architecture and a state of its own.
        options = {
            "APT::Architecture": "arm64",
            "APT::Architectures::": "arm64",
            "APT::Sandbox::User": "",
            "Dir::State": str(apt / "state"),
            "Dir::State::status": str(apt / "status"),
            "Dir::Cache": str(apt / "cache"),
        }
        get = ["apt-get", *(f"-o{key}={value}" for key, value in options.items())]
        fetched([*get, "update"], "Debian's lists of packages")
        install = ["install", "-y", "--no-install-recommends", "--download-only", *_PACKAGES]
        fetched([*get, *install], "Debian's packages for arm64")
        for package in sorted((apt / "cache" / "archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(system)], check=True)
        python = next((system / "usr" / "bin").glob("python3.[0-9]*")).name
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
        pip += ["--only-binary", ":all:", "--implementation", "cp", "--no-deps"]
        pip += [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
        pip += ["--platform=manylinux2014_aarch64", "--upgrade"]
        fetched([*pip, "--python-version", python.removeprefix("python"), "numpy"], "NumPy's wheel")
        text = _STARTER.format(emulator=_EMULATOR, python=python)
        starter.with_suffix(".new").write_text(text)
        starter.with_suffix(".new").chmod(0o755)
        starter.with_suffix(".new").rename(starter)
    return starter


def with_barriers(assembly: str) -> str:
    """Return a program of the assembler with a full barrier behind each store-release."""
    return re.sub(r"(?m)^\tstlr[bh]?\t.*$", r"\g<0>\n\tdmb\tish", assembly)


def compile_for_arm(
    sources: Sequence[Path], output: Path, flags: Sequence[str], barriers: bool = True
) -> None:
    """Compile and link C for AArch64.

    Args:
        sources: C files.
        output: program or library.
        flags: flags of the compiler and linker.
        barriers: whether a full barrier follows each store with release order.
    """
    with tempfile.TemporaryDirectory() as name:
        parts = []
        for number, source in enumerate(sources):
            part = Path(name) / f"{number}.s"
            subprocess.run(
                [_COMPILER, *_FLAGS, *flags, "-S", "-o", str(part), str(source)], check=True
            )
            if barriers:
                part.write_text(with_barriers(part.read_text()))
            parts.append(str(part))
        subprocess.run([_COMPILER, *flags, "-pthread", "-o", str(output), *parts], check=True)


def program(name: str, folder: Path, barriers: bool) -> list[str]:
    """Compile a program of threads, and return the command that runs it."""
    main, *parts = PROGRAMS[name]
    output = folder / f"{name}{'' if barriers else '_as_it_is'}"
    flags = ["-O2", "-static", f"-I{_CORE}", *(part for part in parts if part[0] == "-")]
    sources = [_HERE / main, *(_CORE / part for part in parts if part[0] != "-")]
    compile_for_arm(sources, output, flags, barriers)
    return [_EMULATOR, str(output)]


def try_emulator(folder: Path, trials: int) -> int:
    """Show the emulator's two defects that the kit meets; return the failures with barriers."""
    output = folder / "emulated_order"
    compile_for_arm([_HERE / "emulated_order.c"], output, ["-O2", "-static"], barriers=False)
    for words, what in (([], "as it is"), (["barrier"], "with a barrier")):
        result = subprocess.run(
            [_EMULATOR, str(output), str(trials), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"emulator, {what}: {result.stdout.strip()}", flush=True)
    wrong = result.returncode
    start = folder / "emulated_start"
    compile_for_arm([_HERE / "emulated_start.c"], start, ["-O2", "-static"])
    shown = subprocess.run([_EMULATOR, str(start)], capture_output=True, text=True, check=False)
    # A difference makes the checks of grow fail in the kit, and is no failure of this library.
    print(f"emulator, start of a process: {shown.stdout.strip()}", flush=True)
    return wrong


def try_threads(folder: Path, calls: int) -> int:
    """Run the programs whose ranks are threads, and return the number of failures."""
    wrong = 0
    for name in PROGRAMS:
        command = program(name, folder, barriers=True)
        for ranks in (2, 3):
            for nbytes in AREAS[name]:
                shown = run(command, ranks, calls, nbytes, ranks + nbytes)
                print(f"{name}, {nbytes} B: {shown.strip()}", flush=True)
                wrong += shown != f"{calls} calls of {ranks} ranks\n"
    shown = run(program("claims", folder, barriers=False), 2, 5 * calls, AREAS["claims"][-1], 1)
    print(f"claims, as the emulator runs them: {shown.strip()}", flush=True)
    return wrong


def try_kit(
    folder: Path, starter: Path, sizes: str, checks: Sequence[str], cores: Sequence[str]
) -> int:
    """Run the conformance kit over ``shm``; return how many of its runs failed.

    Args:
        cores: "on" for a run with the native core, "off" for one without it.
    """
    package = folder / "package"
    shutil.rmtree(package, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.[ch]")
    shutil.copytree(_ROOT / "collective", package / "collective", ignore=ignored)
    system = starter.parents[2]
    headers = next((system / "usr" / "include").glob("python3.*"))
    version = headers.name.removeprefix("python").replace(".", "")
    core = package / "collective" / "native" / f"_core.cpython-{version}-aarch64-linux-gnu.so"
    include = [f"-I{headers}", f"-idirafter{system / 'usr' / 'include'}"]
    compile_for_arm(sorted(_CORE.glob("*.c")), core, ["-shared", *_CORE_FLAGS, *include])
    environment = {key: value for key, value in os.environ.items() if key != "COLLECTIVE_DISABLE"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPATH"] = f"{package}:{folder / 'site'}"
    kit = [str(starter), "-m", "collective.testing", "shm", "--sizes", sizes]
    kit += ["--timeout", str(_TIMEOUT_S), *(["--checks", *checks] if checks else [])]
    wrong = 0
    for native in cores:
        print(f"conformance kit over shm, native core {native}", flush=True)
        wrong += subprocess.run(
            kit, env={**environment, "COLLECTIVE_DISABLE": _CORES[native]}, cwd=package, check=False
        ).returncode
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="shm and its native core for AArch64, emulated.")
    parser.add_argument("--folder", type=Path, default=_ROOT / ".aarch64")
    parser.add_argument("--trials", type=int, default=20_000, help="of the emulator's order")
    parser.add_argument("--calls", type=int, default=5000, help="of each program of threads")
    parser.add_argument("--sizes", default="2,3", help="numbers of ranks in the kit")
    parser.add_argument("--checks", nargs="+", default=[], help="of the kit; all if not given")
    parser.add_argument(
        "--core",
        nargs="+",
        choices=_CORES,
        default=list(_CORES),
        help="runs of the kit (default: both)",
    )
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    os.nice(19)
    wrong = 0
    try:
        check_tools()
        folder.mkdir(exist_ok=True)
        starter = make_system(folder) if "kit" in options.parts else None
    except MissingError as missing:
        print(f"aarch64: {missing}", file=sys.stderr)
        return 1
    if "emulator" in options.parts:
        wrong += try_emulator(folder, options.trials)
    if "threads" in options.parts:
        wrong += try_threads(folder, options.calls)
    if starter is not None:
        wrong += try_kit(folder, starter, options.sizes, options.checks, options.core)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
