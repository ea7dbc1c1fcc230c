"""What `collective doctor` tells in healthy and in sick environments, and that it always does."""

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

__all__ = ["launches"]  # a fixture

# The doctor itself gives libraries eight seconds; a busy machine may take some more.
DEADLINE_S = 90.0


class Doctor:
    """Runs the command among packages of the test's own making.

    They and NumPy are all there is, unless a test asks for what is installed here: to import that
    takes longer than all the rest.
    """

    def __init__(self, launches: Launches) -> None:
        self.launches = launches
        self.packages = launches.directory / "packages"
        self.packages.mkdir()
        found = Path(np.__file__).parent
        for folder in (found, found.with_name("numpy.libs")):
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
        """Install a third party's transport, the class Transport of module ``name``.

        Args:
            body: what it has otherwise than that of threads.
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


# A run starts a dozen processes: what goes wrong in one library says nothing of another, so tests
# that look at one each share a run.


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What is told where all that is installed works, and GPUs with NCCL 2.19 are there."""
    with launched(tmp_path_factory.mktemp("healthy")) as launches:
        gpus = {} if fakes.compiler() is None else fakes.environment(21904, delay_us=0)
        yield Doctor(launches).report("--test", installed=True, **gpus)


@pytest.fixture(scope="module")
def bare_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What is told where no other package is installed, and no driver of a GPU."""
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
    """What is told where every library is broken, GPUs have no NCCL, and the interface is none."""
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


def test_it_tells_what_a_program_takes_and_what_works(healthy_run: dict[str, Any]) -> None:
    report = healthy_run
    assert list(report["transports"]) == registry.names()
    for name in ("shm", "threads"):
        assert report["transports"][name]["works"] is True
    assert report["choices"][0]["backend"] == "threads"
    chosen = {choice["when"]: choice["backend"] for choice in report["choices"]}
    assert chosen["collective run"] == "shm"
    assert chosen["torchrun, 2 hosts of 1"] == "gloo"
    assert all(choice["reason"] for choice in report["choices"])
    assert list(report["settings"]["values"]) == list(KEYS)
    assert report["collective"]["numpy"] == np.__version__
    assert report["processors"]["usable"] >= 1
    assert report["shared_memory"]["memory"] > 2**20


def test_the_text_fits_the_screen_and_begins_with_what_matters(
    healthy_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = text(healthy_run)
    lines = shown.splitlines()
    assert "ranks take shm on one host and hierarchical on several" in lines[0]
    assert lines[2] == "Transports"
    assert re.search(r"^  shm +works;", shown, re.MULTILINE)
    for title in ("Host", "MPI", "Network", "Across hosts", "Versions", "Settings"):
        assert title in lines
    data = "over gloo: not authenticated, not encrypted"
    assert re.search(rf"^  data +{data}$", shown, re.MULTILINE)
    # What cannot be broken, such as a path, may be longer.
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 2] == []
    assert [line for line in lines if line != line.rstrip()] == []


def test_two_ranks_try_what_works(healthy_run: dict[str, Any]) -> None:
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


@needs("openmpi")  # which counts cores, refuses root and leaves files
def test_two_ranks_try_mpi(doctor: Doctor) -> None:
    python = Path(launch_of("openmpi").python)
    question = f"trial mpi {python.with_name('mpiexec')}"
    script = (
        "import json, sys; from collective.tools.doctor.probe import ask; "
        "print(json.dumps(ask(sys.argv[1:], 80.0)))"
    )
    done = run_alone(str(python), script, question, TMPDIR=str(doctor.launches.temporary))
    facts, error, late = json.loads(done.stdout)[question]
    assert (error, late) == ("", False)
    assert facts["bandwidth"] > 0
    assert list(doctor.launches.temporary.iterdir()) == [], "files were left behind"


def test_under_a_launcher_the_first_rank_of_a_host_reports(doctor: Doctor) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    silent = doctor.run(**torchrun)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")
    report = doctor.report(**{**torchrun, "RANK": "0", "LOCAL_RANK": "0"})
    assert report["settings"]["launcher"]["launcher"] == "torchrun"
    assert report["settings"]["launcher"]["size"] == 2
    assert report["choices"][0]["backend"] == "shm"


# -- in a sick one --------------------------------------------------------------------------------


def test_without_any_package_the_remedies_are_there(bare_run: dict[str, Any]) -> None:
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
def test_a_broken_library_is_shown_and_the_rest_still_works(
    sick_run: dict[str, Any], package: str, words: str
) -> None:
    assert words in joined(sick_run)
    assert sick_run["packages"][package]["late"] is (package == "chainer")
    assert sick_run["transports"]["shm"]["works"] is True


def test_what_stands_on_a_broken_library_carries_the_remedy(sick_run: dict[str, Any]) -> None:
    gloo = sick_run["transports"]["gloo"]
    assert (gloo["works"], gloo["reason"]) == (False, "torch is installed but cannot be imported")
    assert gloo["fix"] == "pip install --force-reinstall torch"


def test_a_library_that_hangs_is_not_to_be_installed_again(sick_run: dict[str, Any]) -> None:
    (found,) = (each for each in sick_run["problems"] if "importing chainer" in each["problem"])
    assert "force-reinstall" not in found["remedy"]  # nobody knows what it waits for


def test_the_exit_code_is_1_if_what_is_asked_for_does_not_work(doctor: Doctor) -> None:
    doctor.package("torch", "import sys; sys.exit('I leave')")
    report = doctor.report(code=1, COLLECTIVE_BACKEND="gloo")
    assert "SystemExit: I leave" in joined(report)
    assert report["choices"][0]["backend"] == "gloo"
    assert "a program started here and now takes gloo, which does not work" in joined(report)
    assert "takes gloo, which does not work" in text(report).splitlines()[0]


def test_an_unknown_transport_is_shown(doctor: Doctor) -> None:
    report = doctor.report(code=1, COLLECTIVE_BACKEND="shmm")
    assert "Did you mean 'shm'?" in report["transports"]["shmm"]["reason"]
    assert "takes shmm, which does not work" in joined(report)
    assert report["transports"]["shm"]["works"] is True


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_nothing_is_run_that_lies_in_the_working_directory(doctor: Doctor) -> None:
    for name in ("json", "numpy", "torch"):
        (doctor.launches.directory / f"{name}.py").write_text("open('ran', 'w')")
    # As the installed command, whose working directory is not where it imports from.
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
def test_every_wrong_setting_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    # What is asked of libraries is the same with any of them.
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
    assert shown.splitlines()[0].endswith("a setting is wrong")
    assert words in re.sub(r"\s+", " ", shown)


def test_a_wrong_interface_is_shown(sick_run: dict[str, Any]) -> None:
    assert "'nope0'" in joined(sick_run)
    assert "lo (127.0.0.1" in joined(sick_run)


def test_a_third_partys_transport_is_listed_and_tried(doctor: Doctor) -> None:
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
    found = report["transports"]
    assert found["rightly"]["trial"]["passed"] is True
    assert "broadcast: wrong result" in found["wrongly"]["trial"]["error"]
    assert "wrongly: two ranks failed" in joined(report)
    assert "pip install of-absent" in found["absent"]["reason"]
    assert found["refusing"]["reason"] == "RuntimeError: the device is on fire"
    assert re.search(r"wrongly +FAILS with two ranks", text(report))


def test_without_a_temporary_directory_that_is_what_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    found = doctor_host.shared_memory()
    assert found["directory"] == ""
    assert "No usable temporary directory" in found["directory_error"]
    assert "Set TMPDIR" in found["directory_error"]
    answer = doctor_probe.ask(["connect shm"], 5.0)["connect shm"]
    assert "No usable temporary directory" in answer.error


def test_chainer_works_through_its_adapter() -> None:
    # By itself its last release cannot be imported beside today's NumPy, and installing it again
    # does not mend that.
    if importlib.util.find_spec("chainer") is None:
        pytest.skip("no Chainer")
    answer = doctor_probe.ask(["import chainer"], DEADLINE_S)["import chainer"]
    assert answer.error == ""
    assert answer.facts["through"] == "collective.adapters.chainer"


def test_through_what_a_package_works_is_told() -> None:
    found = {"version": "7.8.1", "error": "", "late": False, "through": "an adapter"}
    about = {"python": "3.11", "executable": "/python", "numpy": "2.4"}
    rows = dict(command._versions({"collective": about, "packages": {"chainer": found}}))
    assert rows["chainer"] == "7.8.1; works through an adapter"


def test_a_broken_chainer_is_installed_again_with_the_setuptools_that_it_needs() -> None:
    packages = {"chainer": {"distribution": "chainer", "error": "broken", "late": False}}
    (found,) = problems(healthy(packages=packages))
    assert "setuptools<80" in found["remedy"]
    assert found["remedy"].endswith("--force-reinstall chainer")


# -- names ------------------------------------------------------------------------------------


def names(monkeypatch: pytest.MonkeyPatch, host: str) -> dict[str, Any]:
    monkeypatch.setattr(doctor_host.socket, "gethostname", lambda: host)
    return doctor_host.network("")


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(doctor_host.socket, "getaddrinfo", fail)
    found = names(monkeypatch, "nowhere")
    assert (found["name"], found["addresses"], found["loopback"]) == ("nowhere", [], False)
    assert "Name or service not known" in found["error"]
    assert "'nowhere', does not resolve" in of_names(found)


def test_a_name_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def answer_late(*_: Any, **__: Any) -> Any:
        over.wait()
        raise OSError

    monkeypatch.setattr(doctor_host, "_RESOLVE_S", 0.2)
    monkeypatch.setattr(doctor_host.socket, "getaddrinfo", answer_late)
    try:
        found = names(monkeypatch, "slow")
        assert "did not answer within 0.2 s" in found["error"]
        assert any(each["loopback"] for each in found["interfaces"])
    finally:
        over.set()


def test_a_host_name_that_means_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = names(monkeypatch, "localhost")
    assert found["loopback"] is True
    assert "'localhost', resolves to " in of_names(found)


def of_names(network: dict[str, Any]) -> str:
    return joined({"problems": list(problems(healthy(network=network)))})


def healthy(**changes: Any) -> dict[str, Any]:
    """Return a report as far as it is looked at for problems, with none in it."""
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
        "gpus": {"devices": []},
        "nccl": {"error": "", "install": ""},
    }
    return {**base, **changes}


def with_torch(version: str) -> list[dict[str, Any]]:
    found = {"distribution": "torch", "version": version, "error": "", "late": False}
    return list(problems(healthy(packages={"torch": found})))


@pytest.mark.parametrize("version", ["2.5.0", "2.13.0+cpu", "2.15.3", ""])
def test_a_torch_that_was_tested_is_no_problem(version: str) -> None:
    assert with_torch(version) == []


@pytest.mark.parametrize("version", ["1.13.1", "2.4.1+cu121", "2.16.0.dev20261101", "3.0.0"])
def test_a_torch_that_was_not_tested_is_told(version: str) -> None:
    (found,) = with_torch(version)
    assert version in found["problem"]
    assert not found["fatal"]


def test_the_extra_takes_what_was_tested() -> None:
    (found,) = with_torch("2.99.0")
    wanted = found["remedy"].removeprefix("pip install ").strip("'")
    assert f'torch = ["{wanted}",' in (ROOT / "pyproject.toml").read_text()


def test_nothing_is_wrong_where_nothing_is() -> None:
    assert list(problems(healthy())) == []


def test_a_secret_that_cannot_be_used_keeps_a_program_from_starting() -> None:
    (found,) = problems(healthy(across_hosts={"error": "secret_file: no such file"}))
    assert found == {"problem": "secret_file: no such file", "remedy": "", "fatal": True}


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
def test_an_mpiexec_is_known_by_what_it_says(folder: Path, which: str) -> None:
    words, vendor, version = SAYS[which]
    path = put(folder, words)
    found = {"path": path, "on_path": True, "vendor": vendor, "version": version, "error": ""}
    assert doctor_mpi.starters("") == [found]


def test_an_mpiexec_that_says_something_else_is_shown_with_it(folder: Path) -> None:
    put(folder, "I start pots, not processes")
    (found,) = doctor_mpi.starters("")
    assert found["vendor"] == ""
    assert "I start pots" in found["error"]


def test_the_mpiexec_beside_the_library_is_found_too(folder: Path) -> None:
    put(folder, SAYS["mpich"][0])
    own = put(folder / "openmpi" / "bin", SAYS["openmpi"][0])
    found = doctor_mpi.starters(str(folder / "openmpi" / "lib" / "libmpi.so.40"))
    assert [(one["vendor"], one["on_path"]) for one in found] == [
        ("MPICH", True), ("Open MPI", False),
    ]  # fmt: skip
    best = doctor_mpi.starter_for("Open MPI", found)
    assert best is not None
    assert best["path"] == own
    mpi = {"library": {"vendor": "Open MPI"}, "error": "", "mpiexec": found}
    words = joined({"problems": list(problems(healthy(mpi=mpi)))})
    assert f"{folder / 'mpiexec'}, is of MPICH, and mpi4py has Open MPI" in words
    assert f"start them with {own}" in words


def test_mpich_and_intel_start_each_others_ranks() -> None:
    assert doctor_mpi.mates("MPICH", "Intel MPI")
    assert doctor_mpi.mates("Intel MPI", "MPICH")
    assert not doctor_mpi.mates("MPICH", "Open MPI")
    assert not doctor_mpi.mates("Open MPI", "Intel MPI")


def test_a_file_of_settings_that_is_not_believed_is_shown() -> None:
    refused = {"/tmp/collective.toml": "/tmp/collective.toml belongs to uid 7"}
    (found,) = problems(healthy(settings={"error": "", "launcher": None, "refused": refused}))
    assert "/tmp/collective.toml is not read" in found["problem"]
    assert "uid 7" in found["problem"]
    assert not found["fatal"]


def test_a_launcher_of_another_vendor_is_shown() -> None:
    mpi = {"library": {"vendor": "Open MPI"}, "error": "", "mpiexec": []}
    settings = {"error": "", "launcher": {"launcher": "mpich"}, "refused": {}}
    report = healthy(mpi=mpi, settings=settings)
    found = next(problems(report))
    assert "started by mpiexec of MPICH, and mpi4py has Open MPI" in found["problem"]
    assert not found["fatal"]  # ranks that share memory do not mind
    report["choices"][0]["backend"] = "mpi"
    report["transports"]["mpi"] = {"works": True}
    assert next(problems(report))["fatal"]


def test_what_launchers_say_does_not_reach_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Return the folder of a library with the driver's ABI and two GPUs, or failing."""
    source = doctor.launches.directory / "cuda.c"
    source.write_text(DRIVER)
    built = source.with_name("libcuda.so.1")
    command = ["cc", "-shared", "-fPIC", f"-DCODE={code}", "-o", str(built), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return built.parent


@needs_compiler
def test_gpus_are_listed(sick_run: dict[str, Any]) -> None:
    found = sick_run["gpus"]
    assert (found["cuda"], found["reason"]) == ("13.1", "")
    assert found["devices"] == [
        {"name": "GPU A", "memory_bytes": 1 << 34, "compute": "9.0"},
        {"name": "GPU B", "memory_bytes": 2 << 34, "compute": "9.1"},
    ]
    assert "1 × GPU A, 16 GiB" in text(sick_run)


@needs_compiler
def test_a_driver_without_gpus_says_why(doctor: Doctor) -> None:
    found = doctor.report(LD_LIBRARY_PATH=str(driver(doctor, 100)))["gpus"]
    assert found["devices"] == []
    assert "no device of that kind (CUresult 100)" in found["reason"]


# -- NCCL ---------------------------------------------------------------------------------------


@needs_fakes
def test_nccl_that_works_is_described(healthy_run: dict[str, Any]) -> None:
    report = healthy_run
    transport, nccl = report["transports"]["nccl"], report["nccl"]
    assert (transport["works"], transport["reason"]) == (True, "")
    assert "cuda" in transport["devices"]
    assert len(report["gpus"]["devices"]) == 4
    assert (nccl["version"], nccl["path"]) == ("2.19.4", fakes.library_path(21904))
    lacking = {name for name, there in nccl["features"].items() if not there}
    assert lacking == {"fp8", "shrink", "windows", "alltoall"}
    shown = text(report)
    assert re.search(r"^  nccl +works; two ranks", shown, re.MULTILINE)
    assert re.search(r"^  lacks +fp8, shrink, windows, alltoall$", shown, re.MULTILINE)


@needs_fakes
def test_nccl_that_fails_says_what_it_says(doctor: Doctor) -> None:
    report = doctor.report(**fakes.environment(delay_us=0, init_error=2))
    transport = report["transports"]["nccl"]
    assert transport["works"] is False
    assert "ncclCommInitRankConfig of rank 0: unhandled system error" in transport["reason"]
    assert "NCCL is installed but does not work" in joined(report)


def test_nccl_without_a_gpu_is_no_problem(bare_run: dict[str, Any]) -> None:
    report = bare_run
    transport = report["transports"]["nccl"]
    assert (transport["works"], transport["fix"]) == (False, "")
    assert transport["reason"] == "no NVIDIA driver: /no/such/libcuda.so.1 cannot be loaded"
    assert "NCCL" not in joined(report)


@needs_compiler
def test_gpus_without_nccl_carry_the_command(sick_run: dict[str, Any]) -> None:
    report = sick_run
    transport = report["transports"]["nccl"]
    assert (transport["works"], transport["reason"]) == (False, "no NCCL library can be loaded")
    assert transport["fix"] == "pip install nvidia-nccl-cu13"
    assert "2 GPUs are here, and no NCCL" in joined(report)
    assert "pip install nvidia-nccl-cu13" in joined(report)


# -- memory and cores ---------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand a directory in for /proc and /sys/fs/cgroup; 64 GiB, no control groups."""
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
    # The path is the host's; only the container's own part is mounted, at the top.
    "version 1 inside a container": {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/1\n3:cpu,cpuacct:/d",
        "cgroup/memory/memory.limit_in_bytes": f"{4 << 30}",
        "cgroup/memory/memory.usage_in_bytes": f"{1 << 30}",
        "cgroup/cpu/cpu.cfs_quota_us": "50000",
        "cgroup/cpu/cpu.cfs_period_us": "100000",
    },
    "version 1 with the largest number there is": {
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
        ("version 1 with the largest number there is", None, None, None),
    ],
)
def test_limits_of_control_groups(
    system: Path, groups: str, limit: int | None, left: int | None, quota: float | None
) -> None:
    for path, words in GROUPS[groups].items():
        write(system, path, f"{words}\n")
    found = doctor_host.shared_memory()
    assert (found["memory"], found["available"]) == (64 << 30, 32 << 30)
    assert (found["limit"], found["left"]) == (limit, left)
    assert doctor_host.processors()["quota"] == quota


def test_a_run_directory_of_somebody_else_is_shown(doctor: Doctor) -> None:
    foreign = doctor.launches.temporary / f"collective-{os.geteuid()}"
    foreign.mkdir()
    foreign.chmod(0o777)
    try:
        done = doctor.start("--json")
    finally:
        foreign.rmdir()
    assert "mode 0777; it must be a directory of uid" in joined(json.loads(done.stdout))
