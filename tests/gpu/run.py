"""Program of ``make test-gpu``: run the tests that need a GPU and write a summary for docs/gpu.md.

Without a GPU the program prints that nothing was tested and exits with code 0. Run it with the
interpreter whose packages are tested: pytest and NumPy, PyTorch with CUDA or CuPy, and NCCL
(included in PyTorch's CUDA builds). The program itself imports only the standard library.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent.parent

# The test files of each suite, and the number of seconds after which the suite counts as hung.
SUITES = {
    "adapters, with the frameworks": (["tests/adapters/test_on_a_gpu.py"], 600),
    "streams, memory, a rank that leaves": (["tests/gpu/test_gpu_streams.py"], 1200),
    "conformance suite": (["tests/gpu/test_gpu_conformance.py"], 7200),
}
_NO_GPU = "test-gpu: there is no GPU here ({}). Nothing was tested."
_VERSIONS = """
import importlib, json, sys
from collective import cuda
from collective.backends.nccl.library import load
from collective.errors import CollectiveError
found = {"Python": sys.version.split()[0]}
device = cuda.device(0)
found["GPU"] = f"{cuda.device_count()} x {device.name}"
try:
    library = load()
    found["NCCL"] = f"{library.text} ({library.path})"
except CollectiveError as error:
    found["NCCL"] = ""
    print(error, file=sys.stderr)
for name in ("torch", "cupy", "numpy"):
    try:
        module = importlib.import_module(name)
        found[name] = module.__version__
        if name == "torch":
            found[name] += f" (CUDA {module.version.cuda})"
        if name != "numpy":
            found["frameworks"] = module.cuda.is_available() or found.get("frameworks", False)
    except ImportError:
        pass
print(json.dumps(found))
"""


def gpus() -> str:
    """Return the reason why no GPU is usable, or an empty string if there is a GPU."""
    path = os.environ.get("COLLECTIVE_CUDA_LIBRARY", "libcuda.so.1")
    try:
        driver = ctypes.CDLL(path)
    except OSError:
        return f"no driver: {path} cannot be loaded"
    code, count = driver.cuInit(0), ctypes.c_int()
    if not code:
        code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"the driver does not start: CUDA error {code}"
    return "" if count.value else "the driver sees none"


def versions(environ: dict[str, str]) -> dict[str, object]:
    """Return the versions of Python, GPU, NCCL and frameworks of this interpreter.

    Raises:
        SystemExit: a package or library that the tests need is missing.
    """
    missing = [name for name in ("numpy", "pytest") if importlib.util.find_spec(name) is None]
    missing += ["pytest-timeout"] * (importlib.util.find_spec("pytest_timeout") is None)
    if missing:
        raise SystemExit(_lacks(f"{', '.join(missing)}: pip install {' '.join(missing)}"))
    done = subprocess.run(
        [sys.executable, "-c", _VERSIONS], env=environ, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(_lacks(f"what collective needs:\n{done.stderr}"))
    report: dict[str, object] = json.loads(done.stdout)
    if not report["NCCL"]:
        raise SystemExit(_lacks(f"NCCL: {done.stderr.strip()}"))
    if not report.pop("frameworks", False):
        raise SystemExit(_lacks("a framework: PyTorch with CUDA, or CuPy (cupy-cuda12x, -cuda13x)"))
    return report


def _lacks(what: str) -> str:
    return (
        f"test-gpu: there is a GPU, and nothing was tested: {sys.executable} lacks {what}\n"
        "Name another interpreter by make test-gpu GPU_PYTHON=/path/to/python"
    )


def driver_version() -> dict[str, str]:
    """Return the driver's version and the newest CUDA version that the driver supports."""
    report = {}
    file = Path("/proc/driver/nvidia/version")
    if file.exists():
        match = re.search(r"Kernel Module\s.*?(\d+\.\d+(?:\.\d+)?)", file.read_text())
        report["driver"] = match[1] if match else file.read_text().splitlines()[0]
    driver = ctypes.CDLL(os.environ.get("COLLECTIVE_CUDA_LIBRARY", "libcuda.so.1"))
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    report["CUDA of the driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return report


def run(
    name: str, environ: dict[str, str], folder: Path, extra: Sequence[str]
) -> tuple[str, dict[str, int], list[str]]:
    """Run one suite; return its outcome, the number of tests by outcome, and the failed names."""
    paths, seconds = SUITES[name]
    report = folder / "gpu-tests.xml"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-q", "--timeout", str(max(300, seconds // 4))]
    words += ["-p", "no:cacheprovider", f"--junitxml={report}", *extra, *paths]
    try:
        code = subprocess.run(words, env=environ, cwd=ROOT, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return f"hung: ended after {seconds} s", {}, []
    if not report.exists():
        return f"pytest ended with exit code {code}", {}, []
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            failed.append(case.get("name", ""))
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    # Exit code 5 means that nothing was collected, as when a whole module is skipped.
    if counts["failed"] or code not in (0, 5):
        return "failed", counts, failed
    return ("passed" if counts["passed"] else "nothing was tested"), counts, failed


def overhead(environ: dict[str, str], folder: Path, real: bool) -> str:
    """Return the table of a call's cost on the host, or the reason why it is missing."""
    words = [sys.executable, "benchmarks/nccl.py", *["--real"] * real, *["--quick"] * (not real)]
    words += ["--layers", "--json", str(folder / "gpu-overhead.json")]
    try:
        done = subprocess.run(
            words, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=600
        )
    except subprocess.TimeoutExpired:
        return "Not measured: it hung.\n"
    if done.returncode:
        return f"Not measured:\n\n```text\n{done.stderr.strip()}\n```\n"
    return f"```text\n{done.stdout.strip()}\n```\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="The tests that need a GPU.")
    parser.add_argument("--ranks", default="2", help='numbers of ranks (default: "2")')
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="for the summary")
    parser.add_argument("--pytest", default="", help='further arguments, as "-k scan"')
    # Only the tests of this program use this option.
    parser.add_argument("--fake", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    why = gpus()
    if why:
        print(_NO_GPU.format(why))
        return 0
    environ = {**os.environ, "GPU_TESTS_RANKS": options.ranks}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    real = not options.fake
    for name in ("NCCL_LIBRARY", "CUDA_LIBRARY"):
        if f"COLLECTIVE_{name}" in environ:
            environ[f"GPU_TESTS_{name}"] = environ[f"COLLECTIVE_{name}"]
    about: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), **driver_version()}
    about |= {"ranks": options.ranks} | (versions(environ) if real else {"GPU": "none: a fake"})
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = [f"### {about['date']}, {about['GPU']}", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in about.items()]
    lines += ["", "| tests | | passed | failed | skipped |", "| --- | --- | ---: | ---: | ---: |"]
    well, tested = True, 0
    problems: list[str] = []
    for name in SUITES:
        print(f"test-gpu: {name}", flush=True)
        how, counts, failed = run(name, environ, options.folder, shlex.split(options.pytest))
        well = well and how in ("passed", "nothing was tested")
        tested += counts.get("passed", 0)
        cells = [str(counts.get(kind, "–")) for kind in ("passed", "failed", "skipped")]
        lines.append(f"| {name} | {how} | {' | '.join(cells)} |")
        problems += [f"* failed: `{test}`" for test in failed]
    lines += ["", *problems, *[""] * bool(problems)]
    print("test-gpu: what a call costs on the host", flush=True)
    lines += [overhead(environ, options.folder, real)]
    summary = options.folder / "gpu-summary.md"
    summary.write_text("\n".join(lines) + "\n")
    how = "passed" if well and tested else "FAILED" if not well else "nothing was tested"
    print(f"test-gpu: {how}; the summary for docs/gpu.md is in {summary}")
    return 0 if well and tested else 1


if __name__ == "__main__":
    sys.exit(main())
