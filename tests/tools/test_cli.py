"""The command line around the launcher and the settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import collective
from collective.errors import ConfigError
from collective.start.keys import KEYS
from collective.tools.cli.main import main
from collective.tools.cli.run import default_size
from tests.support.interpreter import run_python
from tests.support.launches import Launches, launches

__all__ = ["launches"]  # the fixture


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.chdir(tmp_path)


def test_config_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    Path("collective.toml").write_text('backend = "cpu:shm,cuda:nccl"')
    os.environ["COLLECTIVE_TIMEOUT"] = "7"
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(maxsplit=2) for line in lines]
    assert rows[0] == ["key", "value", "origin"]
    assert [row[0] for row in rows[1:]] == list(KEYS)
    assert ["timeout", "7.0", "environment COLLECTIVE_TIMEOUT"] in rows
    assert ["backend", "cpu:shm,cuda:nccl", f"file {Path.cwd() / 'collective.toml'}"] in rows
    assert ["store", "-", "default"] in rows
    start = lines[0].index("value")  # aligned
    assert all(line[start - 1] == " " and line[start] != " " for line in lines)


def test_config_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(RANK="1", WORLD_SIZE="3")
    assert main(["config", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    table = printed["settings"]
    assert list(table) == list(KEYS)
    assert printed["refused"] == {}
    assert table["rank"] == {"value": 1, "origin": "launcher torchrun"}
    assert table["store"] == {"value": None, "origin": "default"}


def test_config_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["COLLECTIVE_BAKEND"] = "shm"
    assert main(["config", "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("collective: COLLECTIVE_BAKEND")
    assert output.err.count("\n") == 1


def test_config_lists_all_settings_if_one_is_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["COLLECTIVE_BAKEND"] = "shm"
    assert main(["config"]) == 2
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["key", "it must be"]
    assert [row[0] for row in rows[1:]] == list(KEYS)
    assert ["timeout", "a number of seconds > 0"] in rows


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["-v"], ""),
        (["nonsense"], ""),
        (["doctr"], "Did you mean 'doctor'?"),
        (["hello.py"], "collective run hello.py"),
        (["run", "--backnd", "shm", "x.py"], "Did you mean '--backend'?"),
        (["bench", "--operation", "gather"], "usage: collective bench"),
        (["bench", "--operation", "gather"], "Did you mean '--op'?"),
        (["run", "--nn", "2", "x.py"], "Did you mean '-n'?"),
        (["bench", "--ranks", "4"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_main_with_wrong_arguments_prints_usage_and_a_hint(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert "usage: collective" in printed
    assert hint in printed
    assert hint or "Did you mean" not in printed


def test_main_without_a_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert not caught.value.code
    assert "run a two-minute demonstration" in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in ("config", "run"):
        assert f"    {command} " in text


@pytest.mark.parametrize(
    "command",
    ["", "bench", "config", "doctor", "parity", "profile", "run", "tour", "trace"],
)
def test_help_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"collective {collective.__version__}\n"


def test_package_runs_with_python_m() -> None:
    done = run_python("-m", "collective", "config", "--json")
    assert json.loads(done.stdout)["settings"]["size"]["value"] == 1, done.stderr


# -- refused arguments ------------------------------------------------------------------------


REFUSED = {
    "bench": [
        (["--op", "allreduce"], "--op: 'allreduce' is unknown; use one of all_reduce, "),
        (["--sizes", "4,2"], "--sizes: '2'; expected at least 4 bytes"),
        (["--vs", "nccl"], "--vs: 'nccl' is unknown; use one of mpi4py, torch"),
        (["--dtype", "float8"], "--dtype: 'float8' is unknown; use one of int8"),
        (["-n", "0"], "'0'; expected integers >= 1"),
        (["--backend", "smh"], "shm"),
        (["--from", "/nowhere"], "--from /nowhere"),
        (["--latency", "--bandwidth"], "not allowed with"),
        (["--json", "absent/a.json"], "--json absent/a.json: it cannot be written: No such file"),
        (["--json", "."], "--json .: it cannot be written: Is a directory"),
    ],
    "parity": [
        (["--op", "all_reduse"], "--op: 'all_reduse' is unknown; use one of all_reduce"),
        (["--backend", "smh"], "Did you mean 'shm'"),
        (["--framework", "mxnet"], "--framework: 'mxnet'"),
        (["--json", "absent/a.json"], "--json absent/a.json: it cannot be written: No such file"),
        (["--json", "/"], "--json /: it cannot be written: Is a directory"),
        (["--backend", "threads", "--model", "foo"], "--model: 'foo': No module named 'foo'"),
        (["--backend", "threads", "--model", "os:foo"], "--model: 'os:foo': module 'os' has no"),
    ],
    "profile": [
        (["-n", "2"], "no program given"),
        (["-n", "2", "absent.py"], "script 'absent.py': no such file"),
        (["--trace", "nowhere"], "no trace in nowhere"),
        (["-n", "2", "--backend", "shmm", "train.py"], "Did you mean 'shm'?"),
        (["-n", "2", "--json", "absent/a.json", "train.py"], "--json absent/a.json: it cannot be"),
        (["-n", "2", "--trace", "train.py/a", "train.py"], "--trace train.py/a: no files can be"),
        (["--predict", "8", "train.py"], "unrecognized arguments: --predict"),
        (["-n", "0"], "'0'; expected an integer >= 1"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *row) for command, rows in REFUSED.items() for row in rows],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_refused_before_anything_runs(
    command: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for runs in ("bench.run.measure", "parity.runner.run"):
        monkeypatch.setattr(f"collective.tools.{runs}", lambda *_: pytest.fail("the command runs"))
    Path("train.py").write_text("open('ran', 'w')")
    is_by_argparse = False
    try:
        code: object = main([command, *arguments])
    except SystemExit as error:
        code, is_by_argparse = error.code, True
    shown = capsys.readouterr().err
    assert code == 2
    assert message in shown
    refusal = shown.removeprefix("collective parity: looking at transports\n")  # the progress
    assert is_by_argparse or refusal.count("\n") == 1
    assert [*map(str, Path().iterdir())] == ["train.py"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["parity", "--backend", "threads", "--framework", "numpy", "--op", "broadcast",
             "--dtype", "int8", "--ranks", "2"],
            "passed, 0 failed, ",
        ),
        (["profile", "-n", "2", "--backend", "threads", "train.py"], "2 rank(s) over threads, "),
    ],
    ids=["parity", "profile"],
)  # fmt: skip
def test_command_prints_its_report(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("import collective\ncollective.init().barrier()\n")
    assert main(arguments) == 0
    shown = capfd.readouterr()
    assert words in shown.out, shown.err


# -- number of ranks without -n -------------------------------------------------------------------

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "4"}


@pytest.mark.parametrize(
    ("environ", "ranks", "reason"),
    [
        ({}, 2, "2 ranks; -n N"),
        ({**SLURM, "SLURM_NTASKS": "4"}, 4, "4 ranks, as SLURM_TASKS_PER_NODE says; -n N"),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "4"}, 4, "4 ranks, as SLURM_TASKS_PER_NODE says; "),
        (SLURM, 2, "2 ranks; -n N"),
        (
            {**SLURM, "SLURM_NTASKS": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1",
             "SLURM_TASKS_PER_NODE": "4,3"},
            3, "3 ranks, as SLURM_TASKS_PER_NODE says; on this host of 2 only; -n N",
        ),
        ({"PET_NPROC_PER_NODE": "8"}, 8, "8 ranks, as PET_NPROC_PER_NODE says; -n N"),
        ({"PET_NPROC_PER_NODE": "1", "PET_NNODES": "2:3"}, 1, "1 rank, as PET_NPROC_PER_NODE "
         "says; on this host of 3 only; -n N"),
        ({"PET_NPROC_PER_NODE": "gpu"}, 2, "2 ranks; -n N"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 2, "2 ranks; -n N"),
    ],
    ids=["no-job", "tasks", "tasks-per-node", "no-tasks", "second-host", "torchrun",
         "torchrun-hosts", "torchrun-gpus", "one-process"],
)  # fmt: skip
def test_default_size_is_that_of_the_job_or_two(
    environ: dict[str, str], ranks: int, reason: str
) -> None:
    size, text = default_size(environ)
    assert size == ranks
    assert text.startswith(reason)


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, "process 1 of 4 that torchrun has started"),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
             "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "process 2 of 3 that openmpi has started",
        ),
        ({"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "2"}, "process 0 of 2 that collective has"),
    ],
    ids=["torchrun", "mpiexec", "collective"],
)  # fmt: skip
def test_default_size_in_launched_process_raises_config_error(
    environ: dict[str, str], who: str
) -> None:
    with pytest.raises(ConfigError, match=who):
        default_size(environ)


def test_default_size_with_invalid_task_list_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE='four'; it must be a list such"):
        default_size({**SLURM, "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "four"})


@pytest.mark.parametrize(
    ("options", "ranks", "error"),
    [
        ([], 2, "collective run: 2 ranks; -n N for another number\n"),
        (["-np", "3"], 3, ""),
        (["-n3"], 3, ""),
    ],
    ids=["default", "-np", "-n"],
)
def test_run_starts_given_or_default_number_of_ranks(
    launches: Launches, options: list[str], ranks: int, error: str
) -> None:
    done = launches.run(*options, launches.script("print(size)"))
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {ranks}" for r in range(ranks)]
    assert (done.returncode, done.stderr) == (0, error)


def test_run_of_missing_script_prints_only_its_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "absent.py"]) == 2
    assert capsys.readouterr().err == "collective run: script 'absent.py': no such file\n"
