"""Calls that a library in C repeats: the core makes them without the interpreter lock.

A :class:`Library` does what XLA's handler does, from Python: ctypes releases the interpreter lock
for the call, and takes it afterwards.
"""

from __future__ import annotations

import _thread
import ctypes
import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collective import native
from collective.backends.shm.compiled import _ControlCallbacks
from collective.communicator import Communicator
from collective.communicator.repeated import RepeatedCall
from collective.deadline import Deadline
from collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    MismatchError,
    ShapeError,
)
from collective.request import in_thread
from collective.testing.survivors import await_files
from tests.support.on_ranks import on_ranks, ranks_of
from tests.support.selection import in_whole

pytest.importorskip("collective.native._core", reason="the native core is not built")

pool = ranks_of(("shm", 2), ("shm", 3))
three = ranks_of(("shm", 3))
of_python = ranks_of(in_whole(("gloo", 2)), ("threads", 2))

# Elements of short calls, of a long call, and of several blocks.
COUNTS = [1, 4, 256, 6_144, 300_003]
_numbers = itertools.count(1 << 62)


def _run() -> Any:
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, word, word, pointer, pointer)
    return kind(address(native.runner(), b"collective.native._core.run"))


class Library:
    """Library that repeats one call, and counts its calls that Python has made."""

    def __init__(self, comm: Communicator, method: str, clears: bool = False, **options: Any):
        self.key = next(_numbers), 7
        self.repeated = RepeatedCall(comm, self.key, clears)
        self.comm, self.method, self.options, self.clears = comm, method, options, clears
        self.run = _run()
        self.in_python = 0

    def _call(self, x: Any, out: Any) -> None:
        method = getattr(self.comm, self.method)
        if self.method == "barrier":
            method()
        elif self.method == "broadcast" and self.options["root"] != self.comm.rank:
            method(None, out=out, **self.options)
        elif self.clears:
            method(x, **self.options)
        else:
            method(x, out=out, **self.options)
        if self.clears:
            out[...] = 0

    def __call__(self, x: Any, out: Any) -> None:
        if self.run(*self.key, x.ctypes.data, out.ctypes.data) == 0:
            return
        self.in_python += 1
        in_thread.site = f"line {self.comm.rank} of the library"
        try:
            self.repeated.make(partial(self._call, x, out), x, out)
        finally:
            in_thread.site = None


def total(comm: Communicator, count: int = 256) -> tuple[Library, Any, Any]:
    """Return a library that adds arrays, after a call in Python, and its two arrays."""
    library, x, out = Library(comm, "all_reduce"), np.ones(count), np.zeros(count)
    library(x, out)
    assert (out == comm.size).all()
    return library, x, out


def _wanted(name: str, inputs: list[Any], rank: int, root: int) -> Any:
    size, whole = len(inputs), sum(inputs)
    zero = np.zeros_like(inputs[0])
    return {
        "all_reduce": whole,
        "scan": sum(inputs[: rank + 1]),
        "reduce": whole if rank == root else zero,
        "broadcast": inputs[root],
        "all_gather": np.concatenate(inputs),
        "gather": np.concatenate(inputs) if rank == root else zero,
        "reduce_scatter": np.array_split(whole, size)[rank],
        "all_to_all": np.concatenate([np.array_split(x, size)[rank] for x in inputs]),
        "barrier": zero,
    }[name]


@pytest.mark.parametrize(
    "name",
    ["all_reduce", "scan", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter",
     "all_to_all", "barrier"],
)  # fmt: skip
@on_ranks("pool")
def test_repeated_calls_are_right_and_python_makes_only_the_first(
    comm: Communicator, name: str
) -> None:
    root = comm.size - 1
    rooted = name in ("reduce", "broadcast", "gather")
    clears = name == "barrier" or (name in ("reduce", "gather") and comm.rank != root)
    wrong = []
    for count in COUNTS:
        library = Library(comm, name, clears, **({"root": root} if rooted else {}))
        rows = count * comm.size if name in ("reduce_scatter", "all_to_all") else count
        for turn in range(5):
            numbers = np.arange(rows, dtype=np.float32) % 97
            inputs = [numbers + rank + turn for rank in range(comm.size)]
            expected = _wanted(name, inputs, comm.rank, root)
            out = np.full(expected.shape, -1, np.float32)  # other memory each time
            library(inputs[comm.rank], out)
            wrong += [f"{count}, turn {turn}"] * (out.tobytes() != expected.tobytes())
        assert library.in_python == 1, f"{name} of {count}"
    assert wrong == []


@on_ranks("pool", check="results:3")
def test_repeated_call_whose_result_is_compared_is_made_by_python(comm: Communicator) -> None:
    library, x, out = total(comm)
    in_python = []
    for _ in range(6):
        library(x, out)
        in_python.append(library.in_python)
    assert in_python == [1, 2, 2, 2, 3, 3]


@on_ranks("of_python")
def test_repeated_calls_of_other_transports_are_made_by_python(comm: Communicator) -> None:
    library, x, out = total(comm)
    library(x, out)
    assert (out == comm.size).all()
    assert library.in_python == 2


@on_ranks("pool")
def test_repeated_calls_on_8_bit_floats_are_made_by_python(comm: Communicator) -> None:
    library, kind = Library(comm, "all_gather"), ml_dtypes.float8_e5m2
    for turn in range(3):
        out = np.zeros(2 * comm.size, kind)
        library(np.full(2, comm.rank + turn, kind), out)
        assert out.tolist() == [rank + turn for rank in range(comm.size) for _ in range(2)]
    assert library.in_python == 3


@on_ranks("pool")
def test_call_whose_result_python_completes_is_never_repeated_in_c(comm: Communicator) -> None:
    # The pieces along the second axis arrive in memory of their own.
    library = Library(comm, "all_gather", axis=1)
    for _ in range(3):
        out = np.zeros((3, 2 * comm.size))
        library(np.full((3, 2), comm.rank, float), out)
        assert out.tolist() == [[float(rank) for rank in range(comm.size) for _ in (0, 1)]] * 3
    assert library.in_python == 3


@on_ranks("pool")
def test_mean_of_integers_is_right_when_repeated(comm: Communicator) -> None:
    library, x = Library(comm, "all_reduce", op="avg"), np.arange(9.0) + comm.rank
    for _ in range(3):
        out = np.zeros(9)
        library(x, out)
        assert out.tolist() == (np.arange(9.0) + (comm.size - 1) / 2).tolist()


@on_ranks("pool")
def test_repeated_calls_are_in_the_flight_recorder(comm: Communicator) -> None:
    library, x, out = total(comm)
    recorder = comm._path.recorder
    before = recorder.started
    for _ in range(600):  # more than the recorder keeps
        library(x, out)
    assert library.in_python == 1
    assert (recorder.started, recorder.finished) == (before + 600, before + 600)
    entries = recorder.entries()
    assert [entry.sequence for entry in entries] == list(range(before + 89, before + 601))
    assert {entry.site for entry in entries} == {f"line {comm.rank} of the library"}
    assert {entry.request.operation for entry in entries} == {"all_reduce"}
    assert all(entry.seconds is not None for entry in entries)
    comm.barrier()
    assert recorder.entries(1)[0].request.operation == "barrier"


@on_ranks("pool")
def test_listener_hears_of_repeated_calls(comm: Communicator) -> None:
    comm = comm.dup()
    library, x, out = total(comm)
    heard: list[str] = []
    remove = comm.hook(before=lambda event: heard.append(event.operation))
    library(x, out)
    assert (heard, library.in_python) == (["all_reduce"], 2)
    remove()
    library(x, out)  # Python makes the first call of a way
    library(x, out)
    assert (heard, library.in_python) == (["all_reduce"], 3)
    comm.close()


@on_ranks("pool")
def test_repeated_call_waits_for_asynchronous_calls_before_it(comm: Communicator) -> None:
    library, x, out = total(comm)
    if comm.rank == 0:
        comm.send(np.zeros(1), 1)
    late = [comm.all_reduce(np.full(256, 10.0), async_op=True) for _ in range(3)]
    if comm.rank == 1:
        comm.recv(np.zeros(1), 0)
    library(x, out)
    assert (out == comm.size).all()
    assert all((work.wait() == 10.0 * comm.size).all() for work in late)


@on_ranks("pool")
def test_repeated_call_of_closed_communicator_is_refused(comm: Communicator) -> None:
    comm = comm.dup()
    library, x, out = total(comm)
    comm.close()
    with pytest.raises(CommunicatorClosedError):
        library(x, out)


@on_ranks("pool")
def test_forgotten_call_goes_through_python(comm: Communicator) -> None:
    library, x, out = total(comm)
    library.repeated.forget()
    library(x, out)
    assert library.in_python == 2


@on_ranks("pool")
def test_repeated_call_that_differs_names_both_places(comm: Communicator) -> None:
    library, x, out = total(comm)
    other = Library(comm, "all_reduce", op="max")
    with pytest.raises(MismatchError) as raised:
        (library if comm.rank == 0 else other)(x, out)
    text = str(raised.value)
    assert "line 0 of the library" in text
    assert "line 1 of the library" in text
    library(x, out)  # nothing was sent, so the ranks go on
    assert (out == comm.size).all()
    assert comm._path.recorder.finished == comm._path.recorder.started


@on_ranks("pool")
def test_repeated_gather_of_another_length_fails_as_in_python(comm: Communicator) -> None:
    library = Library(comm, "all_gather")
    x, out = np.ones(4), np.zeros(4 * comm.size)
    for _ in range(2):
        library(x, out)
    assert library.in_python == 1
    # Rank 0 makes its call in C.
    longer = partial(comm.all_gather, np.ones(5), out=out)
    call = partial(library, x, out) if comm.rank == 0 else longer
    with pytest.raises(ShapeError, match="all_gather"):
        call()
    library(x, out)
    assert (out == 1).all()


@on_ranks("pool")
def test_late_peer_of_repeated_call_is_named_at_the_deadline(comm: Communicator) -> None:
    group = comm.dup()
    library, x, out = total(group)
    group.timeout = 0.3
    library(x, out)
    if group.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"0\.3 s"):
            library(x, out)
        with pytest.raises(CollectiveTimeoutError):  # the communicator is broken from now on
            library(x, out)
    comm.barrier()


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@pytest.mark.parametrize("how", ["repeated", "plain"])
@on_ranks("three")
def test_call_has_one_deadline_for_ranks_that_arrive_one_after_another(
    comm: Communicator, how: str, tmp_path: Path
) -> None:
    library, x, out = total(comm.dup())
    ends: list[float] = []
    wait = _ControlCallbacks.wait

    def note(callbacks: Any, request: Any, deadline: Deadline, *word: int) -> None:
        if comm.rank == 0:
            ends.append(deadline._end)
            (tmp_path / f"{len(ends)}").touch()
        wait(callbacks, request, deadline, *word)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ControlCallbacks, "wait", note)
        if comm.rank:
            await_files(tmp_path / f"{comm.rank}")
        if how == "plain":
            library.comm.all_reduce(x, out=out)
        else:
            library(x, out)
    assert comm.rank or ends == ends[:1] * (comm.size - 1)


@on_ranks("pool")
def test_abort_ends_the_wait_of_a_repeated_call(comm: Communicator) -> None:
    group = comm.dup()
    library, x, out = total(group)
    if group.rank == 1:
        group.abort("enough")
    with pytest.raises(CollectiveError, match="enough"):
        library(x, out)


@on_ranks("pool")
def test_interrupt_ends_the_wait_of_a_repeated_call(comm: Communicator) -> None:
    group = comm.dup()
    library, x, out = total(group)
    if group.rank == 0:
        timer = threading.Timer(0.2, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            library(x, out)
        assert library.in_python == 2
    comm.barrier()
    if group.rank == 1:
        with pytest.raises(CollectiveError, match="KeyboardInterrupt"):
            library(x, out)


@on_ranks("pool")
def test_more_calls_than_descriptions_stay_in_c(comm: Communicator) -> None:
    libraries = [(Library(comm, "all_reduce"), np.ones(count)) for count in range(1, 101)]
    for _ in range(3):
        for library, x in libraries:
            out = np.zeros_like(x)
            library(x, out)
            assert (out == comm.size).all()
    assert [library.in_python for library, _ in libraries] == [1] * 100
    lines = [comm.inner.transport._control.last_call(rank) for rank in range(comm.size)]  # type: ignore[attr-defined]
    comm.barrier()
    assert all("float64[100]" in line or "barrier" in line for line in lines)
