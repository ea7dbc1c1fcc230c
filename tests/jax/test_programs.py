"""Unmodified JAX programs over the transports; ``make test-in ENV=jax`` runs this."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.interpreter import ROOT, printed, run_python, run_together
from tests.support.launches import NOISE_S, PROMISED_S
from tests.support.network_hosts import free_port

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-in ENV=jax` does that", allow_module_level=True)

from collective.adapters.jax.xla import symbols

HERE = Path(__file__).parent
# For a busy machine, where the import of JAX alone can take ten seconds.
DEADLINE_S = 250.0
CHECKS = 112


def launched(
    size: int, program: str, *arguments: object, backend: str = "shm", **variables: str
) -> CompletedProcess[str]:
    """Run a program of this folder with ``collective run --jax``."""
    return run_python(
        "-m", "collective", "run", "-n", size, "--jax", "--backend", backend, HERE / program,
        *arguments, timeout=DEADLINE_S, **{"COLLECTIVE_TIMEOUT": "60", **variables},
    )  # fmt: skip


def lines(done: CompletedProcess[str]) -> list[str]:
    """Return the lines of all processes in the order of their numbers, of a run that succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def test_installed_jaxlib_looks_up_exactly_the_listed_names() -> None:
    assert symbols.looked_up(symbols.jaxlib_file()) == symbols.listed()


def test_generated_header_is_the_committed_one() -> None:
    committed = Path(symbols.__file__).with_name("symbols.h").read_text()
    assert symbols.header(symbols.looked_up(symbols.jaxlib_file())) == committed


@pytest.mark.parametrize(
    ("backend", "size", "hosts"),
    [("shm", 2, 1), ("shm", 3, 1), ("shm", 4, 1), ("tcp", 2, 1), ("tcp", 3, 1), ("tcp", 4, 1),
     ("gloo", 2, 1), ("hierarchical", 2, 2), ("hierarchical", 3, 2), ("hierarchical", 4, 2)],
)  # fmt: skip
def test_every_operation_in_every_dtype_is_right(backend: str, size: int, hosts: int) -> None:
    # The ranks claim to be on other hosts, but share the loopback.
    done = launched(
        size, "operations.py", "--hosts", hosts, backend=backend, COLLECTIVE_INTERFACE="lo",
        COLLECTIVE_SECRET="none",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = re.findall(r"(\d+) checks, (\d+) wrong, over (\w+)", done.stdout)
    assert results == [(str(CHECKS), "0", backend)] * size, done.stdout
    assert done.stdout.count("float16: INVALID_ARGUMENT: Unsupported primitive type") == size


def test_python_makes_only_the_first_of_repeated_calls() -> None:
    assert lines(launched(2, "without_python.py", "psum")) == [
        f"[{rank}] 1 calls by Python, result {{1.0}}" for rank in range(2)
    ]


def test_meshes_of_some_processes_are_right() -> None:
    assert lines(launched(3, "cliques.py")) == [
        "[0] 2.0 2.0 3.0 3.0 2.0 2.0",
        "[1] 2.0 2.0 3.0 3.0 - 2.0",
        "[2] - - 3.0 3.0 2.0 -",
    ]


@pytest.mark.parametrize("devices", [4, 8])
def test_groups_in_every_text_of_jax_are_read(devices: int) -> None:
    count, *texts = printed(HERE / "replica_groups.py", devices).splitlines()
    assert int(count) == len(texts) >= 15
    assert any("device_ids=([" in text for text in texts), "a mesh of transposed devices"


def test_sums_over_permuted_meshes_are_right() -> None:
    assert lines(launched(4, "cliques.py", "permuted")) == [f"[{rank}] True" for rank in range(4)]


def test_loaded_executable_is_refused_by_name(tmp_path: Path) -> None:
    assert launched(2, "cliques.py", "store", tmp_path / "executable").returncode == 0
    for line in lines(launched(2, "cliques.py", "load", tmp_path / "executable")):
        assert "UnsupportedError: jax: a communicator whose first device is 0" in line


@pytest.mark.parametrize(
    ("backend", "size", "hosts", "programs"),
    [("shm", 3, 1, 40), ("shm", 4, 1, 40), ("hierarchical", 3, 2, 20)],
)
def test_random_programs_equal_numpy(backend: str, size: int, hosts: int, programs: int) -> None:
    done = launched(
        size, "random_programs.py", "--seed", size, "--programs", programs, "--hosts", hosts,
        backend=backend, COLLECTIVE_INTERFACE="lo", COLLECTIVE_SECRET="none",
    )  # fmt: skip
    assert lines(done) == [f"[{rank}] {programs} programs, 0 wrong" for rank in range(size)]


@pytest.mark.parametrize(("backend", "size"), [("shm", 2), ("shm", 4), ("tcp", 2)])
def test_reduce_scatters_of_jax_40830_are_right(backend: str, size: int) -> None:
    done = launched(size, "reduce_scatters.py", "--turns", 30, backend=backend)
    assert lines(done) == [f"[{rank}] 30 reduce-scatters, 0 wrong" for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "mesh", "options", "dtype"),
    [(2, "(2, 1)", [], "float32"), (3, "(3, 1)", [], "float32"), (4, "(2, 2)", [], "float32"),
     (4, "(2, 2)", ["x64"], "float64")],
)  # fmt: skip
def test_sharded_training_with_donation_equals_one_process(
    size: int, mesh: str, options: list[str], dtype: str
) -> None:
    done = launched(size, "sharded_training.py", *options)
    text = f"{dtype}: the same after 30 steps on {mesh}"
    assert lines(done) == [f"[{rank}] {text}" for rank in range(size)]


def errors(done: CompletedProcess[str], turn: str) -> dict[int, tuple[float, str]]:
    """Return seconds and text of each process's error in a turn."""
    found = re.findall(rf"^\[(\d)\] {turn}: ([\d.]+) s: (.*)$", done.stdout, re.MULTILINE)
    return {int(rank): (float(seconds), text) for rank, seconds, text in found}


@pytest.mark.parametrize("turn", ["first", "second"])
def test_killed_process_is_named_by_the_others(turn: str, killed: CompletedProcess[str]) -> None:
    found = errors(killed, turn)
    assert found.keys() == {0, 1}, killed.stdout + killed.stderr
    for seconds, text in found.values():
        assert "PeerLostError: all_reduce" in text
        assert re.search(r"rank 2 \((pid \d+|on \S+)\)", text)
        assert seconds < PROMISED_S + NOISE_S


def test_survivors_of_killed_process_live(killed: CompletedProcess[str]) -> None:
    assert killed.stdout.count("lives") == 2


@pytest.fixture(scope="module", params=["shm", "tcp"])
def killed(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    return launched(3, "failures.py", "kill", backend=request.param)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_differing_programs_are_named_on_all(turn: str, differing: CompletedProcess[str]) -> None:
    found = errors(differing, turn)
    assert found.keys() == {0, 1, 2}, differing.stdout + differing.stderr
    for seconds, text in found.values():
        assert "MismatchError: all_reduce: the ranks made different calls" in text
        assert "ranks 0, 1: all_reduce(float32[4], op=sum) at MPI_Allreduce, called by XLA" in text
        assert seconds < PROMISED_S + NOISE_S


@pytest.fixture(scope="module", params=["shm", "tcp"])
def differing(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    return launched(3, "failures.py", "differ", backend=request.param)


def test_gather_of_unlike_lengths_names_those_of_all_processes() -> None:
    found = errors(launched(3, "failures.py", "lengths"), "first")
    assert found.keys() == {0, 1, 2}
    for _, text in found.values():
        assert "MismatchError: all_gather: the ranks made different calls" in text
        assert "ranks 0, 1: all_gather(float32[-1], counts=[4, 4, 4])" in text
        assert "rank 2: all_gather(float32[-1], counts=[5, 5, 5])" in text


def test_late_process_times_out_at_the_deadline() -> None:
    done = launched(3, "failures.py", "late", COLLECTIVE_TIMEOUT="2")
    found = errors(done, "first")
    for rank in (0, 1):
        seconds, text = found[rank]
        assert "CollectiveTimeoutError: all_reduce" in text
        assert 1.9 <= seconds < 2 + NOISE_S
    assert found[2][1].count("rank 0") or "timed out" in found[2][1]


def test_two_devices_in_a_process_are_refused_by_name() -> None:
    found = errors(launched(2, "failures.py", "forced"), "first")
    assert found.keys() == {0, 1}
    for _, text in found.values():
        assert text.startswith("jax: this process has 2 devices in one program")


def test_communicator_that_xla_makes_without_the_plugin_is_refused_by_name() -> None:
    found = errors(launched(2, "failures.py", "elsewhere"), "first")
    assert found.keys() == {0, 1}
    for _, text in found.values():
        assert text.startswith("jax: XLA did not make a communicator for processes [0, 1] when")


def test_program_without_arguments_finds_its_number_as_main() -> None:
    assert lines(launched(2, "starts.py", "x")) == [f"[{r}] __main__ ['x'] 6.0" for r in range(2)]


def test_program_that_names_an_address_runs_under_our_launcher() -> None:
    assert lines(launched(2, "starts.py", "torch")) == [
        f"[{rank}] __main__ ['torch'] 6.0" for rank in range(2)
    ]


def test_coordinator_listens_at_the_address_that_the_program_names() -> None:
    assert lines(launched(2, "starts.py", "address", free_port())) == [
        f"[{rank}] __main__ ['address'] 6.0" for rank in range(2)
    ]


def test_program_that_initializes_jax_again_makes_calls() -> None:
    assert lines(launched(3, "starts.py", "again", free_port())) == [
        f"[{rank}] __main__ ['again'] 9.0" for rank in range(3)
    ]


def test_process_with_another_number_than_before_is_refused_by_name() -> None:
    refusals = lines(launched(2, "starts.py", "exchanged", free_port()))
    assert len(refusals) == 2
    for line in refusals:
        assert re.search(
            r"\[(\d)\] UnsupportedError: jax: this process is process (?!\1)\d of 2 now, and was "
            r"process \1 of 2 when the plug-in", line
        )  # fmt: skip


def started_by_hand(exports: dict[str, str], *options: str) -> list[CompletedProcess[str]]:
    """Run two processes that any launcher could have started, with two variables."""
    address = f"127.0.0.1:{free_port()}"
    ranks: list[Sequence[object]] = [
        [HERE / "starts.py", "explicit", address, 2, rank, *options] for rank in range(2)
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVE_")}
    return run_together(*ranks, timeout=DEADLINE_S, env=environment, **exports)


@pytest.fixture(scope="module")
def exports() -> dict[str, str]:
    """Return the variables that the module prints for a shell."""
    text = printed("-m", "collective.adapters.jax.xla")
    words = [shlex.split(line)[1] for line in text.splitlines()]
    return dict(word.split("=", 1) for word in words)


def test_two_variables_are_enough_for_any_launcher(exports: dict[str, str]) -> None:
    assert exports.keys() == {"JAX_CPU_COLLECTIVES_IMPLEMENTATION", "MPITRAMPOLINE_LIB"}
    for done in started_by_hand(exports):
        assert (done.returncode, done.stdout) == (0, "__main__ ['explicit'] 6.0\n"), done.stderr


def test_processes_with_one_secret_meet(exports: dict[str, str]) -> None:
    for done in started_by_hand({**exports, "COLLECTIVE_SECRET": "5f" * 32}):
        assert (done.returncode, done.stderr) == (0, "")


def test_shutdown_before_the_end_exits_with_zero(exports: dict[str, str]) -> None:
    for done in started_by_hand(exports, "shutdown"):
        assert (done.returncode, done.stderr) == (0, "")


def test_failed_connection_is_raised_by_the_first_program(exports: dict[str, str]) -> None:
    first, second = started_by_hand({**exports, "COLLECTIVE_BACKEND": "no_such_transport"})
    for done in (first, second):
        assert done.returncode != 0
        assert "BackendNotFoundError" in done.stderr


def test_package_that_fails_when_xla_begins_is_named(tmp_path: Path) -> None:
    # As PyTorch itself does if one of its extensions was installed from a folder that is gone.
    (tmp_path / "torch.py").write_text("raise RuntimeError('an extension is gone.')")
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = launched(2, "reduce_scatters.py", backend="gloo", **variables)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "BackendUnavailableError: backend 'gloo': collective.backends.gloo:GlooBackend cannot be "
        "imported: RuntimeError: an extension is gone. `python -c 'import collective.backends.gloo'"
    ) in done.stdout + done.stderr


def test_program_runs_where_the_launcher_imports_the_package_by_a_link(tmp_path: Path) -> None:
    # As in an editable installation. The ranks get the root of the repository in PYTHONPATH.
    (tmp_path / "collective").symlink_to(ROOT / "collective")
    launcher = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r});"
        "runpy.run_module('collective', run_name='__main__')"
    )
    done = run_python(
        "-c", launcher, "run", "-n", 2, "--jax", HERE / "starts.py", "x", cwd=tmp_path,
        timeout=DEADLINE_S, PYTHONPATH="",
    )  # fmt: skip
    assert lines(done) == [f"[{rank}] __main__ ['x'] 6.0" for rank in range(2)]


def test_jax_imported_first_is_a_clear_error() -> None:
    done = run_python("-c", "import jax, collective.adapters.jax.xla as xla; xla.enable()")
    assert done.returncode == 1
    assert (
        "ConfigError: jax: jax was imported before the plug-in for XLA was enabled" in done.stderr
    )


def test_enabled_program_of_one_process_is_unchanged() -> None:
    program = (
        "import collective.adapters.jax.xla as xla; xla.enable(); import jax;"
        "print(float(jax.numpy.arange(4).sum()))"
    )
    assert printed("-c", program) == "6.0\n"


def test_programs_that_do_not_ask_load_nothing_of_this_package() -> None:
    program = (
        "import jax, sys; jax.numpy.arange(4).sum();"
        "print([m for m in sys.modules if m.startswith('collective')],"
        "'libcollective_xla' in open('/proc/self/maps').read())"
    )
    assert printed("-c", program, cwd=ROOT / "docs") == "[] False\n"
