"""CuPy's arrays over the transports: staged through host memory, MPI's and NCCL's."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fakes import Fake, FakeArray
from pretended_gpu import gpu

from collective.communicator import Communicator
from collective.testing import RankPool
from tests.mpi_launches import launch_of, needs

cupy = pytest.importorskip("cupy")

from cupy_ranks import AwareMpi, Mpi, Nccl, Shm  # noqa: E402
from pretended_cupy import of, over, pretend, values_of  # noqa: E402

__all__ = ["gpu"]  # a fixture

Run = Callable[..., Any]

_KINDS = {"threads": "threads", "shm": Shm, "nccl": Nccl, "mpi": Mpi, "mpi-aware": AwareMpi}
_LAUNCH = launch_of("mpich")


def _lacks_cupy() -> bool:
    """Whether MPI's environment was built when CuPy was not there."""
    return bool(
        subprocess.run([_LAUNCH.python, "-c", "import cupy"], capture_output=True).returncode
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=needs("mpich") if "mpi" in k else ()) for k in _KINDS],
)
def run(request: pytest.FixtureRequest, gpu: Fake) -> Iterator[Run]:
    name = request.param
    if "mpi" in name and _lacks_cupy():
        pytest.skip("no CuPy in .mpi/mpich; `make test` brings it")
    with contextlib.ExitStack() as opened:
        if name == "threads":
            pretend(opened.enter_context(pytest.MonkeyPatch.context()).setattr)
        pool = RankPool(2, _KINDS[name], timeout=30.0, mpiexec=_LAUNCH)
        yield opened.enter_context(pool).run


def _values(rank: int) -> np.ndarray[Any, Any]:
    return np.arange(24, dtype=np.float32).reshape(4, 6) + 100 * rank


_INPUTS = [_values(rank) for rank in range(2)]
_TOTAL = sum(_INPUTS)
_CUTS = [np.s_[::2], np.s_[:, 1], np.s_[::-1, ::3], np.s_[:0]]


def _same(found: Any, expected: Any, rank: int) -> None:
    assert isinstance(found, cupy.ndarray), type(found)
    assert found.data.device_id == rank
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(values_of(found), expected)


def _new_results(comm: Communicator, **how: Any) -> None:
    rank, other = comm.rank, 1 - comm.rank
    x = of(_INPUTS[rank], rank)
    mine = slice(2 * rank, 2 * rank + 2)
    calls = [
        (comm.all_reduce(x, **how), _TOTAL),
        (comm.all_reduce(x, op="max", order="rank", **how), _INPUTS[1]),
        (comm.broadcast(x, root=1, **how), _INPUTS[1]),
        (comm.all_gather(x, **how), np.concatenate(_INPUTS)),
        (comm.reduce_scatter(x, **how), _TOTAL[mine]),
        (comm.all_to_all(x, **how), np.concatenate([each[mine] for each in _INPUTS])),
        (comm.scan(x, **how), sum(_INPUTS[: rank + 1])),
        (comm.scatter(x if rank == 0 else None, root=0, like=x, **how), _INPUTS[0][mine]),
        (comm.sendrecv(x, other, other, like=x, **how), _INPUTS[other]),
    ]
    for found, expected in calls:
        _same(found.wait() if how else found, expected, rank)
    tree = comm.all_reduce({"a": x, "b": [x[0]]}, **how)
    tree = tree.wait() if how else tree
    _same(tree["a"], _TOTAL, rank)
    _same(tree["b"][0], _TOTAL[0], rank)


def test_results_are_cupys(run: Run) -> None:
    run(_new_results)


def test_results_in_the_background_are_cupys(run: Run) -> None:
    run(_new_results, async_op=True)


def _into_out(comm: Communicator) -> None:
    rank = comm.rank
    x, out = of(_INPUTS[rank], rank), of(np.zeros((4, 6), np.float32), rank)
    for _ in range(3):  # what is called again is not prepared again
        assert comm.all_reduce(x, out=out) is out
        _same(out, _TOTAL, rank)
    _same(x, _INPUTS[rank], rank)
    assert comm.all_reduce(x, out=x) is x
    _same(x, _TOTAL, rank)
    if rank:
        comm.send(of(_INPUTS[1], rank), 0)
    else:
        assert comm.recv(out, src=1) is out
        _same(out, _INPUTS[1], rank)


def test_results_go_to_out(run: Run) -> None:
    run(_into_out)


def _strided(comm: Communicator) -> None:
    rank = comm.rank
    for cut in _CUTS:
        whole = of(np.full((4, 6), -1, np.float32), rank)
        _same(comm.all_reduce(of(_INPUTS[rank], rank)[cut]), _TOTAL[cut], rank)
        out = whole[cut]
        assert comm.all_reduce(of(_INPUTS[rank][cut], rank), out=out) is out
        expected = np.full((4, 6), -1, np.float32)
        expected[cut] = _TOTAL[cut]
        _same(whole, expected, rank)
    _same(comm.broadcast(of(_INPUTS[rank], rank).T, root=1), _INPUTS[1].T, rank)


def test_strided_arrays(run: Run) -> None:
    run(_strided)


def _late(comm: Communicator) -> None:
    rank = comm.rank
    with cupy.cuda.Device(rank), Fake().turned("delay_us", 20_000):
        stream = Fake().stream(rank)
        with cupy.cuda.ExternalStream(stream, rank):
            x = over(FakeArray.of(_INPUTS[rank], rank, stream))
            _same(comm.all_reduce(x), _TOTAL, rank)


def test_calls_come_after_the_work_on_cupys_stream(run: Run) -> None:
    run(_late)
