"""The path in C from a communicator's methods to plans: calls left to Python, and failures."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import collective
from collective import Shards, native
from collective.communicator import Communicator
from collective.communicator.calls.call import Planned
from collective.communicator.calls.views import view
from collective.errors import (
    CollectiveError,
    CommunicatorClosedError,
    InvalidArgumentError,
    MismatchError,
    ShapeError,
)
from collective.memory.dtypes import BY_NUMPY
from collective.request import Request
from collective.testing import RankPool, run_ranks
from tests.support.interpreter import printed
from tests.support.on_ranks import on_ranks, ranks_of

pytestmark = pytest.mark.skipif(
    native.chosen.extension is None, reason="the native core is not in use"
)

Array = np.ndarray[Any, Any]


class Own(np.ndarray):  # type: ignore[type-arg]
    """Subclass of ndarray, as a program may define it."""


def _x(rank: int = 0) -> Array:
    return np.arange(8, dtype=np.float32) + rank


def _strided(rank: int) -> Array:
    return np.repeat(_x(rank), 2)[::2]


def _overlapping(comm: Communicator) -> Array:
    memory = np.concatenate([_x(comm.rank), np.zeros(1, np.float32)])
    return comm.all_reduce(memory[:8], out=memory[1:])  # type: ignore[no-any-return]


#: Calls that C leaves to Python, and that do the same as the plain call.
OTHERS: dict[str, Callable[[Communicator], Any]] = {
    "strides": lambda comm: comm.all_reduce(_strided(comm.rank)),
    "strides of out": lambda comm: comm.all_reduce(_x(comm.rank), out=_strided(0)),
    "a subclass": lambda comm: comm.all_reduce(_x(comm.rank).view(Own)),
    "an operator": lambda comm: comm.all_reduce(_x(comm.rank), op=collective.premul_sum(1)),
    "a timeout": lambda comm: comm.all_reduce(_x(comm.rank), timeout=50.0),
    "async_op": lambda comm: comm.all_reduce(_x(comm.rank), async_op=True).wait(),
    "overlapping": _overlapping,
    "plain": lambda comm: comm.all_reduce(_x(comm.rank)),
}


pool = ranks_of(("threads", 2), ("shm", 2))


@pytest.mark.parametrize("name", OTHERS)
@on_ranks("pool")
def test_call_by_python_matches_call_by_c(comm: Communicator, name: str) -> None:
    way = OTHERS[name if comm.rank else "plain"]
    if "operator" in name:  # the operator is part of the call, so both ranks use it
        way = OTHERS[name]
    assert [*way(comm)] == [*(_x(0) + _x(1))]


#: Calls of every operation that C makes. They are plain, except that ranks that should use Python
#: pass a timeout. In some calls C learns only from the comparison of ranks that lengths differ.
CALLS: dict[str, Callable[[Communicator, float | None], Any]] = {
    "all_reduce": lambda c, t: c.all_reduce(_x(c.rank), op="max", timeout=t),
    "all_reduce, 2 shards": lambda c, t: c.all_reduce(_shards(c, 1), order=Shards(2, c), timeout=t),
    "all_reduce, 7 shards": lambda c, t: _reduce_seven(c, "all_reduce", op="avg", timeout=t),
    "reduce, 7 shards": lambda c, t: _reduce_seven(c, "reduce", root=1, timeout=t),
    "reduce_scatter, 7 shards": lambda c, t: _reduce_seven(c, "reduce_scatter", timeout=t),
    "reduce": lambda c, t: c.reduce(_x(c.rank), root=1, timeout=t),
    "scan": lambda c, t: c.scan(_x(c.rank), timeout=t),
    "reduce_scatter": lambda c, t: c.reduce_scatter(_x(c.rank)[:7], timeout=t),
    "broadcast": lambda c, t: c.broadcast(_x(c.rank), root=1, timeout=t),
    "all_gather": lambda c, t: c.all_gather(_x(c.rank), timeout=t),
    "gather": lambda c, t: c.gather(_x(c.rank), root=1, timeout=t),
    "all_to_all": lambda c, t: c.all_to_all(_x(c.rank), timeout=t),
    "barrier": lambda c, t: c.barrier(timeout=t),
    "broadcast to None": lambda c, t: c.broadcast(None if c.rank else _x(), timeout=t),
    "all_gather, uneven": lambda c, t: c.all_gather(_x()[: 3 + c.rank], timeout=t),
    "all_gather in place": lambda c, t: _all_gather_in_place(c, t),
    "all_gather, counts": lambda c, t: c.all_gather(_rows(c.rank), counts=[3, 4], timeout=t),
    "all_gather, counts, in place": lambda c, t: _counted_in_place(c, t),
    "gather, counts": lambda c, t: c.gather(_rows(c.rank), root=1, counts=(3, 4), timeout=t),
    "gather, uneven": lambda c, t: c.gather(_x()[: 3 + c.rank], timeout=t),
    "all_to_all, uneven": lambda c, t: c.all_to_all(_x()[: 6 + c.rank], timeout=t),
}


def _shards(comm: Communicator, rows: int) -> Array:
    return np.stack([_x(comm.rank)] * rows)


def _reduce_seven(comm: Communicator, operation: str, **options: Any) -> Any:
    rows = _shards(comm, 4 - comm.rank)
    return getattr(comm, operation)(rows, order=Shards(7, comm), **options)


def _all_gather_in_place(comm: Communicator, timeout: float | None) -> Array:
    out = np.zeros(4, np.float32)
    mine = out[2 * comm.rank :][:2]
    mine[:] = comm.rank + 1
    return comm.all_gather(mine, out=out, timeout=timeout)  # type: ignore[no-any-return]


def _rows(rank: int) -> Array:
    return _x(rank)[: 3 + rank]


def _counted_in_place(comm: Communicator, timeout: float | None) -> Array:
    out = np.zeros((7, 2), np.float32)
    mine = out[3:] if comm.rank else out[:3]
    mine[:] = comm.rank + 1
    result = comm.all_gather(mine, counts=[3, 4], out=out, timeout=timeout)
    return result.ravel()  # type: ignore[no-any-return]


@on_ranks("pool")
def test_counts_distinguish_plans(comm: Communicator) -> None:
    for counts in ([3, 4], [4, 4]):  # the second call must not use the plan of the first
        gathered = comm.all_gather(_x(comm.rank)[: counts[comm.rank]], counts=counts)
        assert gathered.tolist() == [*_x(0)[: counts[0]], *_x(1)[: counts[1]]]
    for counts in ([2, 9], [5, 5]):  # no rank has arrays of these lengths
        with pytest.raises(ShapeError):
            comm.all_gather(_rows(comm.rank), counts=counts)


@on_ranks("pool")
def test_differing_counts_raise_mismatch_and_write_nothing(comm: Communicator) -> None:
    out = np.zeros(9, np.float32)
    counts = [3, 4] if comm.rank == 0 else [5, 4]
    with pytest.raises(MismatchError) as caught:
        comm.all_gather(_rows(comm.rank), counts=counts, out=out[: sum(counts)])
    assert not out.any()
    assert all(text in str(caught.value) for text in ("[3, 4]", "[5, 4]"))


def _made(comm: Communicator, name: str, by_python: tuple[int, ...]) -> list[float] | None:
    result = CALLS[name](comm, 50.0 if comm.rank in by_python else None)
    return None if result is None else [float(value) for value in result]


@pytest.mark.parametrize("by_python", [(), (0,), (1,)], ids=["none", "0", "1"])
@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_of_python(
    pool: RankPool, name: str, by_python: tuple[int, ...]
) -> None:
    assert pool.run(_made, name, by_python) == pool.run(_made, name, (0, 1))


def _taken(comm: Communicator, *arguments: Any, **options: Any) -> bool:
    """Return whether C makes an all-reduce; if not, check that C has done nothing."""
    before, seen = comm.recorder.started, []
    code = inspect.unwrap(Communicator.all_reduce).__code__

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is code:
            seen.append(comm.recorder.started - before)

    sys.setprofile(see)
    try:
        comm.all_reduce(*arguments, **options)
    except (CollectiveError, TypeError):
        pass  # other tests check the errors of Python
    finally:
        sys.setprofile(None)
    assert seen in ([], [0])
    return not seen


def _read_only() -> Array:
    array = _x()
    array.flags.writeable = False
    return array


class _Alone:
    rank, size = 0, 1


@pytest.mark.parametrize(
    ("taken", "x", "options"),
    [
        pytest.param(True, np.ones((2, 8)), {"order": Shards(2, _Alone)}, id="shards"),
        pytest.param(False, np.ones(()), {"order": Shards(2, _Alone)}, id="shards-number"),
        pytest.param(
            False,
            np.ones((2, 8)),
            {"order": Shards(2, _Alone), "out": np.ones((2, 8))},
            id="shards-out",
        ),
        pytest.param(True, _x(), {}, id="plain"),
        pytest.param(True, _x(), {"op": "max", "out": _x(), "timeout": None}, id="named"),
        pytest.param(True, _x(), {"order": "rank"}, id="rank-order"),
        pytest.param(True, _read_only(), {}, id="read-only"),
        pytest.param(False, _x(), {"out": _read_only()}, id="out-r/o"),
        pytest.param(False, _x(), {"out": _x()[1:]}, id="out-shape"),
        pytest.param(False, _x(), {"out": np.zeros(8)}, id="out-dtype"),
        pytest.param(False, _x().view(Own), {}, id="subclass"),
        pytest.param(False, _strided(0), {}, id="strides"),
        pytest.param(False, [1.0], {}, id="list"),
        pytest.param(False, _x(), {"op": None}, id="no-op"),
        pytest.param(False, _x(), {"order": "any"}, id="other-order"),
        pytest.param(False, _x(), {"timeout": 9.0}, id="timeout"),
        pytest.param(False, _x(), {"async_op": True}, id="async"),
        pytest.param(False, _x(), {"async_op": 0}, id="async-0"),
    ],
)
def test_call_that_is_not_plain_is_left_to_python(
    taken: bool, x: Any, options: dict[str, Any]
) -> None:
    with collective.init(size=1, rank=0) as comm:
        assert _taken(comm, x, **options) is taken


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        pytest.param((), {}, "missing 1 required positional argument: 'x'", id="none"),
        pytest.param((_x(), "sum"), {}, "2 positional arguments; expected at most 1: x", id="two"),
        pytest.param(
            (_x(),), {"root": 0}, "unexpected keyword argument 'root'", id="of-another-call"
        ),
        pytest.param((_x(),), {f"k{i}": i for i in range(40)}, "argument 'k0'", id="forty"),
        pytest.param((_x(),), {"x": _x()}, "multiple values for argument 'x'", id="twice"),
    ],
)
def test_unsuitable_arguments_raise_type_error_as_in_python(
    arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with collective.init(size=1, rank=0) as comm, pytest.raises(TypeError, match=words):
        comm.all_reduce(*arguments, **options)


@pytest.mark.parametrize("name", [*(each for each in CALLS if " " not in each), "send", "recv"])
def test_method_in_c_has_doc_signature_and_source_of_python(name: str) -> None:
    method = getattr(Communicator, name)
    function = inspect.unwrap(method)
    assert function is not method
    assert inspect.getdoc(method) == inspect.getdoc(function)
    assert inspect.signature(method) == inspect.signature(function)
    with collective.init(size=1, rank=0) as comm:
        source = inspect.getsource(getattr(comm, name))
    assert source == inspect.getsource(function)
    assert f"def {name}(" in source


def test_call_is_queued_behind_background_calls() -> None:
    with collective.init(size=1, rank=0) as comm:
        taken = []
        lane: Any = comm._path.lane
        lane.queue.append(("as if it ran", None))
        submit = mock.patch.object(lane, "submit", side_effect=CollectiveError("in its turn"))
        with submit:
            taken.append(_taken(comm, _x()))
        lane.queue.clear()
        taken.append(_taken(comm, _x()))
        assert taken == [False, True]


def test_invalid_arguments_raise_errors_of_python() -> None:
    with collective.init(size=1, rank=0) as comm:
        with pytest.raises(InvalidArgumentError, match="read-only"):
            comm.all_reduce(_x(), out=_read_only())
        with pytest.raises(InvalidArgumentError, match="'som'"):
            comm.all_reduce(_x(), op="som")
        assert comm.recorder.started == 0


#: What a program may do to an array between two calls on it.
CHANGES: dict[str, Callable[[Array], Any]] = {
    "nothing": lambda x: None,
    "values": lambda x: np.copyto(x, 3),
    "shape": lambda x: setattr(x, "shape", (2, 4)),
    "dtype": lambda x: setattr(x, "dtype", np.int32),
    "longer": lambda x: x.resize(16, refcheck=False),
    "other strides": lambda x: setattr(x, "strides", (0,)),
    "read-only": lambda x: setattr(x.flags, "writeable", False),
}


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("given", [False, True], ids=["new-out", "out"])
@on_ranks("pool")
def test_call_sees_what_changed_since_the_same_call(
    comm: Communicator, change: str, given: bool
) -> None:
    x, out = np.ones(8, np.float32), np.ones(8, np.float32)

    def call() -> Array:
        return comm.all_reduce(x, out=out if given else None)  # type: ignore[no-any-return]

    for _ in range(3):
        assert call().tolist() == [2] * 8
    CHANGES[change](x)
    CHANGES[change](out)
    if given and change in ("other strides", "read-only"):
        with pytest.raises(InvalidArgumentError, match="out"):
            call()
        return
    result = call()
    assert result.dtype == x.dtype
    assert result.tolist() == (2 * x).tolist()


@on_ranks("pool")
def test_mismatch_names_source_of_each_call(comm: Communicator) -> None:
    before = comm.recorder.finished
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce(_x()[: 4 + comm.rank])
    comm.all_reduce(_x())  # the refused call has sent nothing
    assert str(caught.value).count("test_door.py") == 2
    assert comm.recorder.finished == before + 2


@on_ranks("pool")
def test_mismatch_of_shards_is_raised_by_c_as_by_python(comm: Communicator) -> None:
    shards = Shards(2, comm, held=[range(1), range(1, 2)] if comm.rank else [range(2), range(0)])
    out = np.zeros(8, np.float32)
    for timeout in (None, 30.0):
        with pytest.raises(MismatchError, match=r"2 shards \(0-1, none\)"):
            comm.all_reduce(_shards(comm, len(shards.mine)), out=out, order=shards, timeout=timeout)
    assert not out.any()


@on_ranks("pool")
def test_mismatch_of_op_that_only_its_dtype_has_is_mismatch(comm: Communicator) -> None:
    with pytest.raises(MismatchError, match="op=land"):  # booleans have no sum, the default op
        comm.all_reduce(np.ones(3 + comm.rank, np.bool_), op="land")


def _broken(comm: Communicator) -> str:
    def plan(src: Any, dst: Any, seconds: float) -> None:
        raise ZeroDivisionError("of a transport's")

    x = _x()
    if comm.rank == 0:
        comm._path.plans[("all_reduce", *_key(comm, x))] = _Planned(plan)
    with pytest.raises(Exception, match="of a transport's") as caught:
        comm.all_reduce(x)
    return f"{caught.typename} {'ZeroDivision' in str(caught.value)}"


class _Planned:
    """Plan that raises."""

    def __init__(self, plan: Any) -> None:
        self.request = Request("all_reduce", BY_NUMPY[_x().dtype])
        self.plan = plan
        self.compares = False
        self.fixed = True
        self.takes_gpus = True


def _key(comm: Communicator, x: Array) -> tuple[Any, ...]:
    _, array, dtype = view(comm._path, "all_reduce", x)
    return dtype, array.shape, "sum", None, True, None


def test_raising_plan_breaks_communicator() -> None:
    assert run_ranks(2, _broken) == ["ZeroDivisionError False", "PeerFailedError True"]


def _kept_by_a_failure(comm: Communicator) -> bool:
    def plan(src: Any, dst: Any, seconds: float) -> None:
        raise ZeroDivisionError

    x = _x()
    alive = weakref.ref(x)
    comm._path.plans[("all_reduce", *_key(comm, x))] = _Planned(plan)
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            comm.all_reduce(x)
        del x
        return alive() is not None
    finally:
        gc.enable()


def test_failed_message_sends_traceback_to_peers() -> None:
    def breaks(*_: Any) -> None:
        raise OSError("in the wires")

    with collective.init(size=1, rank=0) as comm:
        comm._path.exchange = breaks  # type: ignore[assignment]
        with (
            mock.patch.object(comm.inner.transport, "abort") as abort,
            pytest.raises(OSError, match="wi"),
        ):
            comm.send(_x(), 0)
        assert "in breaks" in abort.call_args.args[0].text


def test_failed_call_keeps_no_array() -> None:
    assert run_ranks(1, _kept_by_a_failure) == [False]


def test_door_is_closed_while_hook_is_registered() -> None:
    comm = collective.init(size=1, rank=0)
    states = [comm._path.door is not None]
    events: list[Any] = []
    remove_hook = comm.hook(before=events.append)
    states.append(comm._path.door is not None)
    comm.all_reduce(_x())
    remove_hook()
    states.append(comm._path.door is not None)
    comm.all_reduce(_x())
    comm.close()
    states.append(comm._path.door is not None)
    assert states == [True, False, True, False]
    assert len(events) == 1
    with pytest.raises(CommunicatorClosedError):
        comm.all_reduce(_x())


def test_check_always_disables_door() -> None:
    with collective.init(size=1, rank=0, check="never") as comm:
        assert comm._path.door is not None
    comm = Communicator(
        _not_comparing(), local_rank=0, local_size=1, host="", timeout=9.0, check="always"
    )
    assert comm._path.door is None


def _not_comparing() -> Any:
    import dataclasses

    with collective.init(size=1, rank=0) as comm:
        backend: Any = comm.inner.transport
    backend.capabilities = dataclasses.replace(backend.capabilities, checks_calls=False)
    return backend


@pytest.mark.parametrize("on", [True, False], ids=["C", "Python"])
def test_call_is_recorded_at_its_line_in_program(on: bool) -> None:
    was = native.chosen.extension is not None
    native.switch(on)
    try:
        with collective.init(size=1, rank=0) as comm:
            line = sys._getframe().f_lineno
            comm.all_reduce(_x())
            comm.all_reduce(_x(), async_op=True).wait()
            comm.all_reduce(np.repeat(_x(), 2)[::2])
            comm.barrier()
            collective.all_reduce(_x())
            entries = comm.recorder.entries()
    finally:
        native.switch(was)
    assert [entry.site for entry in entries] == [
        f"{__file__}:{line + more} in test_call_is_recorded_at_its_line_in_program"
        for more in range(1, 6)
    ]
    assert all(entry.seconds is not None for entry in entries)


def test_door_keeps_no_array() -> None:
    with collective.init(size=1, rank=0, backend="shm") as comm:
        x, out = _x(), _x()
        counts = sys.getrefcount(x), sys.getrefcount(out)
        for _ in range(100):
            result = comm.all_reduce(x, out=out)
            fresh = comm.all_reduce(x)
        assert result is out
        assert sys.getrefcount(fresh) == 2
        del result
        assert (sys.getrefcount(x), sys.getrefcount(out)) == counts


def test_dropped_communicator_is_freed_at_once() -> None:
    with collective.init(size=1, rank=0) as comm:
        group = comm.dup()
        for length in range(300):  # more calls than C remembers
            group.all_reduce(np.ones(length))
        group.close()
        alive = weakref.ref(group)
        del group
        assert alive() is None


def test_cycle_through_c_members_is_collected() -> None:
    with collective.init(size=1, rank=0) as comm:
        group = comm.dup()
        group.close()
        group._path.lanes["itself"] = group  # type: ignore[assignment]
        alive = weakref.ref(group)
        del group
        gc.collect()
        assert alive() is None


def test_python_reads_arrays_that_never_change_once_for_each_place() -> None:
    # The program prints the places of the arrays that Python has read, and at which bytes of a
    # cache line the long results begin.
    shown = "(['there', 'far', 'far', 'here'], [0])"
    assert printed(Path(__file__).with_name("frozen.py")) == f"[{shown}, {shown}]\n"


def _make_distinct(comm: Communicator, numbers: range) -> None:
    for number in numbers:
        comm.all_reduce(np.ones(number, np.float32))


def test_hundreds_of_distinct_calls_in_turn_stay_in_c() -> None:
    def program(comm: Communicator) -> None:
        _make_distinct(comm, range(1, 801))
        with mock.patch.object(comm._path, "plan_for_c", side_effect=AssertionError):
            _make_distinct(comm, range(1, 801))

    run_ranks(1, program)


def test_door_of_many_distinct_calls_keeps_few_plans_and_drops_them_at_the_end() -> None:
    def plans() -> int:
        gc.collect()
        return sum(type(each) is Planned for each in gc.get_objects())

    before = plans()

    def program(comm: Communicator) -> int:
        _make_distinct(comm, range(1, 5001))
        return plans()

    (most,) = run_ranks(1, program)
    # Those of the table in C, and those that Python remembers.
    assert 1000 < most - before <= 2048 + 1024
    assert plans() - before < 10


@pytest.mark.parametrize("member", ["request", "division"])
def test_cycle_through_an_entry_of_a_door_is_collected(member: str) -> None:
    core: Any = native.chosen.extension

    class Thing:
        door: Any

    class Path(core.Gate):  # type: ignore[misc]
        def plan_for_c(self, *arguments: Any) -> Any:
            return self.planned

        def run_python_plan(self, *arguments: Any) -> None:
            pass

    class Handle(core.Handle):  # type: ignore[misc]
        pass

    def all_reduce(self: Any, *arguments: Any, **options: Any) -> None:
        raise AssertionError

    Handle.all_reduce = core.Method(all_reduce, object)
    one, path, thing = Handle(), Path(), Thing()
    one._path, path.timeout, path.lanes = path, 1.0, {}
    path.planned = SimpleNamespace(request="request", plan=Thing())
    setattr(path.planned, member, thing)
    thing.door = path.door = core.Door(core.Ring(["nowhere"]), [], 0, 1)
    one.all_reduce(_x(), **({"order": thing} if member == "division" else {}))
    alive = weakref.ref(thing)
    path.door = None  # only the cycle thing, door, entry, thing is left
    del one, path, thing
    gc.collect()
    assert alive() is None
