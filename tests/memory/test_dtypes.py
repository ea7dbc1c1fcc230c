"""Element types: conversion from NumPy, unsupported types, and codes that must not change."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from collective.errors import DtypeError
from collective.memory import dtypes

pytestmark = pytest.mark.quick

NATIVE = [name for name in dtypes.BY_NAME if name not in dtypes.FOREIGN]


@pytest.mark.parametrize("name", NATIVE)
def test_from_numpy_of_native_dtype_keeps_storage(name: str) -> None:
    dtype = dtypes.from_numpy(np.dtype(name))
    assert dtype is dtypes.named(name)
    assert dtype.storage == np.dtype(name)
    assert dtype.itemsize == np.dtype(name).itemsize
    assert str(dtype) == name


def test_dtype_codes_match_wire_format() -> None:
    order = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
        "float16 float32 float64 complex64 complex128 bfloat16 float8_e4m3fn float8_e5m2"
    ).split()
    assert {name: dtype.code for name, dtype in dtypes.BY_NAME.items()} == {
        name: code for code, name in enumerate(order)
    }


def test_bfloat16_storage_is_uint16() -> None:
    dtype = dtypes.named("bfloat16")
    assert (dtype.storage, dtype.kind, dtype.itemsize) == (np.dtype("uint16"), "f", 2)


def test_from_numpy_recognises_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = dtypes.from_numpy(np.dtype(ml_dtypes.bfloat16))
    assert dtype is dtypes.named("bfloat16")
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
def test_from_numpy_accepts_other_spellings(given: type, name: str) -> None:
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
        pytest.param(np.dtype(ml_dtypes.bfloat16).newbyteorder(), id="foreign-order-bfloat16"),
        pytest.param(np.longdouble, id="longdouble"),
    ],
)
def test_from_numpy_of_unsupported_dtype_lists_names_and_remedy(given: object) -> None:
    with pytest.raises(DtypeError, match=r"cannot travel; one of bool, .*astype"):
        dtypes.from_numpy(np.dtype(given))  # type: ignore[call-overload]


def test_named_with_unknown_name_lists_names() -> None:
    with pytest.raises(DtypeError, match="'float8' cannot travel; one of bool, int8"):
        dtypes.named("float8")
