"""Reports of `collective doctor` in healthy and in broken environments."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.contract import registry
from collective.install import hint
from collective.platform import topology
from collective.start.keys import KEYS
from collective.tools import doctor as tools_doctor
from collective.tools.cli import doctor as command
from collective.tools.cli.doctor import text
from collective.tools.doctor import host as doctor_host
from collective.tools.doctor import mpi as doctor_mpi
from collective.tools.doctor import probe as doctor_probe
from collective.tools.doctor.probe import Answer
from collective.tools.doctor.problems import problems
from tests import fakes
from tests.support.interpreter import ROOT, run_python
from tests.support.launches import Launches, launched, launches
from tests.support.mpi_launches import launch_of, needs, run_alone

pytestmark = pytest.mark.whole

__all__ = ["launches"]  # a fixture

# The doctor gives each library 8 s; a busy machine may need more in total.
DEADLINE_S = 90.0


class Doctor:
    """Runner of the command in an environment with packages that a test writes.

    The environment has these packages and NumPy. Installed packages are visible only on request,
    because their imports take longer than everything else.
    """

    def __init__(self, launches: Launches) -> None:
        self.launches = launches
        self.packages = launches.directory / "packages"
        self.packages.mkdir()
        numpy_folder = Path(np.__file__).parent
        for folder in (numpy_folder, numpy_folder.with_name("numpy.libs")):
            if folder.exists():
                (self.packages / folder.name).symlink_to(folder)

    def package(self, name: str, body: str) -> None:
        (self.packages / f"{name}.py").write_text(textwrap.dedent(body))

    def distribution(self, name: str, version: str = "1.0", entry_points: str = "") -> None:
        info = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))

    def transport(self, name: str, body: str) -> None:
        """Install a third-party transport: the class Transport of the module ``name``.

        Args:
            body: members that differ from those of the transport of threads.
        """
        base = "from collective.backends.threads import ThreadsBackend\n"
        own = textwrap.indent(textwrap.dedent(body), "    ")
        self.package(name, f"{base}class Transport(ThreadsBackend):\n    name = {name!r}\n{own}")
        points = f"[collective.backends]\n{name} = {name}:Transport\n"
        self.distribution(f"of-{name}", entry_points=points)

    def start(
        self,
        *arguments: str,
        installed: bool = False,
        options: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        return run_python(
            *(() if installed else ("-S",)), *options, "-m", "collective", "doctor", *arguments,
            cwd=self.launches.directory, env=self.launches.environment(**variables),
            timeout=DEADLINE_S, PYTHONPATH=os.pathsep.join(map(str, (self.packages, ROOT))),
        )  # fmt: skip

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        done = self.start(*arguments, **options)
        assert self.launches.living() == []
        assert list(self.launches.temporary.iterdir()) == [], "files were left behind"
        return done

    def report(self, *arguments: str, code: int = 0, **variables: Any) -> dict[str, Any]:
        done = self.run("--json", *arguments, **variables)
        assert (done.returncode, done.stderr) == (code, ""), done.stderr or done.stdout
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["exit_code"] == code
        return report


@pytest.fixture
def doctor(launches: Launches) -> Doctor:
    return Doctor(launches)


# A run starts a dozen processes. A fault in one library does not affect the report on another, so
# tests of single libraries share a run.


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield the report if all installed packages work, and the host has GPUs with NCCL 2.19."""
    with launched(tmp_path_factory.mktemp("healthy")) as launches:
        gpus = {} if fakes.compiler() is None else fakes.environment(21904, delay_us=0)
        yield Doctor(launches).report("--test", installed=True, **gpus)


@pytest.fixture(scope="module")
def bare_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield the report if neither other packages nor a GPU driver are installed."""
    with launched(tmp_path_factory.mktemp("bare")) as launches:
        yield Doctor(launches).report(COLLECTIVE_CUDA_LIBRARY="/no/such/libcuda.so.1")


BROKEN = {
    "torch": "raise ImportError('libtorch_cpu.so: cannot open shared object file')",
    "mpi4py": "import os; os._exit(3)",
    "cupy": "import os; print('more', flush=True); os.abort()",
    "chainer": "import time; time.sleep(3600)",
}


@pytest.fixture(scope="module")
def sick_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield the report for broken libraries, GPUs without NCCL, and an unknown interface."""
    with launched(tmp_path_factory.mktemp("sick")) as launches:
        doctor = Doctor(launches)
        for name, body in BROKEN.items():
            doctor.package(name, f"print('noise that is no JSON')\n{body}")
        gpus = {} if shutil.which("cc") is None else {"LD_LIBRARY_PATH": str(driver(doctor, 0))}
        yield doctor.report(COLLECTIVE_INTERFACE="nope0", **gpus)


def joined(report: dict[str, Any]) -> str:
    return "\n".join(f"{p['problem']}: {p['remedy']}" for p in report["problems"])


needs_fakes = pytest.mark.skipif(fakes.compiler() is None, reason="no C compiler")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


# -- in a healthy environment -------------------------------------------------------------------


def test_report_lists_choices_and_working_transports(healthy_run: dict[str, Any]) -> None:
    report = healthy_run
    assert list(report["transports"]) == registry.names()
    for name in ("shm", "threads"):
        assert report["transports"][name]["works"] is True
    assert report["choices"][0]["backend"] == "threads"
    chosen = {choice["when"]: choice["backend"] for choice in report["choices"]}
    assert chosen["collective run"] == "shm"
    assert chosen["torchrun, 2 hosts of 1"] == "tcp"
    assert all(choice["reason"] for choice in report["choices"])
    assert list(report["settings"]["values"]) == list(KEYS)
    assert report["collective"]["numpy"] == np.__version__
    assert report["processors"]["usable"] >= 1
    assert report["shared_memory"]["memory"] > 2**20


def test_text_fits_80_columns_and_begins_with_choices(
    healthy_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = text(healthy_run)
    lines = shown.splitlines()
    assert lines[1] == "One host: shm. Several hosts: hierarchical."
    assert lines[3] == "Transports"
    assert re.search(r"^  shm +works;", shown, re.MULTILINE)
    for title in ("Host", "Network", "Across hosts", "Versions", "Settings"):
        assert title in lines
    assert "\n  joining, control, data over tcp  not authenticated, not encrypted\n" in shown
    # A text without a place to break, such as a path, may be longer.
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 2] == []
    assert [line for line in lines if line != line.rstrip()] == []


def taken(shown: str) -> list[str]:
    """Return the lines of the section about what a program takes."""
    return shown.split("\nWhat a program takes\n")[1].split("\n\n")[0].splitlines()


def test_text_has_colours_at_a_terminal(
    healthy_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = text(healthy_run).splitlines()
    assert "\033[1mTransports\033[0m" in lines
    assert any(re.search(r"shm +\033\[32mworks\033\[0m", line) for line in lines), lines


def test_text_tells_what_programs_take(healthy_run: dict[str, Any]) -> None:
    lines = taken(text(healthy_run, 200))
    assert lines[:2] == [
        "  here and now            threads: one rank needs no transport",
        "  collective run          shm: all 2 ranks are on this host and can share memory",
    ]
    assert lines[2].startswith("  torchrun, 2 hosts of 1  tcp: 2 ranks on several hosts")
    assert lines[3].startswith("  torchrun, 2 hosts of 2  hierarchical: 4 ranks on several hosts")


def test_text_of_several_hosts_needs_no_package(bare_run: dict[str, Any]) -> None:
    assert taken(text(bare_run, 200))[2].startswith("  torchrun, 2 hosts of 1  tcp: ")
    assert bare_run["transports"]["hierarchical"]["works"] is True


def test_text_has_no_line_twice(bare_run: dict[str, Any]) -> None:
    shown = text(bare_run, 100)
    lines = [line for line in shown.splitlines() if line and not line.isspace()]
    # The choices of two launches may be the same.
    lines = [line for line in lines if line not in taken(shown)]
    # Two transports may need the same package.
    lines = [line for line in lines if not line.strip().startswith("> pip install")]
    assert sorted(set(lines)) == sorted(lines)


def test_text_names_single_transport_once(bare_run: dict[str, Any]) -> None:
    choices = [
        {**choice, "backend": "mpi", "reason": "of a test"} for choice in bare_run["choices"]
    ]
    lines = taken(text({**bare_run, "choices": choices}))
    assert lines == ["  always  mpi, which does not work here: of a test"]


def test_report_has_trials_of_working_transports(healthy_run: dict[str, Any]) -> None:
    compiled, report = fakes.compiler() is not None, healthy_run
    tried = {n: t["trial"] for n, t in report["transports"].items() if "trial" in t}
    assert {"shm", "threads"} <= set(tried)
    assert "nccl" in tried or not compiled
    for trial in tried.values():
        assert trial["passed"], trial["error"]
        assert 0 < trial["latency_s"] < 60
        assert trial["bandwidth"] > 0
    for name, transport in report["transports"].items():
        if name != "nccl" or len(report["gpus"]["devices"]) > 1:
            assert bool(transport["works"]) == ("trial" in transport)
    assert re.search(r"shm +works; two ranks all-reduce 8 B in", text(report))


@needs("openmpi")  # Open MPI counts cores, refuses root and leaves files.
def test_trial_of_mpi_leaves_no_files(doctor: Doctor) -> None:
    python = Path(launch_of("openmpi").python)
    question = f"trial mpi {python.with_name('mpiexec')}"
    script = (
        "import json, sys; from collective.tools.doctor.probe import ask; "
        "print(json.dumps(ask(sys.argv[1:], 80.0)))"
    )
    done = run_alone(str(python), script, question, TMPDIR=str(doctor.launches.temporary))
    facts, error, late, timed_out = json.loads(done.stdout)[question]
    assert (error, late, timed_out) == ("", False, False)
    assert facts["bandwidth"] > 0
    assert list(doctor.launches.temporary.iterdir()) == [], "files were left behind"


def test_doctor_under_launcher_reports_on_first_rank_of_host(doctor: Doctor) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    silent = doctor.run(**torchrun)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")
    report = doctor.report(**{**torchrun, "RANK": "0", "LOCAL_RANK": "0"})
    assert report["settings"]["launcher"]["launcher"] == "torchrun"
    assert report["settings"]["launcher"]["size"] == 2
    assert report["choices"][0]["backend"] == "shm"


# -- in a broken environment ----------------------------------------------------------------------


def test_report_without_packages_contains_remedies(bare_run: dict[str, Any]) -> None:
    report = bare_run
    assert not set(report["packages"]) & {"torch", "mpi4py", "cupy", "chainer"}
    gloo, mpi = report["transports"]["gloo"], report["transports"]["mpi"]
    assert (gloo["works"], gloo["reason"]) == (False, "torch is not installed")
    assert gloo["fix"] == hint("torch")
    assert (mpi["works"], mpi["reason"]) == (False, "mpi4py is not installed")
    assert mpi["fix"] == hint("mpi")
    assert report["mpi"]["error"] == "mpi4py is not installed"
    assert f"> {hint('torch')}" in text(report)
    assert report["transports"]["shm"]["works"] is True


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("torch", "libtorch_cpu"),
        ("mpi4py", "exited with 3"),
        ("cupy", "SIGABRT: noise that is no JSON more"),
        ("chainer", "importing chainer: no answer within 8 s"),
    ],
)
def test_report_shows_broken_library_and_working_transports(
    sick_run: dict[str, Any], package: str, words: str
) -> None:
    assert words in joined(sick_run)
    assert sick_run["packages"][package]["late"] is (package == "chainer")
    assert sick_run["transports"]["shm"]["works"] is True


def test_transport_of_broken_library_has_reinstall_remedy(sick_run: dict[str, Any]) -> None:
    gloo = sick_run["transports"]["gloo"]
    assert (gloo["works"], gloo["reason"]) == (False, "torch is installed but cannot be imported")
    assert gloo["fix"] == "pip install --force-reinstall torch"


def test_library_that_hangs_has_no_reinstall_remedy(sick_run: dict[str, Any]) -> None:
    (problem,) = (
        entry for entry in sick_run["problems"] if "importing chainer" in entry["problem"]
    )
    assert "force-reinstall" not in problem["remedy"]  # The cause of the hang is unknown.


def test_exit_code_is_1_if_requested_backend_does_not_work(doctor: Doctor) -> None:
    doctor.package("torch", "import sys; sys.exit('I leave')")
    report = doctor.report(code=1, COLLECTIVE_BACKEND="gloo")
    assert "SystemExit: I leave" in joined(report)
    assert report["choices"][0]["backend"] == "gloo"
    assert "a program started here and now takes gloo, which does not work" in joined(report)
    assert "takes gloo, which does not work" in text(report).splitlines()[1]


def test_report_shows_unknown_transport(doctor: Doctor) -> None:
    report = doctor.report(code=1, COLLECTIVE_BACKEND="shmm")
    assert "Did you mean 'shm'?" in report["transports"]["shmm"]["reason"]
    assert "takes shmm, which does not work" in joined(report)
    assert report["transports"]["shm"]["works"] is True


def test_doctor_runs_no_module_of_working_directory(doctor: Doctor) -> None:
    for name in ("json", "numpy", "torch"):
        (doctor.launches.directory / f"{name}.py").write_text("open('ran', 'w')")
    # With -P, as for the installed command, Python does not import from the working directory.
    done = doctor.run(options=["-P"])
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  shm +works$", done.stdout, re.MULTILINE)
    assert not (doctor.launches.directory / "ran").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("COLLECTIVE_BAKEND", "shm", "the nearest is COLLECTIVE_BACKEND"),
        ("COLLECTIVE_TIMEOUT", "soon", "it must be a number of seconds > 0"),
        ("RANK", "0", "launcher torchrun: WORLD_SIZE is not set"),
    ],
)
def test_report_has_problem_for_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    # The answers of libraries do not depend on the setting, so all questions get an empty answer.
    monkeypatch.setattr(
        tools_doctor, "ask", lambda questions, *_: {q: Answer({}) for q in questions}
    )
    monkeypatch.setenv(variable, value)
    report = tools_doctor.examine()
    assert words in report["settings"]["error"]
    assert words in joined(report)
    assert report["choices"] == []
    assert report["exit_code"] == 1
    shown = text(report)
    assert shown.splitlines()[1] == "A setting is wrong."
    assert words in re.sub(r"\s+", " ", shown)


def test_report_shows_wrong_interface(sick_run: dict[str, Any]) -> None:
    assert "'nope0'" in joined(sick_run)
    assert "lo (127.0.0.1" in joined(sick_run)


def test_report_lists_and_tries_third_party_transports(doctor: Doctor) -> None:
    doctor.transport("rightly", "")
    doctor.transport(
        "wrongly",
        """
        def broadcast(self, request, src, dst, timeout):
            request.root = (request.root + 1) % self.size
            super().broadcast(request, src, dst, timeout)
        """,
    )
    doctor.transport("absent", "import a_library_that_nobody_has")
    doctor.transport(
        "refusing",
        """
        @classmethod
        def connect(cls, world, timeout):
            raise RuntimeError("the device is on fire")
        """,
    )
    report = doctor.report("--test", code=1)
    transports = report["transports"]
    assert transports["rightly"]["trial"]["passed"] is True
    assert "broadcast: wrong result" in transports["wrongly"]["trial"]["error"]
    assert "wrongly: two ranks failed" in joined(report)
    assert "pip install of-absent" in transports["absent"]["reason"]
    assert transports["refusing"]["reason"] == "RuntimeError: the device is on fire"
    assert re.search(r"wrongly +FAILS with two ranks", text(report))


def test_report_without_temporary_directory_names_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    memory = doctor_host.shared_memory()
    assert memory["directory"] == ""
    assert "No usable temporary directory" in memory["directory_error"]
    assert "Set TMPDIR" in memory["directory_error"]
    answer = doctor_probe.ask(["connect shm"], 5.0)["connect shm"]
    assert "No usable temporary directory" in answer.error


def test_import_of_chainer_works_through_its_adapter() -> None:
    # Without the adapter the last release of Chainer cannot be imported beside today's NumPy, and a
    # new installation does not help.
    if importlib.util.find_spec("chainer") is None:
        pytest.skip("no Chainer")
    answer = doctor_probe.ask(["import chainer"], DEADLINE_S)["import chainer"]
    assert answer.error == ""
    assert answer.facts["through"] == "collective.adapters.chainer"


def test_import_of_torch_names_the_class_that_makes_groups() -> None:
    torch = pytest.importorskip("torch")
    answer = doctor_probe.ask(["import torch"], DEADLINE_S)["import torch"]
    kind = "ProcessGroup" if torch.__version__ < (2, 14) else "Backend"
    assert answer.facts["through"] == f"torch.distributed.{kind}", answer


def test_torch_without_distributed_has_neither_backend_nor_class_of_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from collective.adapters.torch import autoload

    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert doctor_probe._import("torch")["through"] == ""
    with pytest.raises(ImportError, match="this build of torch does not have it"):
        autoload.register()
    autoload.autoload()  # `import torch` must not fail


def test_versions_name_the_adapter_of_a_package() -> None:
    package = {"version": "7.8.1", "error": "", "late": False, "through": "an adapter"}
    about = {"python": "3.11", "executable": "/python", "numpy": "2.4"}
    rows = dict(command._versions({"collective": about, "packages": {"chainer": package}}))
    assert rows["chainer"] == "7.8.1; works through an adapter"


def test_broken_chainer_remedy_pins_setuptools() -> None:
    packages = {"chainer": {"distribution": "chainer", "error": "broken", "late": False}}
    (problem,) = problems(healthy(packages=packages))
    assert "setuptools<80" in problem["remedy"]
    assert problem["remedy"].endswith("--force-reinstall chainer")


# -- names ------------------------------------------------------------------------------------


def names(monkeypatch: pytest.MonkeyPatch, host: str) -> dict[str, Any]:
    monkeypatch.setattr(doctor_host.socket, "gethostname", lambda: host)
    return doctor_host.network("")


def test_host_name_that_does_not_resolve_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(doctor_host.socket, "getaddrinfo", fail)
    network = names(monkeypatch, "nowhere")
    assert (network["name"], network["addresses"], network["loopback"]) == ("nowhere", [], False)
    assert "Name or service not known" in network["error"]
    assert "'nowhere', does not resolve" in of_names(network)


def test_name_service_without_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def answer_late(*_: Any, **__: Any) -> Any:
        over.wait()
        raise OSError

    monkeypatch.setattr(doctor_host, "_RESOLVE_S", 0.2)
    monkeypatch.setattr(doctor_host.socket, "getaddrinfo", answer_late)
    try:
        network = names(monkeypatch, "slow")
        assert "did not answer within 0.2 s" in network["error"]
        assert any(interface["loopback"] for interface in network["interfaces"])
    finally:
        over.set()


def test_host_name_that_resolves_to_loopback_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    network = names(monkeypatch, "localhost")
    assert network["loopback"] is True
    assert "'localhost', resolves to " in of_names(network)


def of_names(network: dict[str, Any]) -> str:
    return joined({"problems": list(problems(healthy(network=network)))})


def healthy(**changes: Any) -> dict[str, Any]:
    """Return the parts of a report that problems() reads, without any problem in them."""
    network = {"name": "n1", "addresses": ["10.0.0.1"], "error": "", "loopback": False}
    base: dict[str, Any] = {
        "settings": {"error": "", "launcher": None, "refused": {}},
        "choices": [{"when": "here and now", "backend": "shm", "reason": "as it is"}],
        "transports": {"shm": {"works": True}},
        "packages": {},
        "mpi": {"library": {}, "error": "", "mpiexec": []},
        "network": {**network, "address": "10.0.0.1", "address_error": ""},
        "across_hosts": {"error": ""},
        "shared_memory": {"directory_error": ""},
        "processors": {"busy": ""},
        "gpus": {"devices": []},
        "nccl": {"error": "", "install": ""},
    }
    return {**base, **changes}


def with_torch(version: str) -> list[dict[str, Any]]:
    package = {"distribution": "torch", "version": version, "error": "", "late": False}
    return list(problems(healthy(packages={"torch": package})))


@pytest.mark.parametrize("version", ["2.5.0", "2.13.0+cpu", "2.15.3", ""])
def test_tested_torch_version_is_no_problem(version: str) -> None:
    assert with_torch(version) == []


@pytest.mark.parametrize("version", ["1.13.1", "2.4.1+cu121", "2.16.0.dev20261101", "3.0.0"])
def test_untested_torch_version_is_a_problem_but_not_fatal(version: str) -> None:
    (problem,) = with_torch(version)
    assert version in problem["problem"]
    assert not problem["fatal"]


def test_torch_extra_requires_tested_versions() -> None:
    (problem,) = with_torch("2.99.0")
    wanted = problem["remedy"].removeprefix("pip install ").strip("'")
    assert f'torch = ["{wanted}",' in (ROOT / "pyproject.toml").read_text()


def test_problems_of_healthy_report_are_empty() -> None:
    assert list(problems(healthy())) == []


def test_unusable_secret_is_a_fatal_problem() -> None:
    (problem,) = problems(healthy(across_hosts={"error": "secret: no such file"}))
    assert problem == {"problem": "secret: no such file", "remedy": "", "fatal": True}


# -- MPI ----------------------------------------------------------------------------------------

SAYS = {
    "mpich": ("HYDRA build details:\n    Version:       4.3.0\n", "MPICH", "4.3.0"),
    "openmpi": ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://…\n", "Open MPI", "5.0.11"),
    "impi": ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 B 2", "Intel MPI", "2021.18.1"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder on PATH that could have an mpiexec."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    return tmp_path


def put(folder: Path, words: str) -> str:
    folder.mkdir(exist_ok=True, parents=True)
    program = folder / "mpiexec"
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{words}\nEOF\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("which", SAYS)
def test_starters_recognise_mpiexec_by_its_version_text(folder: Path, which: str) -> None:
    words, vendor, version = SAYS[which]
    path = put(folder, words)
    starter = {"path": path, "on_path": True, "vendor": vendor, "version": version, "error": ""}
    assert doctor_mpi.starters("") == [starter]


def test_starters_show_text_of_unknown_mpiexec(folder: Path) -> None:
    put(folder, "I start pots, not processes")
    (starter,) = doctor_mpi.starters("")
    assert starter["vendor"] == ""
    assert "I start pots" in starter["error"]


def test_starters_include_mpiexec_beside_the_library(folder: Path) -> None:
    put(folder, SAYS["mpich"][0])
    own = put(folder / "openmpi" / "bin", SAYS["openmpi"][0])
    starters = doctor_mpi.starters(str(folder / "openmpi" / "lib" / "libmpi.so.40"))
    assert [(starter["vendor"], starter["on_path"]) for starter in starters] == [
        ("MPICH", True), ("Open MPI", False),
    ]  # fmt: skip
    best = doctor_mpi.starter_for("Open MPI", starters)
    assert best is not None
    assert best["path"] == own
    mpi = {"library": {"vendor": "Open MPI"}, "error": "", "mpiexec": starters}
    words = joined({"problems": list(problems(healthy(mpi=mpi)))})
    assert f"{folder / 'mpiexec'}, is of MPICH, and mpi4py has Open MPI" in words
    assert f"start them with {own}" in words


def test_mates_are_only_mpich_and_intel_mpi() -> None:
    assert doctor_mpi.mates("MPICH", "Intel MPI")
    assert doctor_mpi.mates("Intel MPI", "MPICH")
    assert not doctor_mpi.mates("MPICH", "Open MPI")
    assert not doctor_mpi.mates("Open MPI", "Intel MPI")


def test_refused_settings_file_is_a_problem() -> None:
    refused = {"/tmp/collective.toml": "/tmp/collective.toml belongs to uid 7"}
    (problem,) = problems(healthy(settings={"error": "", "launcher": None, "refused": refused}))
    assert "/tmp/collective.toml is not read" in problem["problem"]
    assert "uid 7" in problem["problem"]
    assert not problem["fatal"]


def test_launcher_of_another_vendor_is_a_problem() -> None:
    mpi = {"library": {"vendor": "Open MPI"}, "error": "", "mpiexec": []}
    settings = {"error": "", "launcher": {"launcher": "mpich"}, "refused": {}}
    report = healthy(mpi=mpi, settings=settings)
    problem = next(problems(report))
    assert "started by mpiexec of MPICH, and mpi4py has Open MPI" in problem["problem"]
    assert not problem["fatal"]  # Ranks that use shared memory still work.
    report["choices"][0]["backend"] = "mpi"
    report["transports"]["mpi"] = {"works": True}
    assert next(problems(report))["fatal"]


def test_environment_of_probes_lacks_variables_of_launchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = (
        "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR TORCHELASTIC_RUN_ID PMI_RANK PMI_FD PMIX_NAMESPACE "
        "OMPI_COMM_WORLD_SIZE MPI_LOCALRANKID HYDI_CONTROL_FD SLURM_PROCID COLLECTIVE_RANK "
        "COLLECTIVE_BACKEND COLLECTIVE_STORE"
    ).split()
    kept = "I_MPI_FABRICS OMPI_MCA_btl PMIX_MCA_gds FI_PROVIDER COLLECTIVE_INTERFACE PATH".split()
    for name in gone + kept:
        monkeypatch.setenv(name, "x")
    left = doctor_probe.environment(MORE="y")
    assert [name for name in gone if name in left] == []
    assert [name for name in kept if name not in left] == []
    assert left["MORE"] == "y"


# -- GPUs ----------------------------------------------------------------------------------------

DRIVER = r"""
#include <stddef.h>
#include <string.h>
int cuDriverGetVersion(int *v) { *v = 13010; return 0; }
static int up;
int cuInit(unsigned flags) { up = flags == 0; return CODE; }
int cuDeviceGetCount(int *n) { *n = 2; return up ? 0 : 3; }
int cuDeviceGet(int *d, int i) { *d = 100 + i; return 0; }
int cuDeviceGetName(char *s, int n, int d)
{ strncpy(s, d == 100 ? "GPU A" : "GPU B", n); return 0; }
int cuDeviceTotalMem_v2(size_t *b, int d) { *b = (size_t)(d - 99) << 34; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d)
{ *v = a == 75 ? 9 : a == 76 ? d - 100 : -1; return 0; }
int cuGetErrorString(int code, const char **s) { *s = "no device of that kind"; return 0; }
"""


def driver(doctor: Doctor, code: int) -> Path:
    """Build a fake driver with two GPUs whose cuInit returns ``code``; return its folder."""
    source = doctor.launches.directory / "cuda.c"
    source.write_text(DRIVER)
    library = source.with_name("libcuda.so.1")
    command = ["cc", "-shared", "-fPIC", f"-DCODE={code}", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library.parent


@needs_compiler
def test_report_lists_gpus(sick_run: dict[str, Any]) -> None:
    gpus = sick_run["gpus"]
    assert (gpus["cuda"], gpus["reason"]) == ("13.1", "")
    assert gpus["devices"] == [
        {"name": "GPU A", "memory_bytes": 1 << 34, "compute": "9.0"},
        {"name": "GPU B", "memory_bytes": 2 << 34, "compute": "9.1"},
    ]
    assert "1 × GPU A, 16 GiB" in text(sick_run)


@needs_compiler
def test_report_gives_reason_of_driver_without_gpus(doctor: Doctor) -> None:
    gpus = doctor.report(LD_LIBRARY_PATH=str(driver(doctor, 100)))["gpus"]
    assert gpus["devices"] == []
    assert "no device of that kind (CUresult 100)" in gpus["reason"]


# -- NCCL ---------------------------------------------------------------------------------------


@needs_fakes
def test_report_describes_working_nccl(healthy_run: dict[str, Any]) -> None:
    report = healthy_run
    transport, nccl = report["transports"]["nccl"], report["nccl"]
    assert (transport["works"], transport["reason"]) == (True, "")
    assert "cuda" in transport["devices"]
    assert len(report["gpus"]["devices"]) == 4
    assert (nccl["version"], nccl["path"]) == ("2.19.4", fakes.library_path(21904))
    lacking = {name for name, there in nccl["features"].items() if not there}
    assert lacking == {"fp8", "windows"}
    shown = text(report)
    assert re.search(r"^  nccl +works; two ranks", shown, re.MULTILINE)
    assert re.search(r"^  lacks +fp8, windows$", shown, re.MULTILINE)


@needs_fakes
def test_report_contains_error_of_failing_nccl(doctor: Doctor) -> None:
    report = doctor.report(**fakes.environment(delay_us=0, init_error=2))
    transport = report["transports"]["nccl"]
    assert transport["works"] is False
    assert "ncclCommInitRankConfig of rank 0: unhandled system error" in transport["reason"]
    assert "NCCL is installed but does not work" in joined(report)


def test_missing_gpu_for_nccl_is_no_problem(bare_run: dict[str, Any]) -> None:
    report = bare_run
    transport = report["transports"]["nccl"]
    assert (transport["works"], transport["fix"]) == (False, "")
    assert transport["reason"] == "no NVIDIA driver: /no/such/libcuda.so.1 cannot be loaded"
    assert "NCCL" not in joined(report)


@needs_compiler
def test_missing_nccl_for_gpus_has_install_command(sick_run: dict[str, Any]) -> None:
    report = sick_run
    transport = report["transports"]["nccl"]
    assert (transport["works"], transport["reason"]) == (False, "no NCCL library can be loaded")
    assert transport["fix"] == "pip install nvidia-nccl-cu13"
    assert "2 GPUs are here, but no NCCL" in joined(report)
    assert "pip install nvidia-nccl-cu13" in joined(report)


# -- memory and cores ---------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that replaces /proc and /sys/fs/cgroup: 64 GiB, no control groups."""
    monkeypatch.setattr(doctor_host.Files, "proc", tmp_path / "proc")
    monkeypatch.setattr(doctor_host.Files, "cgroup", tmp_path / "cgroup")
    write(tmp_path, "proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    return tmp_path


def write(top: Path, path: str, words: str) -> None:
    (top / path).parent.mkdir(parents=True, exist_ok=True)
    (top / path).write_text(words)


GROUPS: dict[str, dict[str, str]] = {
    "none": {},
    "version 2": {
        "proc/self/cgroup": "0::/user/job",
        "cgroup/user/job/memory.max": "max",
        "cgroup/user/job/cpu.max": "max 100000",
        "cgroup/user/memory.max": f"{8 << 30}",
        "cgroup/user/memory.current": f"{3 << 30}",
        "cgroup/user/cpu.max": "150000 100000",
    },
    # The path is the host's, but only the container's own part is mounted, at the top.
    "version 1 inside a container": {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/1\n3:cpu,cpuacct:/d",
        "cgroup/memory/memory.limit_in_bytes": f"{4 << 30}",
        "cgroup/memory/memory.usage_in_bytes": f"{1 << 30}",
        "cgroup/cpu/cpu.cfs_quota_us": "50000",
        "cgroup/cpu/cpu.cfs_period_us": "100000",
    },
    "version 1 without limits": {
        "proc/self/cgroup": "4:memory:/\n3:cpu:/",
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "cgroup/cpu/cpu.cfs_quota_us": "-1",
        "cgroup/cpu/cpu.cfs_period_us": "100000",
    },
}


@pytest.mark.parametrize(
    ("groups", "limit", "left", "quota"),
    [
        ("none", None, None, None),
        ("version 2", 8 << 30, 5 << 30, 1.5),
        ("version 1 inside a container", 4 << 30, 3 << 30, 0.5),
        ("version 1 without limits", None, None, None),
    ],
)
def test_report_reads_limits_of_control_groups(
    system: Path, groups: str, limit: int | None, left: int | None, quota: float | None
) -> None:
    for path, words in GROUPS[groups].items():
        write(system, path, f"{words}\n")
    memory = doctor_host.shared_memory()
    assert (memory["memory"], memory["available"]) == (64 << 30, 32 << 30)
    assert (memory["limit"], memory["left"]) == (limit, left)
    assert doctor_host.processors()["quota"] == quota


# Two sockets, each with a node of two cores of two threads, of which this process may use one node.
NODES = [
    {"node": 0, "processors": "0-1,4-5", "usable": ""},
    {"node": 1, "processors": "2-3,6-7", "usable": "2-3,6-7"},
]


def of_two_sockets(top: Path) -> None:
    """Write the kernel's files about the processors."""
    write(top, "cpu/online", "0-7\n")
    for number in range(8):
        folder = f"cpu/cpu{number}/topology"
        write(top, f"{folder}/thread_siblings_list", f"{number % 4},{number % 4 + 4}\n")
        write(top, f"{folder}/physical_package_id", f"{number % 4 // 2}\n")
    for node in NODES:
        write(top, f"node/node{node['node']}/cpulist", f"{node['processors']}\n")


def test_report_shows_sockets_nodes_and_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_two_sockets(tmp_path)
    monkeypatch.setattr(topology, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 6, 7})
    found = doctor_host.processors()
    assert [found[key] for key in ("usable", "sockets", "cores", "threads")] == [4, 2, 4, 2]
    assert found["nodes"] == NODES
    assert list(command._topology(found)) == [
        "2 sockets, 2 NUMA nodes, 4 cores, 2 threads each",
        "node 1: 2-3,6-7 of 2-3,6-7 may be used",
    ]


def test_report_without_files_of_the_system_says_that_topology_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "SYSTEM", tmp_path / "absent")
    found = doctor_host.processors()
    assert (found["sockets"], found["cores"], found["threads"]) == (None, None, None)
    assert list(command._topology(found)) == ["not known: this system does not show it"]


# -- on a busy machine --------------------------------------------------------------------------


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let other processes take all cores; return the text about it."""
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(doctor_host.Load, "others", lambda _: float(cores))
    return f"the machine is busy: other processes take {cores:.1f} of {cores} cores"


def examined(monkeypatch: pytest.MonkeyPatch, late: Answer) -> dict[str, Any]:
    """Return the report if shm and PyTorch give the answer ``late``, and all others work."""

    def ask(questions: Sequence[str], *_: object) -> dict[str, Answer]:
        slow = ("connect shm", "import torch")
        return {question: late if question in slow else Answer({}) for question in questions}

    package = {"distribution": "torch", "version": "2.13.0"}
    monkeypatch.setattr(tools_doctor, "ask", ask)
    monkeypatch.setattr(tools_doctor, "_packages", lambda: {"torch": dict(package)})
    monkeypatch.setenv("COLLECTIVE_BACKEND", "shm")
    return tools_doctor.examine()


LATE = Answer({}, "no answer within 8 s", late=True)
TIMED_OUT = Answer({}, "connect: rank 0 did not arrive within 6 s", timed_out=True)


@pytest.mark.parametrize("answer", [LATE, TIMED_OUT], ids=["late", "timed out"])
def test_late_answer_on_busy_machine_blames_no_library(
    monkeypatch: pytest.MonkeyPatch, busy: str, answer: Answer
) -> None:
    report = examined(monkeypatch, answer)
    shm = report["transports"]["shm"]
    assert (shm["works"], report["exit_code"]) == (None, 0)
    assert shm["reason"] == f"{answer.error}; {busy}"
    assert f"{busy}. Times are too long" in joined(report)


def test_timeout_on_idle_machine_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host.Load, "others", lambda _: 0.0)
    report = examined(monkeypatch, TIMED_OUT)
    assert (report["transports"]["shm"]["works"], report["exit_code"]) == (False, 1)
    assert "busy" not in joined(report)


@pytest.mark.parametrize("answer", [LATE, TIMED_OUT], ids=["late", "timed out"])
def test_trial_that_times_out_on_busy_machine_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, busy: str, answer: Answer
) -> None:
    monkeypatch.setattr(tools_doctor, "ask", lambda questions, _: dict.fromkeys(questions, answer))
    trial = tools_doctor._trial("shm", {})
    assert (trial["passed"], trial["error"]) == (None, f"{answer.error}; {busy}")
    (problem,) = problems(healthy(transports={"shm": {"works": True, "trial": trial}}))
    assert problem["problem"].startswith("shm: the trial of two ranks tells nothing: ")
    assert not problem["fatal"]
    assert command._transport({"works": True, "trial": trial}).startswith("works; with two ranks")


def test_wrong_result_on_busy_machine_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    wrong = Answer({}, "all_reduce: wrong result")
    monkeypatch.setattr(tools_doctor, "ask", lambda questions, _: dict.fromkeys(questions, wrong))
    assert tools_doctor._trial("shm", {}) == {"passed": False, "error": wrong.error}


def test_load_is_unknown_where_the_system_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collective.platform.PROC", Path("/nowhere"))
    load = doctor_host.Load()
    assert (load.others(), load.busy()) == (None, "")


def test_run_directory_writable_by_all_is_a_problem(doctor: Doctor) -> None:
    foreign = doctor.launches.temporary / f"collective-{os.geteuid()}"
    foreign.mkdir()
    foreign.chmod(0o777)
    try:
        done = doctor.start("--json")
    finally:
        foreign.rmdir()
    assert "mode 0777; it must be a directory of uid" in joined(json.loads(done.stdout))
