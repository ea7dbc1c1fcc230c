"""The NCCL library: agreement of our tables with nccl.h, and finding and loading the library."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from collective.backends.nccl import library as libraries
from collective.backends.nccl import prototypes
from collective.backends.nccl.library import NcclLibrary, find, install_command, load
from collective.backends.nccl.prototypes import FUNCTIONS, UniqueId, version_text
from collective.errors import BackendError, BackendUnavailableError, UnsupportedError
from collective.memory.dtypes import BY_NAME
from tests import fakes
from tests.support.interpreter import ROOT, printed

# -- the header -----------------------------------------------------------------------------------


def wheel() -> Path | None:
    """Return the folder of NVIDIA's installed wheel, or None."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = list((spec and spec.submodule_search_locations) or ())
    return Path(folders[0]) if folders else None


@pytest.fixture(scope="module")
def header() -> str:
    named = os.environ.get("NCCL_HEADER")
    folder = wheel()
    path = Path(named) if named else folder and folder / "include" / "nccl.h"
    if path is None:
        pytest.skip("no nccl.h: install collective-comm[nccl], or name the file in NCCL_HEADER")
    text = path.read_text()
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def enum(header: str, name: str) -> dict[str, int]:
    """Return the names and values of an enum in the header."""
    body = re.search(r"typedef\s+enum\s*\{([^{}]*)\}\s*" + name + r"\s*;", header)
    assert body is not None, name
    return {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)\s*[,}\s]", body[1])}


def constant(header: str, name: str) -> int:
    definition = re.search(rf"#define\s+{name}\s+(-?\w+)", header)
    assert definition is not None, name
    return int(definition[1], 0)


def ctype(spelt: str) -> object:
    """Return the ctypes type that our table should have for a type in the header."""
    if "*" in spelt or re.search(r"ncclComm_t|ncclWindow_t|cudaStream_t", spelt):
        return ctypes.c_char_p if spelt == "const char*" else ctypes.c_void_p
    words = spelt.replace("const", "").split()
    enums = ("ncclResult_t", "ncclDataType_t", "ncclRedOp_t", "ncclScalarResidence_t")
    return {
        "int": ctypes.c_int,
        "size_t": ctypes.c_size_t,
        "ncclUniqueId": UniqueId,
        **dict.fromkeys(enums, ctypes.c_int),
    }[words[0]]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_prototype_matches_header(header: str, name: str) -> None:
    declaration = re.search(rf"([\w ]+[\w*])\s+{name}\s*\(([^)]*)\)\s*;", header)
    assert declaration is not None, f"{name} is not declared"
    # Remove the names of the parameters, which a pointer's star may be attached to.
    declared = [
        re.sub(r"\w+$", "", parameter.strip())
        for parameter in declaration[2].split(",")
        if parameter.strip()
    ]
    result = re.sub(r"\s+", " ", declaration[1]).strip()
    assert [ctype(parameter) for parameter in declared] == list(FUNCTIONS[name].arguments)
    assert ctype(result) == FUNCTIONS[name].result


def test_codes_match_header(header: str) -> None:
    results = enum(header, "ncclResult_t")
    results.pop("ncclNumResults")
    assert {code: name for name, code in results.items()} == prototypes.RESULTS
    types = enum(header, "ncclDataType_t")
    # NCCL calls float8_e4m3fn ncclFloat8e4m3.
    codes = {name.lower(): code for name, code in types.items()}
    for name, code in prototypes.DTYPES.items():
        assert codes[f"nccl{name.replace('_', '').removesuffix('fn')}"] == code, name
    assert types["ncclNumTypes"] == len(prototypes.ITEMSIZES)
    ops = re.search(r"typedef\s+enum\s*\{([^{}]*)\}\s*ncclRedOp_t", header)
    assert ops is not None
    codes = {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)\b", ops[1])}
    assert {f"nccl{name.title()}": code for name, code in prototypes.OPS.items()}.items() <= (
        codes.items()
    )
    assert enum(header, "ncclScalarResidence_t")["ncclScalarHostImmediate"] == (
        prototypes.SCALAR_ON_HOST
    )
    assert constant(header, "NCCL_WIN_COLL_SYMMETRIC") == prototypes.WINDOW_SYMMETRIC
    assert constant(header, "NCCL_UNIQUE_ID_BYTES") == ctypes.sizeof(UniqueId)


def test_config_struct_matches_header(header: str) -> None:
    struct = re.search(r"typedef\s+struct\s+ncclConfig_v\d+\s*\{([^}]*)\}", header)
    assert struct is not None
    spelt = [" ".join(line.split()) for line in struct[1].split(";") if line.strip()]
    declared = [(line.split()[-1].lstrip("*"), " ".join(line.split()[:-1])) for line in spelt]
    kinds = {
        "size_t": ctypes.c_size_t,
        "unsigned int": ctypes.c_uint,
        "int": ctypes.c_int,
        "const char": ctypes.c_char_p,
    }
    fields = [(name, kind) for name, kind in prototypes.NcclConfig._fields_]
    assert [(name, kinds[kind]) for name, kind in declared][: len(fields)] == fields
    config = prototypes.new_config(blocking=0)
    assert config.size == ctypes.sizeof(prototypes.NcclConfig)
    assert config.magic == constant(header, "NCCL_API_MAGIC")
    assert config.blocking == 0
    assert (config.minCTAs, config.netName) == (-(2**31), None)


# -- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"), [(23203, "2.32.3"), (21005, "2.10.5"), (2708, "2.7.8"), (2804, "2.8.4")]
)
def test_version_text_formats_code(code: int, text: str) -> None:
    assert version_text(code) == text


def loaded(version: int) -> NcclLibrary:
    path = fakes.library_path(version)
    return NcclLibrary(ctypes.CDLL(path), path)


def test_new_version_has_all_features() -> None:
    library = loaded(22907)
    assert (library.version, library.text) == (22907, "2.29.7")
    assert all(library.features().values())
    assert [library.dtype(BY_NAME[name]) for name in ("bfloat16", "float16", "int64")] == [9, 6, 4]
    assert [library.dtype(BY_NAME[name]) for name in ("bool", "int16", "complex64")] == [None] * 3


def test_old_version_names_missing_feature_and_needed_version() -> None:
    library = loaded(21903)
    lacking = {name for name, present in library.features().items() if not present}
    assert lacking == {"fp8", "windows"}
    text = (
        r"ncclCommWindowRegister: NCCL 2\.19\.3 .* 2\.27\.3 brings it.* pip install nvidia-nccl-cu"
    )
    with pytest.raises(UnsupportedError, match=text):
        library.function("ncclCommWindowRegister")


def test_functions_exist_since_version_in_table() -> None:
    # The fake was written from the release notes of NCCL and not from the table.
    for version in (21904, 22703, 22907):
        library = loaded(version)
        has = {name for name in FUNCTIONS if library.has(name)}
        assert has == {
            name for name, prototype in FUNCTIONS.items() if prototype.since <= version
        }, version


# -- finding the library ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_loaded", {})


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_in_wheel", lambda: None)
    monkeypatch.setattr(libraries, "_of_system", lambda: None)
    monkeypatch.setattr(libraries, "_SONAME", "libnccl-that-is-not-there.so.2")


def test_named_library_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = fakes.library_path()
    monkeypatch.setenv("COLLECTIVE_NCCL_LIBRARY", path)
    assert load().path == find() == path
    assert load() is load()
    old = fakes.library_path(21903)
    assert load(old).text == "2.19.3"  # an argument takes precedence over the variable


def test_wrongly_named_library_raises_backend_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    # A usable library, which must not be used instead.
    monkeypatch.setattr(libraries, "_in_wheel", fakes.library_path)
    monkeypatch.setenv("COLLECTIVE_NCCL_LIBRARY", "/no/such/libnccl.so.2")
    assert find() is None
    with pytest.raises(BackendUnavailableError, match=r"names, /no/such/libnccl\.so\.2, cannot be"):
        load()


def test_wheel_takes_precedence_over_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "libnccl.so.2"
    there.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    monkeypatch.setattr(libraries, "_in_wheel", lambda: None)
    assert find() == str(there)
    monkeypatch.setattr(libraries, "_in_wheel", fakes.library_path)
    assert find() == load().path == fakes.library_path()


def test_wheel_is_found_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "nvidia" / "nccl"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    program = "from collective.backends.nccl.library import find; print(find())"

    def found() -> str:
        return printed("-c", program, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}).strip()

    path = package / "lib" / "libnccl.so.2"
    assert found() != str(path)
    path.touch()
    assert found() == str(path)


def test_missing_library_error_lists_places_and_remedy(absent: None) -> None:
    assert find() is None
    with pytest.raises(BackendUnavailableError) as caught:
        load()
    for words in (
        "no package nvidia-nccl-cu12 or -cu13 is installed",
        "libnccl-that-is-not-there.so.2: cannot open",
        "pip install nvidia-nccl-cu1",
        "COLLECTIVE_NCCL_LIBRARY=",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(("driver", "package"), [(13000, "cu13"), (12040, "cu12")])
def test_install_command_matches_driver(
    monkeypatch: pytest.MonkeyPatch, driver: int, package: str
) -> None:
    class Cuda:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, version: object) -> int:
            ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = driver  # type: ignore
            return 0

    monkeypatch.setattr(libraries.ctypes, "CDLL", Cuda)
    assert install_command() == f"pip install nvidia-nccl-{package}"


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "ncclUnhandledCudaError, 1; NCCL 2.29.7). With NCCL_DEBUG=INFO"),
        (2, "ncclSystemError, 2; NCCL 2.29.7). With NCCL_DEBUG=INFO, NCCL writes"),
        (5, "NCCL_DEBUG=WARN"),
        (6, "see the other ranks' errors"),
    ],
)
def test_error_codes_raise_error_with_remedy(code: int, words: str) -> None:
    with pytest.raises(BackendError) as caught:
        loaded(22907).check(code, "ncclAllReduce of rank 1")
    assert str(caught.value).startswith("ncclAllReduce of rank 1: ")
    assert words in str(caught.value)
    assert (caught.value.code, caught.value.backend) == (code, "nccl")


def test_success_and_in_progress_raise_nothing() -> None:
    for code in (0, 7):
        loaded(22907).check(code, "ncclAllReduce")


def test_unique_ids_are_unique() -> None:
    library = loaded(22907)
    ids = {library.unique_id() for _ in range(3)}
    assert {len(unique_id) for unique_id in ids} == {128}
    assert len(ids) == 3


# -- the real library, if it is installed ---------------------------------------------------------


@pytest.fixture
def real() -> Callable[[str], str]:
    folder = wheel()
    path = os.environ.get("NCCL_LIBRARY") or (folder and folder / "lib" / "libnccl.so.2")
    if path is None:
        pytest.skip("no NCCL: install collective-comm[nccl], or name the file in NCCL_LIBRARY")

    def run(program: str) -> str:
        # Use a separate process, because this process cannot unload the library.
        return printed(
            "-c", program, COLLECTIVE_NCCL_LIBRARY=str(path), NCCL_SOCKET_IFNAME="lo",
            env={"PATH": os.environ["PATH"]},
        )  # fmt: skip

    return run


def test_real_library_has_all_functions(real: Callable[[str], str]) -> None:
    words = real(
        "from collective.backends.nccl.library import load\n"
        "from collective.backends.nccl.prototypes import FUNCTIONS\n"
        "found = load()\n"
        "due = {n for n, each in FUNCTIONS.items() if each.since <= found.version}\n"
        "print(len(found.unique_id()), due ^ {n for n in FUNCTIONS if found.has(n)})\n"
    )
    assert words.splitlines()[-1] == "128 set()"


def test_real_library_without_gpu_raises_backend_error(real: Callable[[str], str]) -> None:
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    words = real(
        "import contextlib\n"
        "from collective.backends.nccl.engine import NcclComm\n"
        "from collective.backends.nccl.library import load\n"
        "from collective.errors import BackendError\n"
        "class NoDevice:\n"
        "    ordinal = 0\n"
        "    def active(self): return contextlib.nullcontext()\n"
        "found = load()\n"
        "try:\n"
        "    NcclComm.create(found, found.unique_id(), 0, 1, NoDevice(), lambda: None)\n"
        "except BackendError as error:\n"
        "    print(error.code, error)\n"
    )
    assert re.search(r"^1 ncclCommInitRankConfig of rank 0: unhandled cuda error", words, re.M), (
        words
    )
