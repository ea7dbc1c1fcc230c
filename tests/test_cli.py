"""The command line around the launcher and the settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collective.start.keys import KEYS
from collective.tools.cli.main import main

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["run"], ["config", "--nonsense"]])
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


def test_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "collective", "config", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert json.loads(done.stdout)["settings"]["size"]["value"] == 1, done.stderr
