"""Run directories: shared while somebody holds them, gone after the last."""

from __future__ import annotations

import gc
import os
import stat
import tempfile
from pathlib import Path

import pytest

from collective.errors import RendezvousError
from collective.start.rundir import RunStore, join, leave
from tests.support.interpreter import run_python, run_together


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"collective-{os.geteuid()}"


def test_directory_is_private() -> None:
    path, hold = join("a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    leave(path, hold)


def test_last_to_leave_removes_it() -> None:
    path, first = join("a")
    again, second = join("a")
    assert path == again
    (path / "key").write_text("value")
    leave(path, first)
    assert (path / "key").exists()
    leave(path, second)
    assert not path.exists()


def test_who_joins_first_finds_nothing_of_an_earlier_run(base: Path) -> None:
    (base / "a" / "deep").mkdir(parents=True)
    base.chmod(0o700)
    (base / "a" / "key").write_text("stale")
    path, hold = join("a")
    assert list(path.iterdir()) == []
    (path / "key").write_text("fresh")
    _, other = join("a")
    assert (path / "key").read_text() == "fresh"
    leave(path, other)
    leave(path, hold)


def test_leftovers_of_others_are_swept_and_what_is_held_is_not(base: Path) -> None:
    held, hold = join("held")
    (base / "leftover").mkdir()
    path, other = join("another")
    assert sorted(entry.name for entry in base.iterdir()) == ["another", "held"]
    leave(path, other)
    leave(held, hold)
    assert list(base.iterdir()) == []


def test_killed_process_holds_nothing(base: Path) -> None:
    body = "from collective.start.rundir import join; join('a'); import os; os.kill(os.getpid(), 9)"
    run_python("-c", body, TMPDIR=str(base.parent))
    assert [entry.name for entry in base.iterdir()] == ["a"]
    leave(*join("b"))
    assert list(base.iterdir()) == []


def test_many_processes_come_and_go(base: Path) -> None:
    """Joining, leaving and sweeping at once never takes a directory from under a holder."""
    body = """
import os, sys
from collective.start.rundir import join, leave
for i in range(60):
    path, hold = join(f"job-{i % 3}")
    mine = path / f"{os.getpid()}-{i}"
    mine.write_text("here")
    assert mine.read_text() == "here"
    leave(path, hold)
"""
    done = run_together(*[["-c", body]] * 4, TMPDIR=str(base.parent))
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * 4
    assert list(base.iterdir()) == []


def test_directory_of_somebody_else_is_refused(base: Path) -> None:
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    with pytest.raises(RendezvousError, match="0700"):
        join("a")


def test_link_is_refused(base: Path, tmp_path: Path) -> None:
    base.mkdir(mode=0o700)
    (tmp_path / "trap").mkdir()
    (base / "a").symlink_to(tmp_path / "trap")
    with pytest.raises(RendezvousError, match="COLLECTIVE_STORE"):
        join("a")


def test_store_holds_its_directory_until_it_is_collected(base: Path) -> None:
    store = RunStore("a")
    store.set("key", b"value")
    assert RunStore("a").try_get("key") == b"value"
    assert (base / "a").exists()
    del store
    gc.collect()
    assert not (base / "a").exists()


def test_forked_child_does_not_remove_its_parents_store(base: Path) -> None:
    store = RunStore("a")
    child = os.fork()
    if child == 0:
        del store
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (base / "a").exists()
    store.set("key", b"value")
