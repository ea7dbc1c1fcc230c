"""Element types: NumPy's and back, what cannot travel, and codes that must not move."""

from __future__ import annotations

import numpy as np
import pytest

from collective.errors import DtypeError
from collective.memory import dtypes

NATIVE = [name for name in dtypes.BY_NAME if name not in dtypes.FOREIGN]


@pytest.mark.parametrize("name", NATIVE)
def test_a_numpy_type_is_found_and_kept_as_it_is(name: str) -> None:
    found = dtypes.from_numpy(np.dtype(name))
    assert found is dtypes.named(name)
    assert found.storage == np.dtype(name)
    assert found.itemsize == np.dtype(name).itemsize
    assert str(found) == name


def test_codes_are_those_on_the_wire() -> None:
    order = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
        "float16 float32 float64 complex64 complex128 bfloat16 float8_e4m3fn float8_e5m2"
    ).split()
    assert {name: dtype.code for name, dtype in dtypes.BY_NAME.items()} == {
        name: code for code, name in enumerate(order)
    }


def test_bfloat16_is_held_in_the_bits_of_uint16() -> None:
    found = dtypes.named("bfloat16")
    assert (found.storage, found.kind, found.itemsize) == (np.dtype("uint16"), "f", 2)


def test_foreign_types_are_those_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = dtypes.from_numpy(np.dtype(ml_dtypes.bfloat16))
    assert found is dtypes.named("bfloat16")
    assert dtypes.from_numpy(np.dtype(np.uint16)) is dtypes.named("uint16")
    for name in dtypes.FOREIGN:
        assert dtypes.from_numpy(np.dtype(getattr(ml_dtypes, name))) is dtypes.named(name)
    with pytest.raises(DtypeError, match="float8_e8m0fnu cannot travel"):
        dtypes.from_numpy(np.dtype(ml_dtypes.float8_e8m0fnu))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param(np.longlong, "int64", id="longlong"),
        pytest.param(np.intc, "int32", id="intc"),
        pytest.param(np.dtype("=f4"), "float32", id="native-order"),
        pytest.param(np.dtype("f4", metadata={"unit": "m"}), "float32", id="with-metadata"),
    ],
)
def test_other_spellings_of_a_type_are_that_type(given: type, name: str) -> None:
    assert dtypes.from_numpy(np.dtype(given)) is dtypes.named(name)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(object, id="object"),
        pytest.param("U3", id="text"),
        pytest.param("S3", id="bytes"),
        pytest.param("M8[s]", id="date"),
        pytest.param("m8[s]", id="duration"),
        pytest.param([("a", "f4")], id="record"),
        pytest.param(np.dtype("f4").newbyteorder(), id="foreign-order"),
        pytest.param(np.longdouble, id="longdouble"),
    ],
)
def test_what_cannot_travel_is_refused_with_the_list_and_a_remedy(given: object) -> None:
    with pytest.raises(DtypeError, match=r"cannot travel; one of bool, .*astype"):
        dtypes.from_numpy(np.dtype(given))  # type: ignore[call-overload]


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(DtypeError, match="'float8' cannot travel; one of bool, int8"):
        dtypes.named("float8")
