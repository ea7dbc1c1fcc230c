"""The plug-in for XLA, as far as it needs no JAX: tests/jax has the rest."""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.adapters.jax.xla import enable, library, symbols, variables
from collective.adapters.jax.xla import library as library_function
from collective.adapters.jax.xla.__main__ import main as print_variables
from collective.adapters.jax.xla.calls import Calls
from collective.adapters.jax.xla.detection import place
from collective.adapters.jax.xla.library import handler
from collective.adapters.jax.xla.replica_groups import device_groups
from collective.adapters.jax.xla.store import JaxStore
from collective.errors import (
    BackendUnavailableError,
    ConfigError,
    RendezvousError,
    UnsupportedError,
)
from collective.tools.cli import main as command
from tests.support.interpreter import run

library_module = sys.modules[library_function.__module__]


# -- groups of devices in compiled programs ----------------------------------------------------

FOUR = np.array([[10, 11, 12, 13]])
SIX = np.arange(6).reshape(1, 6)
REDUCE = "%x = f32[2]{0} all-reduce(%p), channel_id=1, %s, use_global_device_ids=true, to_apply=%r"


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        ("replica_groups={{0,1},{2,3}}", [[10, 11], [12, 13]]),
        ("replica_groups={{3,1,0,2}}", [[13, 11, 10, 12]]),
        ("replica_groups={}", [[10, 11, 12, 13]]),
        ("replica_groups=[2,2]<=[4]", [[10, 11], [12, 13]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[10, 12], [11, 13]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[10, 12], [11, 13]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", [[10, 12, 11, 13]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[10, 12], [11, 13]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[10, 11], [12, 13]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[13, 12], [11, 10]]),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}",
            [[10, 12], [11, 13]],
        ),
        ("replica_groups=mesh['a'=1,'b'=4], device_ids=([4]) {'b'}", [[10, 11, 12, 13]]),
    ],
)
def test_device_groups_of_instruction_are_read(listed: str, wanted: list[list[int]]) -> None:
    assert device_groups(REDUCE.replace("%s", listed), FOUR) == wanted


def test_device_groups_of_parts_of_axis_follow_their_order() -> None:
    text = REDUCE.replace("%s", "replica_groups=mesh['a'=6] {'a':(3)2,'a':(1)3}")
    assert device_groups(text, SIX) == [[0, 2, 4, 1, 3, 5]]


def test_device_groups_of_permutation_have_all_devices() -> None:
    text = "%x = f32[2] collective-permute(%p), channel_id=1, source_target_pairs={{0,1}}"
    assert device_groups(text, FOUR) == [[10, 11, 12, 13]]


def test_device_groups_between_replicas_are_read_by_column() -> None:
    text = "%x = f32[2] all-reduce(%p), replica_groups={{0,1}}, to_apply=%r"
    assert device_groups(text, np.array([[1, 2], [3, 4]])) == [[1, 3], [2, 4]]


def test_device_groups_of_program_without_collectives_are_none() -> None:
    assert device_groups('%x = f32[2] add(%p, %q), metadata={op_name="all-reduce"}', FOUR) == []


def test_device_groups_in_unknown_format_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"all-reduce whose groups .* 'replica_groups=V9"):
        device_groups(REDUCE.replace("%s", "replica_groups=V9(1,2)"), FOUR)


# -- the library -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plugin() -> ctypes.CDLL:
    if not library_module.Path(library_module.__file__).with_name("libcollective_xla.so").exists():
        pytest.skip("the plug-in is not built: there is no C compiler")
    loaded = ctypes.CDLL(str(library()))
    loaded.collective_xla_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return loaded


def interface_of(plugin: ctypes.CDLL) -> int:
    return ctypes.c_int.in_dll(plugin, "collective_interface").value


def test_library_has_every_listed_name(plugin: ctypes.CDLL) -> None:
    names = symbols.listed()
    assert len(names) == 634
    assert [name for name in names if not hasattr(plugin, name)] == []


def test_library_constants_have_eight_bytes_with_their_values(plugin: ctypes.CDLL) -> None:
    for name, value in symbols.CONSTANTS.items():
        assert ctypes.c_int64.in_dll(plugin, f"MPIABI_{name}").value == value, name


def test_library_refuses_unused_function_by_name(plugin: ctypes.CDLL) -> None:
    assert "MPIABI_Bcast: collective's plug-in" in error_text(plugin, plugin.MPIABI_Bcast())


def test_library_reports_length_of_longest_error(plugin: ctypes.CDLL) -> None:
    assert len(error_text(plugin, plugin.collective_xla_fail(b"x" * 600, False))) == 511


def error_text(plugin: ctypes.CDLL, code: int) -> str:
    text, length = ctypes.create_string_buffer(512), ctypes.c_int()
    plugin.MPIABI_Error_string(code, text, ctypes.byref(length))
    assert length.value == len(text.value)
    return text.value.decode()


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (3, 4)])
def test_library_without_python_answers_size_for_which_xla_makes_calls(
    plugin: ctypes.CDLL, rank: int, size: int
) -> None:
    found = ctypes.c_int()
    plugin.MPIABI_Comm_size(ctypes.c_void_p(rank + 1 << 32), ctypes.byref(found))
    assert found.value == size


def test_library_without_python_fails_reduce_scatter_by_name(plugin: ctypes.CDLL) -> None:
    counts, handles = (ctypes.c_int * 2)(1, 1), [0x103, 0x200, 1 << 32]
    code = plugin.MPIABI_Reduce_scatter(None, None, counts, *map(ctypes.c_void_p, handles))
    assert "collective could not be imported" in error_text(plugin, code)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_library_takes_no_call_for_made_that_an_exception_ended(plugin: ctypes.CDLL) -> None:
    escapes = False

    def make(ticket: int, *_: object) -> int:
        if escapes:
            raise KeyboardInterrupt
        return ~ticket

    word, pointer, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    function = ctypes.CFUNCTYPE(
        word, word, number, word, pointer, pointer, word, number, number, number, number, word
    )(make)
    handles = [ctypes.c_void_p(handle) for handle in (0x103, 0x200, 1 << 32)]
    plugin.collective_xla_install(function, None)
    try:
        for escapes in (False, True) * 5:
            code = plugin.MPIABI_Allreduce(None, None, 1, *handles)
            assert (error_text(plugin, code) if code else "") == (
                "a call was interrupted and left no error" if escapes else ""
            )
    finally:
        plugin.collective_xla_install(None, None)


def test_library_forgets_messages_before_one_of_unknown_dtype(plugin: ctypes.CDLL) -> None:
    request, word = ctypes.c_void_p(), ctypes.c_void_p

    def begin_send(dtype: int) -> int:
        return plugin.MPIABI_Isend(None, 1, word(dtype), 1, 0, word(1 << 32), ctypes.byref(request))

    assert begin_send(0x103) == 0
    assert "MPI_Isend: XLA uses a dtype" in error_text(plugin, begin_send(0x1FF))
    assert begin_send(0x103) == 0
    # With the first message there would be two in one direction, which is another error.
    code = plugin.MPIABI_Wait(ctypes.byref(request), None)
    assert "collective could not be imported" in error_text(plugin, code)


def test_header_omits_functions_that_the_library_defines() -> None:
    text = symbols.header(["MPIABI_Allreduce", "MPIABI_Bcast", "MPIABI_SUM", "MPIABI_TAG_UB"])
    assert re.findall(r"\w+\(.*?\)", text) == [
        "REFUSED(MPIABI_Bcast)", "CONSTANT(MPIABI_SUM,512)", "UNUSED(MPIABI_TAG_UB)",
    ]  # fmt: skip


def test_missing_library_is_named_with_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(BackendUnavailableError, match=r"not built: .*libcollective_xla\.so"):
        library()


def test_library_behind_a_link_is_named_by_its_own_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugin: ctypes.CDLL
) -> None:
    (tmp_path / "xla").symlink_to(Path(library_module.__file__).parent)
    direct = library()
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "xla" / "library.py"))
    assert library() == direct


OTHER_VERSION = r"was built for another version of this package: it has interface "


@pytest.mark.parametrize("find", [library, handler])
def test_library_of_another_version_is_refused_with_remedy(
    monkeypatch: pytest.MonkeyPatch, plugin: ctypes.CDLL, find: Callable[[], Path]
) -> None:
    find()
    monkeypatch.setattr(library_module, "_INTERFACE", 9)
    text = rf"{OTHER_VERSION}{interface_of(plugin)}, .* needs 9\. Build it again "
    with pytest.raises(BackendUnavailableError, match=text):
        find()


def test_library_without_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, plugin: ctypes.CDLL
) -> None:
    monkeypatch.setattr(library_module, "_INTERFACE_NAME", "no_such_symbol")
    with pytest.raises(BackendUnavailableError, match=OTHER_VERSION + "0, "):
        library()


def test_damaged_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "library.py"))
    (tmp_path / "libcollective_xla.so").write_bytes(b"no library")
    with pytest.raises(BackendUnavailableError, match="the plug-in for XLA cannot be loaded"):
        library()


def test_unknown_jaxlib_with_more_names_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugin: ctypes.CDLL
) -> None:
    names = b"\0".join(name.encode() for name in [*symbols.listed(), "MPIABI_Newest_call"])
    (tmp_path / "libjax_common.so").write_bytes(b"\0" + names + b"\0")
    monkeypatch.setattr(symbols, "jaxlib_file", lambda: tmp_path / "libjax_common.so")
    monkeypatch.setattr(library_module.importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(BackendUnavailableError, match=r"jaxlib 9\.9 looks up 1 .*Newest_call"):
        variables()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, plugin: ctypes.CDLL) -> None:
    """Pretend that a known jaxlib is installed and not imported, and set no variable."""
    monkeypatch.setattr(library_module.importlib.metadata, "version", lambda name: "0.10.2")
    for name in ("JAX_CPU_COLLECTIVES_IMPLEMENTATION", library_module.VARIABLE):
        # Set first, so that the end of the test restores the variable.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("jax", "jaxlib"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("installed")
def test_enable_sets_both_variables() -> None:
    enable()
    assert variables().items() <= library_module.os.environ.items()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("module", ["jax", "jaxlib"])
def test_enable_after_import_of_jax_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, sys)
    with pytest.raises(ConfigError, match="jax was imported before the plug-in"):
        enable()


@pytest.mark.usefixtures("installed")
def test_enable_keeps_another_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library_module.VARIABLE, "/opt/mpi/libmpiwrapper.so")
    with pytest.raises(ConfigError, match=r"MPITRAMPOLINE_LIB='/opt/mpi.* is set already"):
        enable()


def test_eval_of_the_variables_fails_where_they_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> Path:
        raise BackendUnavailableError("jax: the plug-in is not built")

    monkeypatch.setattr(library_module, "library", absent)
    assert print_variables([]) == 2
    out, err = capsys.readouterr()
    assert "jax: the plug-in is not built" in err
    done = run("sh", "-ec", 'eval "$1"; echo went on', "sh", out)
    assert (done.returncode, done.stdout) == (1, "")


# -- calls of XLA ------------------------------------------------------------------------------

SPLIT, FREE, SIZE, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, EXCHANGE, FINALIZE = range(8)
INT32 = 3


class Failures:
    """Texts of errors, in place of those in C."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: bytes, interrupted: bool) -> int:
        self.texts.append(text.decode())
        return 1000


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def calls(failures: Failures) -> Calls:
    return Calls(RendezvousError("nobody came"), failures)


def split(calls: Calls, color: int, key: int) -> int:
    return calls(SPLIT, 1, None, None, 0, 0, 0, color, key, 0) | (key + 1) << 32


def added(calls: Calls, handle: int, number: int) -> tuple[int, int]:
    """Return code and result of XLA's sum of one integer."""
    given, taken = np.array([number], np.int32), np.zeros(1, np.int32)
    addresses = given.ctypes.data, taken.ctypes.data
    return calls(ALL_REDUCE, handle, *addresses, 1, INT32, 0, -1, -1, 0), int(taken[0])


def size_of(calls: Calls, handle: int) -> int:
    return calls(SIZE, handle, None, None, 0, 0, 0, -1, -1, 0)


def test_communicator_without_announcement_fails_by_name(calls: Calls, failures: Failures) -> None:
    handle = split(calls, 2048, 2)
    # XLA must make a call, and not only copy this process's own piece.
    assert size_of(calls, handle) == 3
    assert added(calls, handle, 1)[0] == 1000
    assert "whose first device is 2048, with this process at place 2" in failures.texts[0]


def test_announced_communicator_has_the_announced_size(calls: Calls) -> None:
    calls.announce(0, [0, 2, 3], 77)
    handle = split(calls, 0, 1)
    assert size_of(calls, handle) == 3
    assert added(calls, handle, 77) == (0, 77)
    assert calls.announced()


def test_announcement_is_not_taken_by_another_device(calls: Calls) -> None:
    calls.announce(0, [0, 2], 77)
    assert size_of(calls, split(calls, 4096, 0)) == 2
    assert not calls.announced()


def test_announced_communicator_that_another_program_uses_is_refused(
    calls: Calls, failures: Failures
) -> None:
    calls.announce(0, [0, 1], 77)
    handle = split(calls, 0, 0)
    assert added(calls, handle, 5)[0] == 1000
    assert added(calls, handle, 77)[0] == 1000
    assert not calls.announced()
    assert "processes [0, 1]: another program used it" in failures.texts[1]


def test_announcement_ends_with_the_small_program(calls: Calls) -> None:
    calls.announce(0, [0, 1], 77)
    assert not calls.announced()
    handle = split(calls, 0, 0)
    assert added(calls, handle, 77)[0] == 1000


def test_failed_connection_is_raised_by_check_and_calls(calls: Calls, failures: Failures) -> None:
    with pytest.raises(RendezvousError, match="nobody came"):
        calls.check()
    calls.announce(0, [0, 1], 77)
    handle = split(calls, 0, 0)
    added(calls, handle, 77)
    assert added(calls, handle, 1)[0] == 1000
    assert failures.texts == ["RendezvousError: nobody came"]


def test_error_longer_than_buffer_of_xla_is_cut_and_printed(
    failures: Failures, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls(RendezvousError("é" * 400), failures)
    calls.announce(0, [0, 1], 7)
    handle = split(calls, 0, 0)
    added(calls, handle, 7)
    added(calls, handle, 1)
    assert failures.texts[0].endswith("é…")
    assert len(failures.texts[0].encode()) <= 511
    assert "é" * 400 in capsys.readouterr().err


def test_freed_communicator_is_forgotten(calls: Calls, failures: Failures) -> None:
    calls.announce(0, [0, 1], 7)
    handle = split(calls, 0, 0)
    assert calls(FREE, handle, None, None, 0, 0, 0, -1, -1, 0) == 0
    assert added(calls, handle, 7)[0] == 1000


# -- the beginning -----------------------------------------------------------------------------

calls_module = sys.modules[Calls.__module__]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    """Return the list of what ``begin`` gives to JAX, where no rank can connect."""
    given: list[Calls] = []

    def refuse() -> None:
        raise RuntimeError("torch is broken")

    monkeypatch.setattr(calls_module, "install", given.append)
    monkeypatch.setattr(calls_module, "connect_processes", refuse)
    return given


def test_begin_keeps_any_error_for_the_first_program(
    begun: list[Calls], plugin: ctypes.CDLL
) -> None:
    installed: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
        lambda caller, runner: installed.append(caller)
    )
    calls_module.begin(interface_of(plugin), 0, ctypes.cast(function, ctypes.c_void_p).value)
    with pytest.raises(RuntimeError, match="torch is broken"):
        begun[0].check()
    assert len(installed) == 1


@pytest.mark.parametrize("older", [True, False])
def test_begin_of_another_version_calls_no_function_of_the_library(
    begun: list[Calls], plugin: ctypes.CDLL, older: bool
) -> None:
    # At address 64 there is no function.
    calls_module.begin(*(() if older else (interface_of(plugin) + 1, 64, 64)))
    with pytest.raises(BackendUnavailableError, match=OTHER_VERSION):
        begun[0].check()


# -- rendezvous and launch ---------------------------------------------------------------------


class Client:
    """JAX's client of its key-value store, with the texts of its errors."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool) -> None:
        if key in self.values and not allow_overwrite:
            raise RuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_try_get_bytes(self, key: str) -> bytes:
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get_bytes(self, key: str, timeout: int) -> bytes:
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        self.values.pop(key, None)


def test_jax_store_keeps_first_value() -> None:
    store = JaxStore(Client())
    assert store.try_get("a") is None
    assert store.put_if_absent("a", b"1") == b"1"
    assert store.put_if_absent("a", b"2") == b"1"
    store.delete("a")
    assert store.try_get("a") is None


def test_jax_store_names_lost_coordinator() -> None:
    class Gone(Client):
        def key_value_set_bytes(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("UNAVAILABLE: failed to connect.\nmore")

    with pytest.raises(RendezvousError, match=r"set of 'a' .* UNAVAILABLE: failed to connect\. "):
        JaxStore(Gone()).set("a", b"1")


def test_place_is_read_from_variables_of_run() -> None:
    rank = {"COLLECTIVE_RANK": "2", "COLLECTIVE_SIZE": "4"}
    found = {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    assert place(found) == ("127.0.0.1:4711", 4, 2)
    assert place({**found, "JAX_COORDINATOR_ADDRESS": "node1:9"}) == ("node1:9", 4, 2)
    assert place(rank) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--backend", "threads"], "--jax with backend threads: JAX needs a process for each rank"),
        (["--min-ranks", "1"], "--jax with min_ranks 1 of 2: a JAX program cannot go on"),
    ],
)
def test_run_with_jax_refuses_what_jax_cannot(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str], nowhere: Path
) -> None:
    assert command.main(["run", "-n", "2", "--jax", *options, "-m", "this"]) == 2
    assert text in capsys.readouterr().err


def test_run_with_jax_where_jax_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nowhere: Path,
    plugin: ctypes.CDLL,
) -> None:  # fmt: skip
    def absent(name: str) -> str:
        raise library_module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library_module.importlib.metadata, "version", absent)
    assert command.main(["run", "-n", "2", "--jax", "-m", "this"]) == 2
    assert "JAX is not installed in this environment" in capsys.readouterr().err


def test_handles_carry_the_rank(plugin: ctypes.CDLL) -> None:
    rank = ctypes.c_int()
    plugin.MPIABI_Comm_rank(ctypes.c_void_p(struct.unpack("q", b"\5\0\0\0\4\0\0\0")[0]),
                            ctypes.byref(rank))  # fmt: skip
    assert rank.value == 3
