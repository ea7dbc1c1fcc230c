"""Elastic training that new processes join: they receive the state, and each step counts once."""

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
from collective.generations.arrivals import Arrivals
from collective.start.connecting import connect_alone
from collective.start.stores import MemoryStore
from tests.elastic.test_shrinking import FAR_S, on_threads
from tests.support.interpreter import run_python

Program = Callable[..., Any]
STEPS, JOINS_AT = 6, 3


def together(program: Program, joining: int = 1, size: int = 2) -> tuple[list[Any], list[Any]]:
    """Return the results of ``program(comm, hold)`` on the ranks, and on the processes that join.

    The new processes arrive in the call ``hold(JOINS_AT)``, and not before.
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
        results = on_threads(size, partial(program, hold=hold), store)
        return results, [future.result(FAR_S) for future in joined]


def trained(comm: Communicator, hold: Any, grow: bool = True) -> Any:
    """Train; return the number of ranks in each step, the total, and the number of commits."""
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


def test_generations_give_state_to_joining_process() -> None:
    results, joined = together(trained)
    # The ranks grow at the commit of the step in which a process waits.
    assert results + joined == [([2, 2, 2, 2, 3, 3], 14.0, STEPS)] * 3


def test_generations_admit_several_processes_at_once() -> None:
    results, joined = together(trained, joining=2)
    assert results + joined == [([2, 2, 2, 2, 4, 4], 16.0, STEPS)] * 4


def test_generations_without_grow_end_joining_program() -> None:
    def program(comm: Communicator, hold: Any) -> Any:
        if not comm.membership.joins:
            # Otherwise the joining process could not tell that ranks are running.
            comm.membership.waiting()
        return trained(comm, hold, grow=False)

    results, joined = together(program)
    assert results == [([2] * STEPS, 12.0, STEPS)] * 2
    assert isinstance(joined[0], SystemExit)
    assert joined[0].code == 0


def grown_by_hand(comm: Communicator, hold: Any) -> Any:
    state = elastic.State(comm, step=comm.rank)
    if comm.membership.joins:
        state.step = 100
        state.commit()
    else:
        state.sync(comm)
        comm.membership.waiting()
        hold(JOINS_AT)
    with comm.grow() as grown:
        state.sync(grown)
        return state.step, state.commits


def test_state_sync_discards_commits_of_joining_process() -> None:
    results, joined = together(grown_by_hand)
    assert results + joined == [(0, 0)] * 3


def sharded(comm: Communicator, hold: Any) -> Any:
    """Train with gradients that are equal on all ranks; return the weights."""
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


def test_sharded_optimizer_is_redistributed_after_join() -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("collective.adapters.torch")  # before several threads import it at once
    results, joined = together(sharded)
    alone = [torch.full((3,), float(n), requires_grad=True) for n in range(4)]
    optimizer = torch.optim.Adam(alone, lr=0.1)
    for step in range(STEPS):
        for n, weight in enumerate(alone):
            weight.grad = torch.full((3,), float(n + step + 1))
        optimizer.step()
    expected = [weight.detach().numpy().tobytes() for weight in alone]
    assert results + joined == [expected] * 3


def with_chainer(comm: Communicator, hold: Any) -> Any:
    """Train with a loss function passed to ``update``, as updaters do; return the weights."""
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


def test_chainer_optimizer_of_joining_process_takes_state() -> None:
    if importlib.util.find_spec("chainer") is None:
        pytest.skip("chainer is not installed")
    importlib.import_module("collective.adapters.chainer")
    results, joined = together(with_chainer)
    np.testing.assert_allclose(results + joined, [[[0.5 - 0.1 * STEPS] * 2]] * 3, rtol=1e-5)


# -- the launcher -----------------------------------------------------------------------------

# The program ends when three ranks are together again, or at the step given as argument.
PROGRAM = """
import os, signal, sys
import numpy as np
import collective
from collective import elastic

ending, dying = int(sys.argv[1]), [int(rank) for rank in sys.argv[2:]]
comm = collective.init()
first = None if comm.membership.joins else comm.rank
state = elastic.State(comm, step=0, done=False)
for generation in elastic.generations(comm, state):
    with generation as comm:
        while not state.done:
            if state.step == 3 and first in dying:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()
            state.step += 1
            state.done = comm.size == 3 and comm.membership.generation > 1 or state.step == ending
            state.commit()
print(f"rank {comm.rank} of {comm.size}: {comm.membership.origin}")
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    launch = ["-m", "collective", "run", "-n", "3", "--min-ranks", "2", "--replace"]
    return run_python(
        *launch, program, *arguments, timeout=3 * FAR_S,
        COLLECTIVE_SHRINK_GRACE="0.5", COLLECTIVE_TIMEOUT=str(FAR_S),
    )  # fmt: skip


def test_launcher_replaces_lost_rank(tmp_path: Path) -> None:
    done = run(tmp_path, "-1", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] rank 2 of 3: (1, 2, 3)", "[1] rank 0 of 3: (1, 2, 3)", "[2] rank 1 of 3: (1, 2, 3)"
    ]  # fmt: skip
    assert "2 of 3 ranks are left, and 2 are enough. A new process will join them." in done.stderr
    assert "collective run: 1 of 3 ranks was lost:" in done.stderr


def test_launcher_replacement_that_is_late_ends_without_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "5", "1")
    assert done.returncode == 0, done.stderr
    assert "[1] collective: join: the ranks that met at" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] rank 0 of 2: (0, 2)", "[2] rank 1 of 2: (0, 2)"
    ]  # fmt: skip


# Rank 1 is lost after rank 0 has finished. Each replacement would fail to reach the store.
LOST_AT_THE_END = """
import os, sys, time
if os.environ["COLLECTIVE_RANK"] == "1":
    print("begins", flush=True)
    time.sleep(1.0)
    sys.exit(3)
"""


def test_launcher_replaces_no_rank_once_the_others_have_finished(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOST_AT_THE_END)
    launch = ["-m", "collective", "run", "-n", "2", "--min-ranks", "1", "--replace", program]
    done = run_python(*launch, timeout=FAR_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1] begins\n"
    assert "1 of 2 ranks are left, and 1 are enough.\n" in done.stderr


def test_launcher_does_not_count_waiting_process_for_min_ranks(tmp_path: Path) -> None:
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
def test_launcher_refuses_replace_with_unsuitable_options(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from collective.tools.cli.main import main

    assert main(["run", "-n", "2", *options, __file__]) == 2
    assert text in capsys.readouterr().err
