"""The handler of calls inside ``jit``, as far as it needs no JAX: tests/jax has the rest."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective import native
from collective.adapters.jax.xla import library
from collective.adapters.jax.xla.library import handler, runner
from collective.communicator import Communicator
from collective.communicator.repeated import RepeatedCall
from collective.errors import BackendUnavailableError
from collective.request import in_thread
from tests.support.on_ranks import on_ranks, ranks_of

library_module = sys.modules[library.__module__]


def test_missing_handler_is_named_with_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "xla" / "library.py"))
    with pytest.raises(
        BackendUnavailableError,
        match=r"handler for calls inside jit is not built: .*libcollective_ffi\.so does not exist.*"
        r"C compiler\. Install this package again",
    ):
        handler()


# -- a frame of XLA's foreign function interface, as xla/ffi/api/c_api.h lays it out ------------

METADATA, EXECUTE, SCALAR, INT64 = 1, 3, 3, 5
Head = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]


class Version(ctypes.Structure):
    _fields_ = [*Head, ("major", ctypes.c_int), ("minor", ctypes.c_int)]


class Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32)]


class Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    ]  # fmt: skip


class ErrorArguments(ctypes.Structure):
    _fields_ = [*Head, ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorArguments))


class Api(ctypes.Structure):
    _fields_ = [
        *Head, ("version", Version), ("internal", ctypes.c_void_p), ("create_error", CreateError),
    ]  # fmt: skip


class Buffer(ctypes.Structure):
    _fields_ = [*Head, ("dtype", ctypes.c_int), ("data", ctypes.c_void_p)]


class Buffers(ctypes.Structure):
    _fields_ = [
        *Head, ("size", ctypes.c_int64), ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(Buffer))),
    ]  # fmt: skip


class Name(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p), ("length", ctypes.c_size_t)]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64))]


class Attributes(ctypes.Structure):
    _fields_ = [
        *Head, ("size", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(Name))),
        ("values", ctypes.POINTER(ctypes.POINTER(Scalar))),
    ]  # fmt: skip


class Frame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(Extension)),
        ("api", ctypes.POINTER(Api)), ("context", ctypes.c_void_p), ("stage", ctypes.c_int),
        ("arguments", Buffers), ("results", Buffers), ("attributes", Attributes),
    ]  # fmt: skip


MakeCall = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)
Run = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)


class Xla:
    """XLA's side of a call: the frame that the handler gets, and the errors that it makes."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._create = CreateError(self._noted)
        self.api = Api(create_error=self._create)
        self.api.version = Version(major=0, minor=5)

    def _noted(self, arguments: Any) -> int:
        self.errors.append(arguments.contents.message.decode())
        return 77

    def frame(self, attribute: bytes, number: int, source: int, target: int) -> Frame:
        frame = Frame(stage=EXECUTE, api=ctypes.pointer(self.api))
        frame.arguments, frame.results = _buffers(source), _buffers(target)
        name = ctypes.pointer(Name(attribute, len(attribute)))
        value = ctypes.pointer(Scalar(INT64, ctypes.pointer(ctypes.c_int64(number))))
        frame.attributes = Attributes(
            size=1, types=(ctypes.c_int * 1)(SCALAR), names=ctypes.pointer(name),
            values=ctypes.pointer(value),
        )  # fmt: skip
        return frame


def _buffers(address: int) -> Buffers:
    return Buffers(size=1, buffers=ctypes.pointer(ctypes.pointer(Buffer(data=address))))


@pytest.fixture
def loaded() -> Iterator[ctypes.CDLL]:
    """Return the handler without a function that makes calls."""
    try:
        found = ctypes.CDLL(str(handler()))
    except BackendUnavailableError:
        pytest.skip("the handler is not built: there is no C compiler")
    found.collective_ffi_call.restype = ctypes.c_void_p
    found.collective_ffi_install(None, None)
    yield found
    found.collective_ffi_install(None, None)


@pytest.fixture
def xla() -> Xla:
    return Xla()


def recording(calls: list[tuple[int, ...]]) -> Callable[..., int]:
    """Return a function that appends number and addresses of each call to a list."""

    def make(ticket: int, *call: int) -> int:
        calls.append(call)
        return ~ticket

    return make


def test_handler_passes_number_and_addresses(loaded: ctypes.CDLL, xla: Xla) -> None:
    calls: list[tuple[int, ...]] = []
    function = MakeCall(recording(calls))
    loaded.collective_ffi_install(function, None)
    assert loaded.collective_ffi_call(ctypes.byref(xla.frame(b"call", 1 << 40, 64, 128))) is None
    assert calls == [(1 << 40, 64, 128)]


@pytest.mark.parametrize("done", [True, False])
def test_handler_leaves_calls_to_python_that_the_core_does_not_make(
    loaded: ctypes.CDLL, xla: Xla, done: bool
) -> None:
    in_core: list[tuple[int, int, int, int]] = []
    in_python: list[tuple[int, ...]] = []

    @Run
    def run(*arguments: int) -> int:
        in_core.append(arguments)  # type: ignore[arg-type]
        return 0 if done else 1

    function = MakeCall(recording(in_python))
    loaded.collective_ffi_install(function, run)
    assert loaded.collective_ffi_call(ctypes.byref(xla.frame(b"call", 9, 64, 128))) is None
    assert in_core == [(9, -1, 64, 128)]
    assert in_python == ([] if done else [(9, 64, 128)])


def test_handler_returns_the_text_of_an_error_to_xla(loaded: ctypes.CDLL, xla: Xla) -> None:
    def fail(ticket: int, *_: int) -> int:
        loaded.collective_ffi_fail(b"PeerLostError: gone", False)
        return ticket

    function = MakeCall(fail)
    loaded.collective_ffi_install(function, None)
    assert loaded.collective_ffi_call(ctypes.byref(xla.frame(b"call", 0, 64, 128))) == 77
    assert xla.errors == ["PeerLostError: gone"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_handler_takes_no_call_for_made_that_an_exception_ended(
    loaded: ctypes.CDLL, xla: Xla
) -> None:
    interrupted = False

    def make(ticket: int, *_: int) -> int:
        if interrupted:
            raise KeyboardInterrupt
        return ~ticket

    function = MakeCall(make)
    loaded.collective_ffi_install(function, None)
    frame = ctypes.byref(xla.frame(b"call", 0, 64, 128))
    for interrupted in (False, True) * 5:
        assert loaded.collective_ffi_call(frame) == (77 if interrupted else None)
    assert "a call failed and left no text" in xla.errors[0]


@pytest.mark.parametrize(("attribute", "number"), [(b"call", -1), (b"calls", 0), (b"cal", 0)])
def test_handler_refuses_frame_without_number(
    loaded: ctypes.CDLL, xla: Xla, attribute: bytes, number: int
) -> None:
    function = MakeCall(lambda *_: pytest.fail("made a call"))
    loaded.collective_ffi_install(function, None)
    assert loaded.collective_ffi_call(ctypes.byref(xla.frame(attribute, number, 64, 128))) == 77
    assert "a call that this process did not compile" in xla.errors[0]


def test_handler_without_function_refuses_calls(loaded: ctypes.CDLL, xla: Xla) -> None:
    assert loaded.collective_ffi_call(ctypes.byref(xla.frame(b"call", 0, 64, 128))) == 77
    assert "a call that this process did not compile" in xla.errors[0]


@pytest.mark.parametrize("with_api", [True, False])
def test_handler_answers_the_version_of_xla(loaded: ctypes.CDLL, xla: Xla, with_api: bool) -> None:
    metadata = Metadata()
    extension = Extension(type=METADATA, metadata=ctypes.pointer(metadata))
    frame = Frame(extension=ctypes.pointer(extension))
    if with_api:
        frame.api = ctypes.pointer(xla.api)
    assert loaded.collective_ffi_call(ctypes.byref(frame)) is None
    assert (metadata.version.major, metadata.version.minor) == (0, 5 if with_api else 3)


def test_handler_makes_no_call_while_xla_prepares(loaded: ctypes.CDLL, xla: Xla) -> None:
    calls: list[tuple[int, ...]] = []
    function = MakeCall(recording(calls))
    loaded.collective_ffi_install(function, None)
    frame = xla.frame(b"call", 0, 64, 128)
    frame.stage = EXECUTE - 1
    assert loaded.collective_ffi_call(ctypes.byref(frame)) is None
    assert (calls, xla.errors) == ([], [])


# -- calls that need no Python -------------------------------------------------------------------

pool = ranks_of(("shm", 2))
_ROUNDS, _ROUND_S = 20, 1.0


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@on_ranks("pool")
def test_recorder_keeps_the_same_call_of_several_programs_once(comm: Communicator) -> None:
    x, out = np.ones(256), np.zeros(256)
    run = ctypes.cast(runner(), Run)
    (kept,) = (
        thing for thing in gc.get_referents(comm._path.recorder.ring) if isinstance(thing, dict)
    )
    lengths = []
    for number in range(20):
        repeated = RepeatedCall(comm, (number, -1))
        in_thread.site = "line 3 of a program"
        try:
            repeated.make(lambda: comm.all_reduce(x, out=out), x, out)
        finally:
            in_thread.site = None
        for _ in range(50):
            assert run(number, -1, x.ctypes.data, out.ctypes.data) == 0
        repeated.forget()
        lengths.append(len(kept))
    assert lengths == [lengths[0]] * 20


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@on_ranks("pool")
def test_thread_makes_calls_while_another_thread_keeps_the_interpreter_lock(
    comm: Communicator,
) -> None:
    x, out = np.ones(256), np.zeros(256)
    repeated = RepeatedCall(comm, (3, -1))
    in_python: list[int] = []

    @MakeCall
    def make(ticket: int, number: int, source: int, target: int) -> int:
        in_python.append(number)
        repeated.make(lambda: comm.all_reduce(x, out=out), x, out)
        return ~ticket

    loaded = ctypes.CDLL(str(handler()))
    loaded.collective_ffi_install(make, runner())
    frame = Xla().frame(b"call", 3, x.ctypes.data, out.ctypes.data)
    call = ctypes.cast(loaded.collective_ffi_call, ctypes.c_void_p)
    with_lock, without_lock = ctypes.PyDLL(None), ctypes.CDLL(None)
    loaded.collective_ffi_call(ctypes.byref(frame))
    assert in_python == [3]
    finished = []
    # A round does not show anything if the machine is so busy that one rank waits for long.
    for _ in range(_ROUNDS):
        comm.barrier()
        out[:] = 0
        thread = ctypes.c_ulong()
        with_lock.pthread_create(ctypes.byref(thread), None, call, ctypes.byref(frame))
        end = Timespec(int(time.time() + _ROUND_S) + 1, 0)
        failed = with_lock.pthread_timedjoin_np(thread, None, ctypes.byref(end))
        if failed:
            without_lock.pthread_join(thread, None)
        assert (out == 2).all()
        finished.append(not failed)
        if comm.all_reduce(sum(finished)) >= 6:
            break
    assert any(finished)
    assert in_python == [3]
    loaded.collective_ffi_install(None, None)
