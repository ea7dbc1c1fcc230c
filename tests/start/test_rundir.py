"""Run directories: shared while a process holds them, removed by the last holder."""

from __future__ import annotations

import gc
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from collective.errors import RendezvousError
from collective.start.rundir import RunStore, claim, join, leave
from tests.support.interpreter import run_python, run_together


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"collective-{os.geteuid()}"


def test_join_creates_private_directories() -> None:
    path, hold = join("a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    leave(path, hold)


def test_leave_by_last_holder_removes_directory() -> None:
    path, first = join("a")
    again, second = join("a")
    assert path == again
    (path / "key").write_text("value")
    leave(path, first)
    assert (path / "key").exists()
    leave(path, second)
    assert not path.exists()


def test_join_by_first_holder_removes_stale_files(base: Path) -> None:
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


def test_join_sweeps_leftovers_and_keeps_held_directories(base: Path) -> None:
    held, hold = join("held")
    (base / "leftover").mkdir()
    path, other = join("another")
    assert sorted(entry.name for entry in base.iterdir()) == ["another", "held"]
    leave(path, other)
    leave(held, hold)
    assert list(base.iterdir()) == []


def test_join_sweeps_directory_of_killed_process(base: Path) -> None:
    body = "from collective.start.rundir import join; join('a'); import os; os.kill(os.getpid(), 9)"
    run_python("-c", body, TMPDIR=str(base.parent))
    assert [entry.name for entry in base.iterdir()] == ["a"]
    leave(*join("b"))
    assert list(base.iterdir()) == []


def test_join_and_leave_of_many_processes_do_not_interfere(base: Path) -> None:
    """Concurrent joins, leaves and sweeps never remove a directory from its holder."""
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
    assert [(process.returncode, process.stderr) for process in done] == [(0, "")] * 4
    assert list(base.iterdir()) == []


def test_join_in_world_writable_base_raises_rendezvous_error(base: Path) -> None:
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    with pytest.raises(RendezvousError, match="0700"):
        join("a")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a named pipe"),
        (Path.touch, "a file"),
        (lambda path: path.symlink_to("/nonexistent"), "a link"),
        (lambda path: path.symlink_to("/tmp"), "a link"),
    ],
    ids=["pipe", "file", "dangling link", "link"],
)
def test_join_at_name_that_something_else_has_raises_rendezvous_error(
    base: Path, make: Callable[[Path], object], kind: str
) -> None:
    make(base)
    with pytest.raises(RendezvousError, match=f"it is {kind} of uid .* Its owner can remove it"):
        join("a")


def test_join_where_no_directory_can_be_made_raises_rendezvous_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(RendezvousError, match=r"it cannot be made: .*Not a directory.*TMPDIR"):
        join("a")


def test_join_through_link_raises_rendezvous_error(base: Path, tmp_path: Path) -> None:
    base.mkdir(mode=0o700)
    (tmp_path / "trap").mkdir()
    (base / "a").symlink_to(tmp_path / "trap")
    with pytest.raises(RendezvousError, match="COLLECTIVE_STORE"):
        join("a")


def test_run_store_holds_directory_until_collected(base: Path) -> None:
    store = RunStore("a")
    store.set("key", b"value")
    assert RunStore("a").try_get("key") == b"value"
    assert (base / "a").exists()
    del store
    gc.collect()
    assert not (base / "a").exists()


def in_child(function: Callable[[], object]) -> bool:
    """Return whether ``function`` raises BlockingIOError in a forked child."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BlockingIOError:
            os._exit(7)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_claim_locks_place_until_last_holder_gives_it_back(base: Path) -> None:
    first, second = claim([5, 6]), claim([5])
    assert in_child(lambda: claim([5]))
    assert in_child(lambda: claim([6, 7]))
    assert not in_child(lambda: claim([7, 6]))
    first()
    assert in_child(lambda: claim([5]))
    second()
    assert not in_child(lambda: claim([5]))


def test_claim_survives_end_of_forked_child_and_of_run_directories(base: Path) -> None:
    give_back = claim([5])
    assert not in_child(lambda: claim([8])())
    RunStore("a")  # sweeps the parent
    assert in_child(lambda: claim([5]))
    give_back()


def test_claim_without_directory_for_temporary_files_locks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    claim([5])()


def test_run_store_of_parent_survives_forked_child(base: Path) -> None:
    store = RunStore("a")
    child = os.fork()
    if child == 0:
        del store
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (base / "a").exists()
    store.set("key", b"value")
