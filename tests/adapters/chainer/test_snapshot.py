"""Snapshots of a distributed run, resumed on the same and on other numbers of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.snapshot")

import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.iterators import SerialIterator

from collective.adapters.chainer import (
    MultiNodeSnapshot,
    MultiNodeUpdater,
    ShardedIterator,
    create_multi_node_optimizer,
    load_snapshot,
    save_snapshot,
    scatter_dataset,
)
from collective.errors import CollectiveError, InvalidArgumentError
from tests.support.chainer_models import Model, samples
from tests.support.chainer_ranks import on, run


class Net(Model):
    """A model with batch statistics and dropout that differ from rank to rank."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        with self.init_scope(), chainer.using_config("dtype", np.dtype("f8")):
            self.norm = L.BatchNormalization(8)

    def forward(self, x: Any, y: Any) -> Any:
        h = F.tanh(self.first(x))
        if not self.plain:
            h = F.dropout(self.norm(h), 0.25)
        loss = F.mean_squared_error(self.last(h), y)
        chainer.report({"loss": loss}, self)
        return loss


def trainer_of(comm: Any, steps: int, out: str, kind: str) -> Any:
    np.random.seed(comm.rank)
    net = Net(plain=kind == "plain")
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(0.01), comm).setup(net)
    iterator: Any
    if kind == "scattered":
        iterator = SerialIterator(scatter_dataset(samples(23), comm, padded=True), 4)
    else:
        iterator = ShardedIterator(samples(23), 8 // comm.size, comm)
    updater = MultiNodeUpdater(iterator, optimizer, comm)
    trainer = training.Trainer(updater, (steps, "iteration"), out=out)
    if comm.rank == 0:
        trainer.extend(training.extensions.LogReport(trigger=(2, "iteration")))
    return trainer


def state_of(trainer: Any) -> dict[str, bytes]:
    state = chainer.serializers.npz.serialize(trainer)
    # The result excludes times, and extensions that only one of the runs has.
    return {
        name: np.asarray(value).tobytes()
        for name, value in state.items()
        if name.startswith("updater/")
    }


def whole(comm: Any, out: str, kind: str) -> Any:
    """Train five steps with a snapshot after the third; return the state at the end."""
    trainer = trainer_of(comm, 5, out, kind)
    trainer.extend(MultiNodeSnapshot(comm), trigger=(3, "iteration"))
    trainer.run()
    return state_of(trainer)


def resumed(comm: Any, out: str, kind: str) -> Any:
    trainer = trainer_of(comm, 5, out + "-2", kind)
    np.random.seed(99)
    load_snapshot(os.path.join(out, "snapshot_iter_3"), trainer, comm)
    assert trainer.updater.iteration == 3
    trainer.run()
    return state_of(trainer)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["sharded", "scattered"])
def test_snapshot_on_same_number_of_ranks_resumes_exactly(
    size: int, kind: str, tmp_path: Path
) -> None:
    expected = run(f"shm-{size}", whole, str(tmp_path / "out"), kind)
    results = run(f"shm-{size}", resumed, str(tmp_path / "out"), kind)
    for rank in range(size):
        assert results[rank].keys() == expected[rank].keys()
        for name, value in expected[rank].items():
            assert results[rank][name] == value, (rank, name)
    mean = "updater/model:main/norm/avg_mean"
    assert expected[0][mean] != expected[1][mean], "both ranks have the same statistics"


def test_snapshot_on_other_number_of_ranks_resumes(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    expected = run("shm-2", whole, out, "plain")[0]
    for size in (1, 4):
        for state in run(f"shm-{size}", resumed, out, "plain"):
            assert state.keys() == expected.keys()
            for name in ("updater/iterator:main/current_position", "updater/optimizer:main/t"):
                assert state[name] == expected[name]
            for name in expected:
                if "model" in name:
                    a, b = (np.frombuffer(values[name], "f8") for values in (state, expected))
                    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=name)


def test_snapshot_with_shards_of_other_number_of_ranks_raises(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    run("shm-2", whole, out, "scattered")
    run("shm-4", refused, out)


def refused(comm: Any, out: str) -> None:
    trainer = trainer_of(comm, 5, out + "-2", "scattered")
    shards = "the snapshot is of 2 ranks, whose updater/iterator:main had shards"
    with pytest.raises(InvalidArgumentError, match=shards):
        load_snapshot(os.path.join(out, "snapshot_iter_3"), trainer, comm)
    assert trainer.updater.iteration == 0


def test_snapshot_file_loads_in_plain_chainer(tmp_path: Path) -> None:
    expected = run("shm-2", whole, str(tmp_path), "sharded")[0]
    net = Net(plain=False)
    file = str(tmp_path / "snapshot_iter_3")
    chainer.serializers.load_npz(file, net, path="updater/model:main/")
    assert not np.array_equal(net.last.W.array, Net(plain=False).last.W.array)
    assert len(np.frombuffer(expected["updater/model:main/norm/avg_mean"], "f8")) == 8
    assert not list(tmp_path.glob(".*"))


# -- files ----------------------------------------------------------------------------------------


def test_autoload_takes_newest_snapshot_and_removes_old_files(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert run("shm-2", auto, out, 4) == [(0, 4)] * 2
    assert sorted(file.name for file in (tmp_path / "out").glob("snap*")) == ["snap-3", "snap-4"]
    assert run("shm-2", auto, out, 6) == [(4, 6)] * 2
    assert sorted(file.name for file in (tmp_path / "out").glob("snap*")) == ["snap-5", "snap-6"]


def auto(comm: Any, out: str, steps: int) -> Any:
    trainer = trainer_of(comm, steps, out, "sharded")
    snapshot = MultiNodeSnapshot(comm, "snap-{.updater.iteration}", autoload=True, retain=2)
    trainer.extend(snapshot, trigger=(1, "iteration"))
    started: list[int] = []

    @training.make_extension(trigger=(1, "iteration"), priority=10_000)
    def note(trainer: Any) -> None:
        started.append(trainer.updater.iteration - 1)

    trainer.extend(note)
    trainer.run()
    return started[0], trainer.updater.iteration


@on("shm-2")
def test_failed_snapshot_write_keeps_old_file(comm: Any, tmp_path: Path) -> None:
    net, path = L.Linear(3, 3), tmp_path / "state"
    save_snapshot(path, net, comm)
    before = path.read_bytes()
    full = OSError(28, "No space left on device")
    with (
        mock.patch("os.fsync", side_effect=full),
        pytest.raises(CollectiveError, match=r"rank 0 could not write .*unharmed"),
    ):
        save_snapshot(path, net, comm)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]
    comm.barrier()


@on("shm-2")
def test_unreadable_snapshot_raises_on_all_ranks(comm: Any, tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"PK\x03\x04 and no more")
    save_snapshot(tmp_path / "good", L.Linear(3, 3), comm)
    for name, columns, text in (
        ("missing", 3, "could not read .*No such file"),
        ("broken", 3, "could not read"),
        ("good", 3 + comm.rank, "does not fit the target of rank 1"),
    ):
        with pytest.raises(CollectiveError, match=text):
            load_snapshot(tmp_path / name, L.Linear(3, columns), comm)
