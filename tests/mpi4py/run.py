"""mpi4py's own tests over collective, counted; see CONTRIBUTING.md.

::

    python tests/mpi4py/run.py --ranks 1,2,3 --backend shm [test_cco_buf ...]
    python tests/mpi4py/run.py --mpi .mpi/mpich/bin ...        (the same over an MPI)

pip downloads mpi4py's sources. Each file of tests runs in ranks of its own. If a test fails there,
each class runs in ranks of its own instead, so that a failure, a hang or a crash counts for that
class only. A test that skips itself, such as by NotImplementedError, passes.
The demos of ``mpi4py.futures`` count as tests that pass if they end without an error.

``failing.toml`` lists the tests that do not pass, with a reason each. The exit status is 1 if too
few tests pass, if one fails that is not listed, or if one passes that is listed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "4.1.2"
FILES = (
    "test_cco_buf test_cco_obj test_cco_vec test_cco_nb_buf test_cco_nb_vec test_cco_ngh_buf "
    "test_cco_ngh_obj test_cco_pr_buf test_cco_pr_vec test_cco_pr_ngh_buf test_p2p_buf "
    "test_p2p_obj test_p2p_buf_matched test_p2p_obj_matched test_comm test_comm_topo test_group "
    "test_op test_request test_grequest test_status test_datatype test_msgspec test_msgzero "
    "test_exceptions test_errhandler test_errorcode test_environ test_info test_attributes "
    "test_handle test_subclass test_objmodel test_pickle test_pack test_buffer test_address "
    "test_mpimem test_util_pkl5 test_util_dtlib test_util_sync"
).split()
# Demos of futures that need nothing but ranks; run_crawl.py needs a network.
DEMOS = "run_cpi run_hello run_julia run_mandelbrot run_primes".split()
ROOT = Path(__file__).resolve().parents[2]
FAILING = Path(__file__).with_name("failing.toml")
#: Share of the tests that has to pass over a transport, and over the other ones.
SHARES, SHARE = {"shm": 0.95}, 0.90


def sources(folder: Path) -> Path:
    """Return mpi4py's folder of tests, downloaded once."""
    tests = folder / f"mpi4py-{VERSION}" / "test"
    if not tests.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run(
            [*command, "--no-binary", "mpi4py", "--dest", folder, f"mpi4py=={VERSION}"], check=True
        )
        with tarfile.open(folder / f"mpi4py-{VERSION}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return tests


def inside(name: str, only: str) -> None:
    """Run a class, or all of a file, as a rank, and print its counts as a line of JSON."""
    sys.path.insert(0, os.getcwd())
    import importlib
    import io
    import unittest

    sys.modules["cupy"] = None  # type: ignore[assignment]  # its import needs a GPU
    module = importlib.import_module(name)
    loader = unittest.defaultTestLoader
    if only == "all":
        suite = loader.loadTestsFromModule(module)
    else:
        suite = loader.loadTestsFromTestCase(getattr(module, only))
    total = suite.countTestCases()
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    # The parts of a test that subTest() makes count as one.
    failed = [(getattr(test, "test_case", test), t) for test, t in result.errors + result.failures]
    bad = {test.id(): text for test, text in failed}
    counts = {"total": total, "bad": bad}
    sys.stdout.write(f"\nCOUNTS {json.dumps(counts)}\n")
    sys.stdout.flush()


class Setup(NamedTuple):
    """How ranks are started.

    Attributes:
        python: Python that has the mpi4py to test.
        command: words before the program.
        environment: variables.
    """

    python: str
    command: list[str]
    environment: dict[str, str]


def setup(size: int, backend: str, mpi: str | None) -> Setup:
    """Return how ``size`` ranks are started, over a transport or over the MPI in a folder."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if not mpi:
        paths.insert(0, str(ROOT / "adapters" / "mpi4py" / "importable"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if mpi:
        command = [f"{mpi}/mpiexec", "-n", str(size), f"{mpi}/python"]
        return Setup(f"{mpi}/python", command, environment)
    if size == 1:
        return Setup(sys.executable, [sys.executable], environment)
    command = [sys.executable, "-m", "collective", "run", "-n", str(size), "--backend", backend]
    return Setup(sys.executable, [*command, "--mpi4py"], environment)


def classes(file: Path, ranks: Setup) -> dict[str, int]:
    """Return a file's test classes, with their numbers of tests."""
    code = (
        "import sys, unittest, importlib; sys.path.insert(0, '.'); sys.modules['cupy'] = None;"
        f"m = importlib.import_module({file.stem!r});"
        "load = unittest.defaultTestLoader.loadTestsFromTestCase;"
        "print(*['CLASS %s %d' % (n, load(c).countTestCases()) for n, c in vars(m).items()"
        " if isinstance(c, type) and issubclass(c, unittest.TestCase)"
        f" and c.__module__ == {file.stem!r}], sep='\\n')"
    )
    done = subprocess.run(
        [ranks.python, "-c", code], cwd=file.parent, env=ranks.environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if done.returncode:
        print(f"  {file.stem}: not imported: {done.stderr.strip().splitlines()[-1:]}")
    return {n: int(k) for n, k in re.findall(r"^CLASS (\w+) (\d+)$", done.stdout, re.M)}


def run(command: list[str], folder: Path, ranks: Setup, limit: float) -> tuple[bool, str]:
    """Run a program on ranks; return whether it ended without an error, and its output."""
    process = subprocess.Popen(
        [*ranks.command, *command], cwd=folder, env=ranks.environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        output += "\nHUNG"
    return not process.returncode, output


def last_lines(output: str) -> str:
    """Return the end of an output in one line."""
    return " | ".join(output.strip().splitlines()[-3:])[-300:]


def one_file(tests: Path, name: str, size: int, ranks: Setup, limit: float) -> tuple[int, Any]:
    """Run a file's tests on ranks; return their number, and errors by failed test."""

    def counted(only: str) -> tuple[list[dict[str, Any]], str]:
        script = [str(Path(__file__).resolve()), "--inside", name, only]
        _, output = run(script, tests, ranks, limit)
        counts = [json.loads(text) for text in re.findall(r"COUNTS (\{.*\})", output)]
        # Unless each rank has come to its end, no test counts.
        return (counts if len(counts) == size else []), output

    counts, _ = counted("all")
    if counts and not any(rank["bad"] for rank in counts):
        return counts[0]["total"], {}
    total, failed = 0, {}
    for only, number in classes(tests / f"{name}.py", ranks).items():
        total += number
        counts, output = counted(only)
        if not counts:
            failed.update({f"{name}.{only} {i}": last_lines(output) for i in range(number)})
        for rank in counts:
            failed.update({test: last_lines(text) for test, text in rank["bad"].items()})
    return total, failed


def demos(tests: Path, ranks: Setup, limit: float) -> tuple[int, Any]:
    """Run the demos of futures; return their number, and the output of each that failed."""
    folder, failed = tests.parent / "demo" / "futures", {}
    for name in DEMOS:
        ended, output = run(["-m", "mpi4py.futures", f"{name}.py"], folder, ranks, limit)
        if not ended:
            failed[f"futures.{name}"] = last_lines(output)
    return len(DEMOS), failed


def listed(size: int, backend: str, files: list[str]) -> set[str]:
    """Return the tests of files that the list expects to fail on so many ranks over a transport."""
    found = set()
    for entry in chain(*tomllib.loads(FAILING.read_text()).values()):
        test, *where = entry.split()
        sizes = [word for word in where if word.isdecimal()]
        backends = [word for word in where if not word.isdecimal()]
        if str(size) in (sizes or [str(size)]) and backend in (backends or [backend]):
            found.add(test)
    return {test for test in found if test.partition(".")[0] in files}


def main() -> None:
    """Run the files, and print how many tests passed of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=[*FILES, "futures"])
    parser.add_argument("--ranks", default="1,2,3", help="numbers of ranks")
    parser.add_argument("--backend", default="shm", help="transport")
    parser.add_argument("--mpi", help="folder with the mpiexec and python of an MPI")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a file or class")
    parser.add_argument("--sources", type=Path, default=Path(tempfile.gettempdir()) / "mpi4py")
    parser.add_argument("-v", action="store_true", help="print the last line of each error")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(*options.inside)
    options.sources.mkdir(exist_ok=True, parents=True)
    tests = sources(options.sources)
    complaints = []
    for size in map(int, options.ranks.split(",")):
        where = options.mpi or options.backend
        ranks = setup(size, options.backend, options.mpi)
        total, failed = 0, {}
        for name in options.files:
            began = time.monotonic()
            if name == "futures":
                number, errors = demos(tests, ranks, options.limit)
            else:
                number, errors = one_file(tests, name, size, ranks, options.limit)
            total += number
            failed.update(errors)
            seconds = time.monotonic() - began
            good = number - len(errors)
            print(f"{size} ranks  {name:24} {good:4} / {number:4}  {seconds:6.1f} s", flush=True)
            for test, text in errors.items() if options.v else ():
                print(f"      {test}: {text}")
        good = total - len(failed)
        share = 100 * good / max(total, 1)
        print(f"{size} ranks over {where}: {good} of {total} ({share:.1f} %)\n")
        if options.mpi:
            continue
        whole = {*FILES, "futures"} <= set(options.files)
        if whole and good < SHARES.get(where, SHARE) * total:
            complaints.append(f"{size} ranks over {where}: {good} of {total} pass")
        expected, bad = listed(size, where, options.files), {test.split()[0] for test in failed}
        for test in sorted(bad - expected):
            complaints.append(f"{size} ranks over {where}: {test} fails, and is not listed")
        for test in sorted(expected - bad):
            complaints.append(f"{size} ranks over {where}: {test} passes, and is listed")
    if complaints:
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main()
