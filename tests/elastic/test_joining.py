"""Elastic training that processes join: they get the state, and each step counts once."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective import elastic
from collective.backends.threads import ThreadsBackend
from collective.communicator import Communicator
from collective.contract.world import World
from collective.elastic.arrivals import Arrivals
from collective.start.connecting import connect_alone
from collective.start.memory_store import MemoryStore
from tests.elastic.test_shrinking import FAR_S, on_threads
from tests.support.interpreter import run_python

Program = Callable[..., Any]
STEPS, JOINS_AT = 6, 3


def together(program: Program, joining: int = 1, size: int = 2) -> tuple[list[Any], list[Any]]:
    """Return what ``program(comm, hold)`` returns on ranks, and on those that join them.

    At step ``JOINS_AT``, and not before, ``hold(step)`` has those come who want to join.
    """
    store, begun = MemoryStore(), threading.Event()
    queue = Arrivals(store, "threads")

    def hold(step: int) -> None:
        if step == JOINS_AT:
            begun.set()
            while len(queue.waiting()) < joining:
                time.sleep(0.001)

    def join() -> Any:
        world = World(0, 1, 0, 1, "a", "none", "job", store)
        alone = connect_alone(world, lambda name: ThreadsBackend, timeout=FAR_S, shrink_grace=0.05)
        begun.wait(FAR_S)
        try:
            return program(alone, lambda step: None)
        except SystemExit as end:
            return end

    with ThreadPoolExecutor(max(1, joining)) as pool:
        joined = [pool.submit(join) for _ in range(joining)]
        found = on_threads(size, partial(program, hold=hold), store)
        return found, [each.result(FAR_S) for each in joined]


def trained(comm: Communicator, hold: Any, grow: bool = True) -> Any:
    """Return the sizes of the ranks in each generation, and the steps of each."""
    state = elastic.State(comm, total=np.zeros(1), step=0, sizes=[])
    for generation in elastic.generations(comm, state, grow=grow):
        with generation as comm:
            while state.step < STEPS:
                hold(state.step)
                state.total += comm.all_reduce(np.ones(1))
                state.step += 1
                state.sizes = [*state.sizes, comm.size]
                state.commit()
    return state.sizes, float(state.total[0]), state.commits


def test_who_joins_gets_the_state_and_each_step_counts_once() -> None:
    found, joined = together(trained)
    # The commit of the step in which somebody waits is that of all.
    assert found + joined == [([2, 2, 2, 2, 3, 3], 14.0, STEPS)] * 3


def test_several_join_at_once() -> None:
    found, joined = together(trained, joining=2)
    assert found + joined == [([2, 2, 2, 2, 4, 4], 16.0, STEPS)] * 4


def test_without_growing_nobody_is_let_in_and_its_program_ends() -> None:
    def program(comm: Communicator, hold: Any) -> Any:
        if not comm.joins:
            comm.waiting()  # or it would not know that there is anybody
        return trained(comm, hold, grow=False)

    found, joined = together(program)
    assert found == [([2] * STEPS, 12.0, STEPS)] * 2
    assert isinstance(joined[0], SystemExit)
    assert joined[0].code == 0


def grown_by_hand(comm: Communicator, hold: Any) -> Any:
    state = elastic.State(comm, step=comm.rank)
    if comm.joins:
        state.step = 100
        state.commit()
    else:
        state.sync(comm)
        comm.waiting()
        hold(JOINS_AT)
    with comm.grow() as grown:
        state.sync(grown)
        return state.step, state.commits


def test_what_one_had_committed_alone_does_not_count() -> None:
    found, joined = together(grown_by_hand)
    assert found + joined == [(0, 0)] * 3


def sharded(comm: Communicator, hold: Any) -> Any:
    """Return the weights of steps whose gradients are the same on all ranks."""
    import torch

    from collective.adapters.torch import ShardedOptimizer

    weights = torch.nn.ParameterList([torch.full((3,), float(n)) for n in range(4)])
    optimizer = ShardedOptimizer(weights, torch.optim.Adam, comm, lr=0.1)
    state = elastic.State(comm, optimizer=optimizer, weights=weights, step=0)
    for generation in elastic.generations(comm, state, grow=True):
        with generation as comm:
            while state.step < STEPS:
                hold(state.step)
                for n, weight in enumerate(weights):
                    weight.grad = torch.full((3,), float(n + state.step + 1))
                optimizer.step()
                state.step += 1
                state.commit()
    return [weight.detach().numpy().tobytes() for weight in weights]


def test_shards_are_shared_out_anew_among_all() -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("collective.adapters.torch")  # and not by several threads at once
    found, joined = together(sharded)
    alone = [torch.full((3,), float(n), requires_grad=True) for n in range(4)]
    optimizer = torch.optim.Adam(alone, lr=0.1)
    for step in range(STEPS):
        for n, weight in enumerate(alone):
            weight.grad = torch.full((3,), float(n + step + 1))
        optimizer.step()
    expected = [weight.detach().numpy().tobytes() for weight in alone]
    assert found + joined == [expected] * 3


def with_chainer(comm: Communicator, hold: Any) -> Any:
    """Return the weights of a model that is updated by a loss function, as updaters do."""
    from collective.adapters.chainer import create_multi_node_optimizer

    import chainer  # isort: skip
    import chainer.links as L  # isort: skip

    model = L.Linear(2, 1, initialW=0.5)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    state = elastic.State(comm, model=model, optimizer=optimizer, step=0)
    x = np.ones((1, 2), np.float32)
    for generation in elastic.generations(comm, state, grow=True):
        with generation as comm:
            while state.step < STEPS:
                hold(state.step)
                optimizer.update(lambda: chainer.functions.sum(model(x)))
                state.step += 1
                state.commit()
    return model.W.array.tolist()


def test_a_chainer_optimizer_makes_its_first_step_among_others_that_have() -> None:
    if importlib.util.find_spec("chainer") is None:
        pytest.skip("chainer is not installed")
    importlib.import_module("collective.adapters.chainer")
    found, joined = together(with_chainer)
    np.testing.assert_allclose(found + joined, [[[0.5 - 0.1 * STEPS] * 2]] * 3, rtol=1e-5)


# -- the launcher -----------------------------------------------------------------------------

# It ends when all three are there again, or as soon as the argument says.
PROGRAM = """
import os, signal, sys
import numpy as np
import collective
from collective import elastic

ending, dying = int(sys.argv[1]), [int(rank) for rank in sys.argv[2:]]
comm = collective.init()
first = None if comm.joins else comm.rank
state = elastic.State(comm, step=0, done=False)
for generation in elastic.generations(comm, state):
    with generation as comm:
        while not state.done:
            if state.step == 3 and first in dying:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()
            state.step += 1
            state.done = comm.size == 3 and comm.generation > 1 or state.step == ending
            state.commit()
print(f"rank {comm.rank} of {comm.size}: {comm.origin}")
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    launch = ["-m", "collective", "run", "-n", "3", "--min-ranks", "2", "--replace"]
    return run_python(
        *launch, program, *arguments, timeout=3 * FAR_S,
        COLLECTIVE_SHRINK_GRACE="0.5", COLLECTIVE_TIMEOUT=str(FAR_S),
    )  # fmt: skip


def test_the_launcher_starts_another_which_joins(tmp_path: Path) -> None:
    done = run(tmp_path, "-1", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] rank 2 of 3: (1, 2, 3)", "[1] rank 0 of 3: (1, 2, 3)", "[2] rank 1 of 3: (1, 2, 3)"
    ]  # fmt: skip
    assert "2 of 3 ranks are left, and 2 are enough. A new process will join them." in done.stderr
    assert "collective run: 1 of 3 ranks was lost:" in done.stderr


def test_one_that_is_there_too_late_ends_in_peace(tmp_path: Path) -> None:
    done = run(tmp_path, "5", "1")
    assert done.returncode == 0, done.stderr
    assert "[1] collective: join: the ranks that met at" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] rank 0 of 2: (0, 2)", "[2] rank 1 of 2: (0, 2)"
    ]  # fmt: skip


def test_one_that_waits_does_not_count_for_the_floor(tmp_path: Path) -> None:
    done = run(tmp_path, "-1", "0", "1")
    assert done.returncode == 128 + 9
    assert "ranks were lost, but 2 must be left to continue: rank" in done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--replace"], "--replace without --min-ranks below 2"),
        (["--replace", "--min-ranks", "1", "--backend", "threads"], "can join neither an MPI"),
        (["--replace", "--min-ranks", "1", "--backend", "mpi"], "can join neither an MPI"),
    ],
    ids=["floor", "threads", "mpi"],
)
def test_what_cannot_be_is_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from collective.tools.cli.main import main

    assert main(["run", "-n", "2", *options, __file__]) == 2
    assert text in capsys.readouterr().err
