"""Calls that are made again on the same tensors of the CPU, which are prepared once."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from collective.communicator.calls import Calls  # noqa: E402
from collective.memory.arrays import adapter_of  # noqa: E402
from collective.testing import RankPool  # noqa: E402
from tests.lanes import behind_another  # noqa: E402

N = 20_011


@pytest.fixture(scope="module", params=["threads", "shm"])
def two(request: pytest.FixtureRequest) -> Any:
    with RankPool(2, request.param, timeout=30.0) as made:
        yield made


def kept(comm: Any, x: Any, out: Any) -> bool:
    return comm._repeated.find(("all_reduce", "sum", None), x, out) is not None


def reduce_and_check(comm: Any, x: Any, out: Any = None) -> None:
    """All-reduce twice, of other values each time, whatever ``x`` has become."""
    out = x if out is None else out
    for step in (1, 2):
        with torch.no_grad():
            x.fill_(step + comm.rank)
        assert comm.all_reduce(x, out=out) is out
        expected = torch.full(x.shape, 2.0 * step + 1, dtype=x.dtype)
        assert torch.equal(out.detach().resolve_conj().resolve_neg(), expected)


@pytest.mark.parametrize("memory", ["ordinary", "symmetric"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_call_is_kept_from_the_third_on(
    two: RankPool, memory: str, dtype: str, in_place: bool
) -> None:
    two.run(third_time, memory, dtype, in_place)


def third_time(comm: Any, memory: str, dtype: str, in_place: bool) -> None:
    def new() -> Any:
        if memory == "symmetric":
            return comm.empty(N, dtype, like="torch")
        return torch.empty(N, dtype=getattr(torch, dtype))

    x = new()
    out = x if in_place else new()
    assert not kept(comm, x, out)
    reduce_and_check(comm, x, out)
    assert kept(comm, x, out)
    reduce_and_check(comm, x, out)
    with torch.no_grad():
        x.fill_(comm.rank + 1)
    comm.all_reduce(x, out=out, async_op=True).wait()
    assert (out == 3).all()


def new_data(x: Any) -> None:
    x.data = torch.empty(N)


def shorter(x: Any) -> None:
    x.data = x.data[: N - 1]


def later(x: Any) -> None:
    x.data = x.data[1:]


def retyped(x: Any) -> None:
    x.data = x.data.view(torch.int32)


def two_dimensional(x: Any) -> None:
    x.data = x.data[: N - N % 2].reshape(2, -1)


def transposed(x: Any) -> None:
    x.data = x.data[: N - N % 2].reshape(2, -1)
    x.t_()


def strided(x: Any) -> None:
    x.as_strided_((N // 2,), (2,))


def conjugated(x: Any) -> None:
    x.data = torch.empty(N, dtype=torch.complex64).conj()


def negated(x: Any) -> None:
    x.data = torch.empty(N, dtype=torch.complex64).conj().imag


def trained(x: Any) -> None:
    x.requires_grad_()


def set_elsewhere(x: Any) -> None:
    x.set_(torch.empty(N))


CHANGES = (
    new_data, shorter, later, retyped, two_dimensional, transposed, strided, conjugated, negated,
    trained, set_elsewhere,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_has_changed_is_looked_at_again(two: RankPool, change: Any) -> None:
    two.run(changed, change)


def changed(comm: Any, change: Callable[[Any], None]) -> None:
    x = torch.empty(N)
    reduce_and_check(comm, x)
    assert kept(comm, x, x)
    change(x)
    assert not kept(comm, x, x)
    if x.is_conj() or x.is_neg():
        return  # no output; as an input it is another call
    reduce_and_check(comm, x)
    reduce_and_check(comm, x)


def test_a_lazily_conjugated_or_negated_input_takes_the_long_way(two: RankPool) -> None:
    two.run(lazy)


def lazy(comm: Any) -> None:
    z = torch.full((N,), 1 + 2j * (comm.rank + 1), dtype=torch.complex64)
    out, imaginary = torch.empty(N, dtype=torch.complex64), torch.empty(N)
    for _ in range(4):
        assert (comm.all_reduce(z.conj(), out=out) == 2 - 6j).all()
        negative = z.conj().imag
        assert negative.is_neg()
        assert (comm.all_reduce(negative, out=imaginary) == -6).all()
        assert not kept(comm, negative, imaginary)


def test_an_output_that_has_changed_is_looked_at_again(two: RankPool) -> None:
    two.run(changed_output)


def changed_output(comm: Any) -> None:
    x, out = torch.empty(N), torch.empty(N)
    reduce_and_check(comm, x, out)
    assert kept(comm, x, out)
    before, out.data = out.data, torch.empty(N)
    before.zero_()
    reduce_and_check(comm, x, out)
    assert not before.any()


def test_memory_is_let_go_with_its_tensor(two: RankPool) -> None:
    two.run(let_go)


def let_go(comm: Any) -> None:
    repeated = comm._repeated
    for make in (lambda: torch.empty(N), lambda: comm.empty(N, like="torch")):
        x = make()
        reduce_and_check(comm, x)
        assert kept(comm, x, x)
        storage = weakref.ref(x.untyped_storage())
        del x
        gc.collect()
        comm.barrier()  # `threads` refers to the arrays of a call until the next one
        assert storage() is None
    x = torch.empty(N)
    reduce_and_check(comm, x)
    storage = weakref.ref(x.untyped_storage())
    x.data = torch.empty(N)
    reduce_and_check(comm, x)
    assert storage() is None
    del x, storage
    assert not repeated._settled


def test_tensors_with_the_id_of_an_earlier_one_are_not_taken_for_it(two: RankPool) -> None:
    for reused in two.run(new_tensors):
        assert reused, "the test is void: no id came twice"


def new_tensors(comm: Any) -> int:
    memory = comm.empty(4 * N, like="torch")
    seen: set[int] = set()
    reused = 0
    for step in range(30):
        start = 16 * ((step + comm.rank * (step > 15)) % 5)
        view = memory[start : start + N]
        reused += id(view) in seen
        seen.add(id(view))
        for _ in range(1 + step % 3):
            reduce_and_check(comm, view)
        del view
    assert not comm._repeated._settled
    return reused


def test_other_classes_of_tensors_take_the_long_way(two: RankPool) -> None:
    two.run(other_classes)


class Own(torch.Tensor):  # type: ignore[misc, unused-ignore]
    pass


def other_classes(comm: Any) -> None:
    x = torch.empty(N).as_subclass(Own)
    reduce_and_check(comm, x)
    assert not kept(comm, x, x)
    parameter = torch.nn.Parameter(torch.empty(N))
    reduce_and_check(comm, parameter)
    assert kept(comm, parameter, parameter)
    assert adapter_of(x).place(torch.empty(0)) is None


def test_a_tensor_and_a_numpy_array_in_one_call(two: RankPool) -> None:
    two.run(mixed)


def mixed(comm: Any) -> None:
    x, out = torch.empty(N), np.empty(N, np.float32)
    for step in range(4):
        x.fill_(step + comm.rank)
        assert (comm.all_reduce(x, out=out) == 2 * step + 1).all()
        assert (comm.all_reduce(out, out=x) == 4 * step + 2).all()


def test_other_operations_are_kept_as_well(two: RankPool) -> None:
    two.run(others)


def others(comm: Any) -> None:
    x, piece = torch.empty(2 * N), torch.empty(N)
    joined = torch.empty(4 * N)
    for step in range(4):
        x.fill_(step + comm.rank)
        assert (comm.reduce_scatter(x, out=piece) == 2 * step + 1).all()
        comm.all_gather(x, out=joined)
        assert torch.equal(joined[:: 2 * N], torch.tensor([step, step + 1.0]))
        comm.all_to_all(x, out=x.clone())
        comm.broadcast(x, root=1, out=x)
        assert (x == step + 1).all()
    assert len(comm._repeated._settled) >= 3


class Bare:
    """An array that speaks DLPack and cannot be referred to weakly."""

    __slots__ = ("_array",)

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_arrays_that_cannot_be_referred_to_weakly(two: RankPool) -> None:
    two.run(bare)


def bare(comm: Any) -> None:
    array = np.empty(N, np.float32)
    x = Bare(array)
    for step in range(4):
        array[:] = step + comm.rank
        assert comm.all_reduce(x, out=x) is x
        assert (array == 2 * step + 1).all()


# The call, the elements of its input, and of its output if that is another tensor.
CALLS: dict[str, tuple[Callable[[Any, Any, Any], Any], int, int]] = {
    "all_reduce": (lambda comm, x, out: comm.all_reduce(x, out=out), N, 0),
    "broadcast": (lambda comm, x, out: comm.broadcast(x, out=out), N, 0),
    "reduce_scatter": (lambda comm, x, out: comm.reduce_scatter(x, out=out), 2 * N, N),
    "all_gather": (lambda comm, x, out: comm.all_gather(x, out=out), N, 2 * N),
    "counts": (lambda comm, x, out: comm.all_gather(x, counts=[N, N], out=out), N, 2 * N),
    "all_to_all": (lambda comm, x, out: comm.all_to_all(x, out=out), 2 * N, 2 * N),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_taken_from_what_was_kept_also_behind_others(two: RankPool, name: str) -> None:
    two.run(behind_others, name)


def behind_others(comm: Any, name: str) -> None:
    call, count, result = CALLS[name]
    x = torch.ones(count)
    out = torch.empty(result) if result else x
    for _ in range(2):
        call(comm, x, out)
    with behind_another(comm) as seen:
        call(comm, x, out)
    assert Calls._view.__code__ not in seen


def test_a_call_stays_prepared_where_only_one_rank_has_others_under_way(two: RankPool) -> None:
    two.run(behind_another_on_rank_0)


def behind_another_on_rank_0(comm: Any) -> None:
    x = comm.empty(N, like="torch").fill_(1)
    for _ in range(3):
        comm.all_reduce(x, out=x)
    (settled,) = comm._repeated._settled.values()
    memo = settled.prepared[0].memo
    prepared = memo.get("all_reduce")
    assert (prepared is not None) == (comm.backend == "shm")  # the one that prepares calls
    with behind_another(comm) if comm.rank == 0 else contextlib.nullcontext():
        comm.all_reduce(x, out=x)
    assert list(comm._repeated._settled.values()) == [settled]
    assert memo.get("all_reduce") is prepared
    assert (x == 16).all()
