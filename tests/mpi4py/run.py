"""mpi4py's own tests over collective, counted; see CONTRIBUTING.md.

::

    python tests/mpi4py/run.py --ranks 1,2,3 --backend shm [test_cco_buf ...]
    python tests/mpi4py/run.py --mpi .mpi/mpich/bin ...        (the same over an MPI)

pip downloads mpi4py's sources. Each class of tests runs in ranks of its own, so that a hang or a
crash counts for that class only. A test that skips itself, such as by NotImplementedError, passes.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
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
ROOT = Path(__file__).resolve().parents[2]


def sources(folder: Path) -> Path:
    """Return mpi4py's folder of tests, downloaded once."""
    tests = folder / f"mpi4py-{VERSION}" / "test"
    if not tests.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run(
            [*command, "--no-binary", ":all:", "--dest", folder, f"mpi4py=={VERSION}"], check=True
        )
        with tarfile.open(folder / f"mpi4py-{VERSION}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return tests


def inside(name: str, only: str) -> None:
    """Run one class as a rank, and print its counts as a line of JSON."""
    sys.path.insert(0, os.getcwd())
    import importlib
    import io
    import unittest

    sys.modules["cupy"] = None  # type: ignore[assignment]  # its import needs a GPU
    module = importlib.import_module(name)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(getattr(module, only))
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    # The parts of a test that subTest() makes count as one.
    failed = [(getattr(test, "test_case", test), t) for test, t in result.errors + result.failures]
    bad = {str(test): text for test, text in failed}
    counts = {"ran": result.testsRun, "skipped": len(result.skipped), "bad": bad}
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


def one_class(
    tests: Path, name: str, only: str, ranks: Setup, limit: float
) -> tuple[bool, list[dict[str, Any]], str]:
    """Run one class on ranks; return whether it ended, its counts by rank, and the output."""
    process = subprocess.Popen(
        [*ranks.command, str(Path(__file__).resolve()), "--inside", name, only], cwd=tests,
        env=ranks.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return False, [], output
    return True, [json.loads(text) for text in re.findall(r"COUNTS (\{.*\})", output)], output


def main() -> None:
    """Run the files, and print how many tests passed of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--ranks", default="1,2,3", help="numbers of ranks")
    parser.add_argument("--backend", default="shm", help="transport")
    parser.add_argument("--mpi", help="folder with the mpiexec and python of an MPI")
    parser.add_argument("--limit", type=float, default=150, help="seconds for a class")
    parser.add_argument("--sources", type=Path, default=Path(tempfile.gettempdir()) / "mpi4py")
    parser.add_argument("-v", action="store_true", help="print the last line of each error")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(*options.inside)
    options.sources.mkdir(exist_ok=True, parents=True)
    tests = sources(options.sources)
    totals: dict[int, list[int]] = {}
    for size in map(int, options.ranks.split(",")):
        ranks = setup(size, options.backend, options.mpi)
        good = total = 0
        for name in options.files:
            began = time.monotonic()
            passed, number, errors = 0, 0, collections.Counter()
            for only, count in classes(tests / f"{name}.py", ranks).items():
                ended, counts, output = one_class(tests, name, only, ranks, options.limit)
                number += count
                bad = {test for rank in counts for test in rank["bad"]}
                if ended and len(counts) == size:
                    passed += count - len(bad)
                    for rank in counts:
                        errors.update(
                            f"{test.split()[0]} {only}: {text.strip().splitlines()[-1][:150]}"
                            for test, text in rank["bad"].items()
                        )
                else:
                    last = " | ".join(output.strip().splitlines()[-3:])[-300:]
                    errors[f"{only}: {'died' if ended else 'HUNG'}: {last}"] += 1
            good, total = good + passed, total + number
            seconds = time.monotonic() - began
            print(f"{size} ranks  {name:24} {passed:4} / {number:4}  {seconds:6.1f} s", flush=True)
            if options.v:
                for text in errors:
                    print("     ", text)
        totals[size] = [good, total]
        print(f"{size} ranks  all: {good} of {total} ({100 * good / max(total, 1):.1f} %)\n")
    if any(good < 0.95 * total for good, total in totals.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
