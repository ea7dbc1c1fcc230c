"""Objects as bytes: they come back as they were, and nothing else can come."""

from __future__ import annotations

import json
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from collective.dtypes import BY_NAME, FOREIGN
from collective.errors import CollectiveError, DtypeError, InvalidArgumentError
from collective.objects import decode, encode

settings.register_profile("objects", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("objects")


def _same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(_same, a.items(), b.items()))
    return a == b


HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
ARRAYS = st.sampled_from(sorted(set(BY_NAME) - set(FOREIGN))).flatmap(
    lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
OBJECTS = st.recursive(
    HASHABLE | st.floats() | ARRAYS | st.sets(HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(OBJECTS)
def test_objects_come_back_as_they_were(value):
    raw = encode(value)
    assert raw.dtype == np.uint8
    assert _same(decode(raw), value)


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(10**5000),
        float("inf"),
        -0.0,
        complex("nan+infj"),
        "\ud800",
        b"",
        (),
        [[]],
        {(1, frozenset([2])): {3: 4}},
        np.float32(1.5),
        np.array(3),
        np.zeros((0, 3)),
        ml_dtypes.bfloat16(2.5),
        np.array([1.5, -2], ml_dtypes.bfloat16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_at_the_edges_come_back_as_they_were(value):
    got = decode(encode(value))
    assert _same(got, value) or repr(got) == repr(value)


def test_a_bytearray_comes_back_as_bytes():
    assert decode(encode(bytearray(b"ab"))) == b"ab"


def test_strided_arrays_come_back_contiguous_and_writable():
    x = np.arange(12.0).reshape(3, 4)[::-1, ::2].T
    got = decode(encode([b"x", x]))[1]
    np.testing.assert_array_equal(got, x)
    got[:] = 0


def test_tensors_come_back_as_tensors():
    torch = pytest.importorskip("torch")
    for x in (torch.arange(6).reshape(2, 3).t(), torch.ones(2, dtype=torch.bfloat16)):
        got = decode(encode({"x": x}))["x"]
        assert torch.equal(got, x)
        assert got.dtype == x.dtype


class Custom:
    pass


@pytest.mark.parametrize(
    "value", [Custom(), object, len, range(3), 1j.conjugate, {"a": [Custom()]}, type], ids=repr
)
def test_other_objects_are_refused_with_the_remedy(value):
    with pytest.raises(InvalidArgumentError, match="pickle=True"):
        encode(value)


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([None]), np.str_("x")], ids=repr)
def test_arrays_that_cannot_travel_are_refused(value):
    with pytest.raises(DtypeError):
        encode(value)


# -- pickle --------------------------------------------------------------------------------

_ran = []


class Attack:
    def __reduce__(self):
        return _ran.append, ("it ran",)


def test_a_pickle_is_not_read_unless_asked_for():
    raw = encode(Attack(), use_pickle=True)
    with pytest.raises(InvalidArgumentError, match="any code"):
        decode(raw)
    assert _ran == []
    assert decode(encode(Custom, use_pickle=True), use_pickle=True) is Custom


def test_plain_data_is_read_where_pickle_is_allowed():
    assert decode(encode([1, 2]), use_pickle=True) == [1, 2]


def test_a_bare_pickle_is_not_taken_for_an_object():
    raw = np.frombuffer(pickle.dumps(Attack()), np.uint8)
    with pytest.raises(CollectiveError):
        decode(raw, use_pickle=True)
    assert _ran == []


# -- malformed bytes -----------------------------------------------------------------------


def _written(node, blob: bytes = b"") -> np.ndarray:
    """Return well-framed bytes whose structure is ``node``."""
    text = json.dumps(node).encode()
    head = b"\x01" + len(text).to_bytes(8, "little") + text
    return np.frombuffer(head + b"\0" * (-len(head) % 16) + blob, np.uint8)


def test_the_test_writes_what_the_decoder_reads():
    assert decode(_written(["bytes", 3], b"abc")) == b"abc"


@pytest.mark.parametrize(
    "node",
    [
        [],
        [["list"]],
        ["no such tag", 1],
        [1, 2],
        ["bytes"],
        ["bytes", 100],
        ["bytes", -1],
        ["bytes", "3"],
        ["complex", "x", "y"],
        ["complex", 1, 2, 3],
        ["int", 5],
        ["int", "zz"],
        ["dict", 3],
        ["dict", [1]],
        ["dict", [["list"], 1]],
        ["set", ["list"]],
        ["array"],
        ["array", "numpy"],
        ["array", "numpy", "float32", 1000],
        ["array", "numpy", "float32", -1],
        ["array", "numpy", "float32", 2**62, 2**62],
        ["array", "numpy", "float32", 0.5],
        ["array", "numpy", "float32", True],
        ["array", "numpy", "object", 1],
        ["array", "no such framework", "float32", 1],
        ["array", ["numpy"], "float32", 1],
        ["array", 3, "float32", 1],
    ],
    ids=str,
)
def test_malformed_structures_are_refused(node):
    with pytest.raises(CollectiveError):
        decode(_written(node, b"\0" * 32))


def test_deep_nesting_is_refused_and_not_a_crash():
    text = b'["list",' * 100_000 + b"1" + b"]" * 100_000
    raw = b"\x01" + len(text).to_bytes(8, "little") + text
    with pytest.raises(CollectiveError):
        decode(np.frombuffer(raw, np.uint8))


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_our_error(data):
    try:
        decode(np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8))
    except CollectiveError:
        return


@given(OBJECTS, st.data())
def test_damaged_bytes_give_an_object_or_our_error(value, data):
    raw = encode(value).copy()
    position = data.draw(st.integers(0, raw.size - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    for damaged in (raw, raw[:position]):
        try:
            decode(damaged)
        except CollectiveError:
            continue
