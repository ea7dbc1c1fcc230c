"""The command line around the launcher and the settings."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

import collective
from collective import native
from collective.start.choice import DeviceFiles
from collective.start.keys import KEYS
from collective.tools.cli.main import main
from tests.interpreter import run_python


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.chdir(tmp_path)


def test_config_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(RANK="1", WORLD_SIZE="3")
    assert main(["config", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    table = printed["settings"]
    assert list(table) == list(KEYS)
    assert printed["refused"] == {}
    assert table["rank"] == {"value": 1, "origin": "launcher torchrun"}
    assert table["store"] == {"value": None, "origin": "default"}


def test_error_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["COLLECTIVE_BAKEND"] = "shm"
    assert main(["config"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("collective: COLLECTIVE_BAKEND")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["-v"], ["nonsense"], ["config", "--nonsense"]])
def test_wrong_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: collective" in capsys.readouterr().err


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


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"collective {collective.__version__}\n"


def test_version_with_what_it_stands_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Neither of the two can be found, whatever is installed.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(DeviceFiles, "dev", Path.cwd())
    assert main(["--version", "-v"]) == 0
    version, transports, core = capsys.readouterr().out.splitlines()
    assert version.startswith(f"collective {collective.__version__}, Python 3.")
    assert transports == (
        "transports: shm, threads; not here: gloo, hierarchical, mpi, nccl (no GPU)"
    )
    assert core == f"native core: {native.status()}"


def test_package_is_a_command() -> None:
    done = run_python("-m", "collective", "config", "--json")
    assert json.loads(done.stdout)["settings"]["size"]["value"] == 1, done.stderr
