"""``collective.elastic`` without frameworks: copies, sync and generations of a state."""

from __future__ import annotations

import copy
import os
import signal
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective import elastic
from collective.backends.threads import ThreadsBackend
from collective.errors import InvalidArgumentError, MismatchError
from collective.testing import RankPool
from tests.support.on_ranks import on_ranks, ranks_of
from tests.support.selection import in_whole

LARGE = 1 << 17  # float64, so 1 MiB, which stands out from the ranks' control messages


ranks = ranks_of(("threads", 3))


def sizes_of_calls(comm: collective.Communicator) -> list[int]:
    """Return a list to which later calls of ``comm``, and of groups made of it, add their sizes."""
    sizes: list[int] = []
    make = comm.group

    def group(ranks):
        child = make(ranks)
        child.hook(lambda event: sizes.append(event.nbytes))
        return child

    comm.group = group
    comm.hook(lambda event: sizes.append(event.nbytes))
    return sizes


# -- copies --------------------------------------------------------------------------


@pytest.fixture
def one():
    with collective.init(size=1, rank=0) as comm:
        yield comm


def test_state_commit_shares_no_memory_with_parts(one):
    weights, nested = np.arange(3.0), {"a": [np.zeros(2), (1, 2)], "b": {}}
    state = elastic.State(one, weights=weights, nested=nested, step=0)
    for _ in range(2):  # a restored value may be changed like a committed value
        weights += 1
        state.nested["a"][0] += 1
        state.nested["b"]["c"] = 1
        state.step += 5
        state.restore()
        assert state.weights is weights
        assert weights.tolist() == [0, 1, 2]
        assert state.nested["a"][0].tolist() == [0, 0]
        assert (state.nested["b"], state.step) == ({}, 0)


def test_state_commits_alternate_between_two_sets_of_arrays(one):
    state = elastic.State(one, weights=np.zeros(LARGE), other=[np.ones(3, np.int8)])
    state.commit()
    tracemalloc.start()
    try:
        for turn in range(4):
            state.weights += 1
            state.other[0] += turn
            state.commit()
        assert tracemalloc.get_traced_memory()[1] < state.weights.nbytes / 2
    finally:
        tracemalloc.stop()
    state.weights[:] = -1
    state.other[0][:] = -1
    state.restore()
    assert set(state.weights) == {4}
    assert state.other[0].tolist() == [7, 7, 7]


def test_state_commit_accepts_changed_shapes_and_dtypes(one):
    state = elastic.State(one, history=np.zeros(1), kind=np.zeros(2, np.int8))
    for length in range(2, 6):
        state.history = np.arange(float(length))
        state.kind = np.full(2, 0.5 * length, "f2" if length % 2 else "f4")
        state.commit()
    state.history[:], state.kind[:] = -1, -1
    state.restore()
    assert (state.history.tolist(), state.kind.tolist()) == ([0, 1, 2, 3, 4], [2.5, 2.5])
    assert state.kind.dtype == "f2"


class Unlucky:
    """Object whose ``state_dict`` raises while ``fails`` is set."""

    fails = False

    def state_dict(self):
        if self.fails:
            raise KeyboardInterrupt
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("committed", [None, 2.5, np.ones(1), np.ones(3, np.float32)])
def test_state_restores_a_part_that_was_another_array_since(one, committed: Any):
    state = elastic.State(one, part=committed)
    state.part = np.zeros(3)
    state.restore()
    np.testing.assert_array_equal(state.part, committed, strict=isinstance(committed, np.ndarray))


def test_state_interrupted_commit_keeps_previous_commit(one):
    state = elastic.State(one, weights=np.zeros(3), unlucky=Unlucky())
    for turn in range(1, 6):
        state.weights[:] = turn
        state.commit()
        state.unlucky.fails = True
        for _ in range(2):
            state.weights[:] = -turn
            with pytest.raises(KeyboardInterrupt):
                state.commit()
        state.unlucky.fails = False
        state.restore()
        assert (state.weights.tolist(), state.commits) == ([turn] * 3, turn)


class Counter:
    value = 0


def test_register_applies_to_derived_classes(one):
    class Derived(Counter):
        pass

    def load(counter, value):
        counter.value = value
        return counter

    elastic.register(Counter, lambda counter: counter.value, load)
    counter = Derived()
    state = elastic.State(one, counter=counter)
    counter.value = 7
    state.commit()
    counter.value = 8
    state.restore()
    assert (state.counter, counter.value, state.commits) == (counter, 7, 1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"commit": 1}, "a part called 'commit'"),
        ({"comm": 1}, "a part called 'comm'"),
        (
            {"thing": {"x": [object()]}},
            "part 'thing' holds a object (at x.0), which cannot be kept",
        ),
    ],
)
def test_state_with_unsuitable_part_raises_invalid_argument(one, parts: dict[str, Any], said: str):
    with pytest.raises(InvalidArgumentError) as caught:
        elastic.State(one, **parts)
    assert said in str(caught.value)


def test_state_access_to_missing_part_raises_error(one):
    state = elastic.State(one, step=0)
    with pytest.raises(AttributeError, match="no part 'stop'; it has"):
        state.stop = 1
    with pytest.raises(AttributeError, match="no part 'stop'; it has"):
        _ = state.stop
    assert copy.copy(state).step == 0  # copy() looks up attributes before the copy has any parts
    with pytest.raises(InvalidArgumentError, match="no part sampler; there are step"):
        state.commit(sampler=3)


# -- sync ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commits", "found"),
    [
        ([1, 2, 2], (2, 11.0, 2)),  # rank 1 is the lowest rank with the most commits
        ([0, 0, 1], (1, 2.0, 1)),
        ([2, 1, 1], (2, 10.0, 2)),
        ([0, 0, 0], (0, 0.0, 0)),
    ],
)
@on_ranks("ranks")
def test_state_sync_takes_lowest_rank_with_most_commits(comm, commits, found):
    state = elastic.State(comm, weights=np.zeros(2), step=0)
    for _ in range(commits[comm.rank]):
        state.weights[:] = comm.rank + 10 * state.commits
        state.step += 1
        state.commit()
    state.weights[:] = -1  # changed in a step that no rank has committed
    state.sync(comm)
    assert (state.step, float(state.weights[0]), state.commits) == found


def sent(comm, differ: list[int], large: bool) -> int:
    """Return the bytes of the longest call of a sync where the ranks ``differ`` differ."""
    parts = {"weights": np.ones(LARGE), "buffers": np.ones(LARGE), "step": 3}
    state = elastic.State(comm, **parts)
    if comm.rank in differ:
        state.weights[:] = comm.rank + 2 if large else 1
        state.step = 3 if large else comm.rank
        state.commit()
        state.__dict__["_kept"].number = 0
    call_sizes = sizes_of_calls(comm)
    state.sync(comm)
    expected = state.step, float(state.weights.sum()), float(state.buffers.sum())
    assert comm.all_gather_object(expected) == [expected] * comm.size
    return max(call_sizes)


@on_ranks("ranks")
def test_state_sync_sends_nothing_to_ranks_with_same_values(comm):
    assert sent(comm, [], False) < 4096


@on_ranks("ranks")
def test_state_sync_sends_only_differing_array(comm):
    most, arrays = sent(comm, [2], True), comm.rank != 1
    assert 8 * LARGE * arrays <= most < 8 * LARGE * arrays + 4096  # one of the two arrays


@on_ranks("ranks")
def test_state_sync_of_differing_number_sends_no_array(comm):
    assert sent(comm, [1, 2], False) < 4096


@on_ranks("ranks")
def test_state_sync_with_different_parts_raises_mismatch_error(comm):
    with pytest.raises(MismatchError, match=r"rank 2 has parts \['step1'\], rank 0 \['step0'\]"):
        elastic.State(comm, **{f"step{comm.rank // 2}": 0}).sync(comm)


@on_ranks("ranks")
def test_state_sync_sends_structure_with_values(comm):
    """Sync structures that differ, such as an optimizer's before and after its first step."""
    own = {} if comm.rank == 2 else {0: {"momentum": np.full(3, comm.rank + 1.0)}, "n": (1, None)}
    state = elastic.State(comm, optimizer=own)
    if comm.rank == 1:
        state.commit()
    state.sync(comm)
    assert state.optimizer[0]["momentum"].tolist() == [2.0] * 3
    assert state.optimizer["n"] == (1, None)


@on_ranks("ranks")
def test_state_sync_restores_numpy_numbers(comm):
    state = elastic.State(comm, best=1.0, done=False)
    state.best, state.done = np.float64(comm.rank), np.bool_(False)
    state.commit()
    state.best, state.done = np.float64(9), np.bool_(True)
    state.sync(comm)
    assert (float(state.best), bool(state.done)) == (0.0, False)


# -- generations ---------------------------------------------------------------------


def trained(comm, losses: dict[int, int], min_ranks: int = 1) -> Any:
    """Train six steps; rank ``r`` of the first generation is lost in step ``losses[r]``."""
    origin = comm.rank
    state = elastic.State(comm, weights=np.zeros(2), step=0)
    sizes = []
    for generation in elastic.generations(comm, state, min_ranks=min_ranks):
        with generation as comm:
            sizes.append(comm.size)
            while state.step < 6:
                if losses.get(origin) == state.step:
                    comm.close()
                    return "lost"
                state.weights += comm.all_reduce(np.full(2, 10.0**origin))
                state.step += 1
                state.commit()
    return [*sizes, float(state.weights[0]), comm.all_gather_object(state.step)]


@pytest.mark.parametrize(
    ("losses", "sizes"),
    [
        ({}, [3]),
        ({2: 4}, [3, 2]),
        ({0: 2}, [3, 2]),
        ({0: 0, 1: 5}, [3, 2, 1]),
        ({1: 3, 2: 3}, [3, 1]),  # or [3, 2, 1], if the ranks see the losses one after the other
    ],
)
def test_generations_continue_after_loss_and_count_each_step_once(ranks, losses, sizes):
    total = sum(losses.get(rank, 6) * 10.0**rank for rank in range(3))
    for rank, result in enumerate(ranks.run(trained, losses)):
        if rank in losses:
            assert result == "lost"
            continue
        *observed_sizes, weights, steps = result
        assert weights == total
        assert steps == [6] * sizes[-1]
        assert (observed_sizes[0], observed_sizes[-1]) == (sizes[0], sizes[-1])
        assert len(losses) == 2 or observed_sizes == sizes


def too_few(comm) -> Any:
    try:
        return trained(comm, {1: 3}, min_ranks=3)
    except collective.PeerLostError as error:
        return error.ranks


def test_generations_below_min_ranks_raise_peer_lost_on_all(ranks):
    assert ranks.run(too_few) == [(1,), "lost", (1,)]


@on_ranks("ranks")
def test_generations_do_not_end_while_any_rank_has_to_repeat(comm):
    state = elastic.State(comm, step=0)
    steps = []
    for generation in elastic.generations(comm, state):
        with generation as comm:
            steps.append(state.step)
            if state.step == 0:
                state.step = 1
                state.commit()
                if comm.rank == 0:
                    raise collective.PeerLostError("found in the last call, by one rank alone")
    assert [*steps, comm.size] == [0, 1, 3]


def stuck(comm) -> str:
    state = elastic.State(comm, step=0)
    try:
        for generation in elastic.generations(comm, state):
            with generation as comm:
                if comm.rank == 1:
                    raise collective.CollectiveTimeoutError("of a call that never ends")
                comm.barrier()
    except collective.CollectiveError as error:
        return type(error).__name__
    return "through"


def test_generations_without_progress_raise_the_error(ranks):
    names = ranks.run(stuck)
    assert names[1] == "CollectiveTimeoutError"
    assert "through" not in names


def failing(comm) -> Any:
    origin = comm.rank
    state = elastic.State(comm, step=0)
    try:
        for generation in elastic.generations(comm, state):
            with generation as comm:
                if origin == 2:
                    comm.close()
                    return "lost"
                comm.barrier()
                if origin == 1:
                    raise KeyError("the program's own")
                comm.barrier()
    except KeyError:
        return "failed"
    return comm.size


def test_generations_pass_other_errors_and_lose_the_rank(ranks):
    assert ranks.run(failing) == [1, "failed", "lost"]


@on_ranks("ranks")
def test_generations_with_body_that_does_not_enter_raise_error(comm):
    with pytest.raises(InvalidArgumentError, match="`with generation as comm:`"):
        list(elastic.generations(comm, elastic.State(comm)))


AWAKE = threading.Event()


def silent(comm) -> Any:
    origin = comm.rank
    state = elastic.State(comm, step=0)
    try:
        for generation in elastic.generations(comm, state, timeout=2.0):
            with generation as comm:
                if comm.membership.generation == 0:
                    if origin == 2:
                        AWAKE.wait(60)
                        comm.barrier()
                    raise collective.CollectiveTimeoutError("rank 2 did not come")
                state.step += 1
                state.commit()
    except collective.ExcludedError:
        return "excluded"
    finally:
        if origin == 1:
            AWAKE.set()
    return [state.step, comm.size]


def test_generations_exclude_silent_rank(ranks):
    AWAKE.clear()
    assert ranks.run(silent) == [[1, 2], [1, 2], "excluded"]


def stopped(comm, marks: str) -> Any:
    origin = comm.rank
    if origin == 2:
        Path(marks, "pid").write_text(str(os.getpid()))
    state = elastic.State(comm, step=0)
    try:
        for generation in elastic.generations(comm, state):
            with generation as comm:
                if comm.membership.generation == 0:
                    comm.barrier()
                    comm.timeout = 0.5
                    if origin == 2:
                        os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    comm.timeout = 60.0
                comm.barrier()
                state.step += 1
                state.commit()
    except collective.ExcludedError:
        return "excluded"
    if origin == 1:
        os.kill(int(Path(marks, "pid").read_text()), signal.SIGCONT)
    return [state.step, comm.size]


@pytest.mark.parametrize("transport", ["shm", *map(in_whole, ("tcp", "gloo", "hierarchical"))])
def test_generations_exclude_stopped_rank_with_any_timeout(transport, tmp_path):
    if transport not in ("shm", "tcp"):
        pytest.importorskip("torch", reason="gloo stands on PyTorch")
    with RankPool(3, transport, timeout=120.0) as pool:
        results = pool.run(stopped, str(tmp_path), shrink_grace=2.0)
    assert results == [[1, 2], [1, 2], "excluded"]


def given_up(comm) -> Any:
    """Let rank 0 time out in an agreement in which rank 1 waits; rank 2 never calls it."""
    if comm.rank == 2:
        AWAKE.wait(60)
        return None
    try:
        comm.membership.agree(timeout=0.1 if comm.rank == 0 else 60.0)
    except (collective.CollectiveTimeoutError, collective.CommunicatorAbortedError) as error:
        outcome = type(error).__name__
    following = comm.shrink()
    size = following.size
    following.barrier()
    AWAKE.set()
    return outcome, size


def test_agree_ends_when_another_rank_shrinks(ranks):
    AWAKE.clear()
    results = ranks.run(given_up, shrink_grace=2.0)
    assert results[:2] == [("CollectiveTimeoutError", 2), ("CommunicatorAbortedError", 2)]


class Lasting(ThreadsBackend):
    """Transport that does not support ``shrink``."""

    capabilities = replace(ThreadsBackend.capabilities, shrinks=False)


def once(comm, loss: bool) -> Any:
    state = elastic.State(comm, step=0)
    try:
        for generation in elastic.generations(comm, state):
            with generation as comm:
                if loss:
                    raise collective.PeerLostError("as it is", (1,))
                state.step += 1
    except collective.PeerLostError as error:
        return str(error)
    return state.step


@pytest.mark.parametrize(("loss", "found"), [(False, 1), (True, "as it is")])
def test_generations_run_once_on_transport_without_shrink(loss, found):
    with RankPool(2, Lasting, timeout=60.0) as pool:
        assert pool.run(once, loss) == [found] * 2
