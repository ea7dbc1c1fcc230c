"""Objects as bytes: decoding restores each object, and malformed bytes raise an error."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import re
import subprocess
import sys
from collections import OrderedDict, namedtuple
from random import Random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from collective.communicator.objects import decode, encode
from collective.errors import CollectiveError, DtypeError, InvalidArgumentError, MismatchError
from collective.memory import nested
from collective.memory.dtypes import BY_NAME, FOREIGN
from tests.support.interpreter import ROOT
from tests.support.on_ranks import on_ranks, ranks_of
from tests.support.selection import in_whole

pytestmark = pytest.mark.quick

pair = ranks_of(("threads", 2))
worlds = ranks_of(("threads", 2), ("shm", 2), in_whole(("gloo", 2)))

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
def test_object_round_trip_restores_value(value):
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
def test_object_round_trip_restores_extreme_values(value):
    decoded = decode(encode(value))
    assert _same(decoded, value) or repr(decoded) == repr(value)


def test_bytearray_is_decoded_as_bytearray():
    assert _same(decode(encode(bytearray(b"ab"))), bytearray(b"ab"))


def test_strided_array_is_decoded_contiguous_and_writable():
    x = np.arange(12.0).reshape(3, 4)[::-1, ::2].T
    decoded = decode(encode([b"x", x]))[1]
    np.testing.assert_array_equal(decoded, x)
    decoded[:] = 0


def test_tensor_round_trip_restores_tensor():
    torch = pytest.importorskip("torch")
    for x in (torch.arange(6).reshape(2, 3).t(), torch.ones(2, dtype=torch.bfloat16)):
        decoded = decode(encode({"x": x}))["x"]
        assert torch.equal(decoded, x)
        assert decoded.dtype == x.dtype


class Custom:
    pass


@pytest.mark.parametrize(
    "value",
    [Custom(), object, len, range(3), 1j.conjugate, {"a": [Custom()]}, type],
    ids=["object", "class", "builtin", "range", "method", "nested", "type"],
)
def test_encode_of_other_object_recommends_pickle(value):
    with pytest.raises(InvalidArgumentError, match="pickle=True"):
        encode(value)


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([None]), np.str_("x")], ids=repr)
def test_encode_of_unsupported_dtype_raises_dtype_error(value):
    with pytest.raises(DtypeError):
        encode(value)


# -- pickle --------------------------------------------------------------------------------

_ran = []


class Attack:
    def __reduce__(self):
        return _ran.append, ("it ran",)


def test_decode_refuses_pickle_by_default():
    raw = encode(Attack(), use_pickle=True)
    with pytest.raises(InvalidArgumentError, match="any code"):
        decode(raw)
    assert _ran == []
    assert decode(encode(Custom, use_pickle=True), use_pickle=True) is Custom


def test_decode_reads_plain_data_with_pickle_allowed():
    assert decode(encode([1, 2]), use_pickle=True) == [1, 2]


def test_decode_refuses_unframed_pickle():
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


def test_written_bytes_are_readable_by_decode():
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
        ["array", "numpy", ["float32"], 1],
        ["array", "numpy", "float32", 2**70, 0],
        ["array", "numpy", "float32", *[1] * 65],
        ["bytes", 2**70],
        ["bytes", 1.0],
        ["bytes", True],
        ["complex", "1+2j"],
        ["dict", [["set"], 1]],
        ["frozenset", ["tuple", ["dict"]]],
        ["set", ["array", "numpy", "float32", 1]],
        {"list": 1},
        ["list", {}],
    ],
    ids=lambda node: str(node)[:60],
)
def test_decode_of_malformed_structure_raises_collective_error(node):
    with pytest.raises(CollectiveError):
        decode(_written(node, b"\0" * 32))


def _framed(text: bytes, length: int | None = None) -> np.ndarray:
    return np.frombuffer(
        b"\x01" + (len(text) if length is None else length).to_bytes(8, "little") + text, np.uint8
    )


@pytest.mark.parametrize("length", [5, 2**31, 2**63, 2**64 - 1])
def test_decode_of_too_long_structure_raises_collective_error(length):
    with pytest.raises(CollectiveError, match=f"has 13 bytes; its header announces {length} more"):
        decode(_framed(b"1234", length))


DEEP = b'["list",' * 100_000 + b"1" + b"]" * 100_000


def test_decode_of_deep_nesting_raises_collective_error():
    with pytest.raises(CollectiveError, match="nested too deeply"):
        decode(_framed(DEEP))


def test_decode_of_deep_nesting_with_high_recursion_limit_raises():
    program = """
import sys
import numpy as np
from collective.errors import CollectiveError
from collective.communicator.objects import decode
sys.setrecursionlimit(10**7)
try:
    decode(np.frombuffer(sys.stdin.buffer.read(), np.uint8))
except CollectiveError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input=_framed(DEEP).tobytes(), capture_output=True,
        timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert done.stdout.endswith(b"nested more than 10000 times\n")


def test_decode_ignores_brackets_in_texts(monkeypatch):
    monkeypatch.setattr(sys, "getrecursionlimit", lambda: 10**7)
    value = ['"\\[' * 20_000, [1, ["]["]]]
    assert decode(encode(value)) == value


@pytest.mark.parametrize("nested", [False, True], ids=["itself", "too deep"])
def test_encode_of_endless_nesting_raises_invalid_argument(nested):
    value = []
    if nested:
        for _ in range(100_000):
            value = [value]
    else:
        value.append(value)
    with pytest.raises(InvalidArgumentError, match="contains itself, or is nested too deeply"):
        encode(value)


def test_decode_of_long_integer_raises_collective_error(monkeypatch):
    # Python refuses them as well, unless a program has switched that off.
    monkeypatch.setattr(sys, "get_int_max_str_digits", lambda: 0, raising=False)
    with pytest.raises(CollectiveError, match="an integer of 5000 decimal digits"):
        decode(_framed(b"9" * 5000))
    assert decode(_framed(b'["list",12,-3]')) == [12, -3]


# -- work in proportion to the bytes -----------------------------------------------------------

# Multiples of this number have the same hash, and so have containers built of them alike.
MODULUS = sys.hash_info.modulus


def _nested(depth: int, width: int, number: int) -> list:
    """Return sets nested ``depth`` deep; different ``number`` means one different leaf."""
    last = number + width if depth == 1 else _nested(depth - 1, width, number + width)
    if depth == 1:
        return ["frozenset", *(MODULUS * multiple for multiple in [*range(width), last])]
    return ["frozenset", *(_nested(depth - 1, width, multiple) for multiple in range(width)), last]


HOSTILE = {
    "integers": ["set", *(MODULUS * n for n in range(20_000))],
    "frozenset": ["frozenset", *(MODULUS * n for n in range(20_000))],
    "keys": ["dict", *([MODULUS * n, 0] for n in range(20_000))],
    "complex": ["set", *(["complex", 1000003.0 * n, -1.0 * n] for n in range(20_000))],
    "long tuples": ["set", *(["tuple", *[0] * 100, MODULUS * n] for n in range(4_000))],
    "nested sets": ["set", *(_nested(2, 16, n) for n in range(100))],
    "many small sets": ["list", *[["set", *(MODULUS * n for n in range(1_000))]] * 100],
}


@pytest.mark.parametrize("node", HOSTILE.values(), ids=list(HOSTILE))
def test_decode_of_hash_collisions_raises_collective_error(node):
    with pytest.raises(CollectiveError, match="so many elements or keys with the same hash"):
        decode(_written(node))


@pytest.mark.parametrize(
    "value",
    [
        {2.0**n for n in range(-1074, 1024)},
        {2**n for n in range(2_000)},
        set(itertools.product(range(-2, 3), repeat=5)),
        {frozenset((a, b)) for a in range(-20, 20) for b in range(-20, 20)},
        {frozenset((frozenset((a,)), a)): a for a in range(-3, 100)},
        {MODULUS * n for n in range(500)},
    ],
    ids=["floats", "integers", "grid", "edges", "nested", "few"],
)
def test_decode_accepts_accidental_hash_collisions(value):
    assert decode(encode(value)) == value


def test_decode_counts_cost_of_nested_set_once():
    # Each level has equal hashes to compare, whose cost includes everything below that level.
    node = ["frozenset", *range(1000)]
    for _ in range(100):
        node = ["frozenset", node, MODULUS, 2 * MODULUS]
    raw = _written(node)
    counted = []

    def look(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "_cost":
            counted.append(frame)

    sys.setprofile(look)
    try:
        decode(raw)
    finally:
        sys.setprofile(None)
    assert 1000 < len(counted) < 4000  # and not 100 times as many


TOKENS = [b"[", b"]", b",", b'"', b"{}", b"null", b"-", b"0", b"9" * 30, b"1e999", b"NaN", b"\\u",
          *(b'["%s",' % tag for tag in (b"list", b"tuple", b"dict", b"set", b"frozenset", b"array",
                                        b"bytes", b"int", b"complex"))]  # fmt: skip


def _mutated(raw: bytes, random: Random) -> bytes:
    """Return a mutated message, in most cases with a correct length in its frame."""
    body = bytearray(raw[9:])
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, len(body))
        end = start + random.randint(0, 8)
        choice = random.randrange(4)
        if choice == 0:
            body[start:end] = b""
        elif choice == 1:
            body[start:start] = body[start:end] * random.randint(1, 5)
        elif choice == 2:
            body[start:end] = random.choice(TOKENS)
        elif start < len(body):
            body[start] ^= 1 << random.randrange(8)
    length = int.from_bytes(raw[1:9], "little") + len(body) - len(raw) + 9
    return raw[:1] + max(0, length).to_bytes(8, "little") + bytes(body)


@settings(max_examples=100)
@given(OBJECTS, st.randoms(use_true_random=False))
def test_mutated_bytes_give_object_or_collective_error(value, random):
    raw = encode(value).tobytes()
    for _ in range(100):
        mutated = _mutated(raw, Random(random.random()))
        try:
            decode(np.frombuffer(mutated, np.uint8))
        except CollectiveError:
            continue


@given(st.binary(max_size=60))
def test_arbitrary_bytes_give_object_or_collective_error(data):
    try:
        decode(np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8))
    except CollectiveError:
        return


@given(OBJECTS, st.data())
def test_damaged_bytes_give_object_or_collective_error(value, data):
    raw = encode(value).copy()
    position = data.draw(st.integers(0, raw.size - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    for damaged in (raw, raw[:position]):
        try:
            decode(damaged)
        except CollectiveError:
            continue


# -- the calls -------------------------------------------------------------------------------


class NotRebuilt(Exception):
    """Exception that pickle calls with one argument, as it passes one to its base class."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class NotPickled:
    def __reduce__(self):
        raise ValueError("no copies")


_RECEIVES = {
    "broadcast_object": lambda comm, x: comm.broadcast_object(x, root=1, pickle=True),
    "gather_object": lambda comm, x: comm.gather_object(x, pickle=True),
    "all_gather_object": lambda comm, x: comm.all_gather_object(x, pickle=True),
    "scatter_object": lambda comm, x: comm.scatter_object(
        [x, 0] if comm.rank == 1 else None, root=1, pickle=True
    ),
    "recv_object": lambda comm, x: (
        comm.send_object(x, 0, pickle=True) if comm.rank else comm.recv_object(-1, pickle=True)
    ),
}


@pytest.mark.parametrize("call", _RECEIVES)
@on_ranks("pair")
def test_object_that_cannot_be_rebuilt_names_call_and_sender(comm, call):
    x = NotRebuilt("text", 5) if comm.rank == 1 else None
    if comm.rank == 0:
        with pytest.raises(
            CollectiveError, match=f"{call} from rank 1 .*cannot be unpickled.*code"
        ):
            _RECEIVES[call](comm, x)
    elif call != "all_gather_object":
        _RECEIVES[call](comm, x)
    else:
        with pytest.raises(CollectiveError, match=f"{call} from rank 1 .*__reduce__"):
            _RECEIVES[call](comm, x)
    assert comm.all_gather_object(comm.rank) == [0, 1]


@on_ranks("pair")
def test_object_that_cannot_be_pickled_names_call(comm):
    with pytest.raises(
        InvalidArgumentError, match=r"all_gather_object: the NotPickled .*no copies"
    ):
        comm.all_gather_object(NotPickled(), pickle=True)


_X = np.arange(12, dtype=np.uint8)
# Calls of rank 0, which receives, and of rank 1, which sends; and the name that the error begins
# with.
_PAIRS = {
    "recv_object of array": (
        lambda c: c.recv_object(1), lambda c: c.send(_X, 0), "recv_object: rank 1 sent an array"
    ),
    "recv_object of structure": (
        lambda c: c.recv_object(1), lambda c: c.send([_X], 0), "recv_object: rank 1 sent a struct"
    ),
    "recv of object": (
        lambda c: c.recv(None, 1), lambda c: c.send_object(1, 0), "recv: rank 1 sent an object"
    ),
    "recv of object to out": (
        lambda c: c.recv(_X.copy(), 1), lambda c: c.send_object(1, 0), "recv: rank 1 sent an obj"
    ),
    "recv of object to structure": (
        lambda c: c.recv([_X.copy()], 1), lambda c: c.send_object(1, 0), "recv: rank 1 sent an obj"
    ),
    "long object": (
        lambda c: c.recv(None, 1), lambda c: c.send_object("x" * 9000, 0), "recv: rank 1 sent an o"
    ),
    "broadcast": (
        lambda c: c.broadcast(None, root=1), lambda c: c.broadcast_object(1, root=1), "broadcast: "
    ),
    "broadcast of array like the object": (
        lambda c: c.broadcast(np.zeros(10, np.uint8), root=1),
        lambda c: c.broadcast_object(1, root=1), "broadcast: ",
    ),
    "broadcast_object": (
        lambda c: c.broadcast_object(None, root=1), lambda c: c.broadcast(_X, root=1), "broadcast"
    ),
    "broadcast_object of structure": (
        lambda c: c.broadcast_object(None, root=1), lambda c: c.broadcast([_X], root=1), "broadcast"
    ),
    "scatter": (
        lambda c: c.scatter(None, root=1), lambda c: c.scatter_object([1, 2], root=1), "scatter: "
    ),
    "scatter to out": (
        lambda c: c.scatter(None, root=1, out=np.zeros(10, np.uint8)),
        lambda c: c.scatter_object([1, 2], root=1), "scatter: ",
    ),
    "scatter_object": (
        lambda c: c.scatter_object(None, root=1), lambda c: c.scatter(_X, root=1), "scatter"
    ),
    "gather": (lambda c: c.gather(_X), lambda c: c.gather_object(1), "gather: "),
    "gather_object": (lambda c: c.gather_object(1), lambda c: c.gather(_X), "gather_object: "),
    "all_gather": (
        lambda c: c.all_gather(np.zeros(18, np.uint8)), lambda c: c.all_gather_object(1),
        "all_gather: ",
    ),
    "all_gather_object": (
        lambda c: c.all_gather_object(1), lambda c: c.all_gather(np.zeros(18, np.uint8)),
        "all_gather_object: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", _PAIRS)
@on_ranks("worlds")
def test_array_for_object_is_refused_at_receiver(comm, pair):
    receive, send, text = _PAIRS[pair]
    if comm.rank == 1:
        with contextlib.suppress(CollectiveError):  # in a collective call, the root may notice, too
            send(comm)
    else:
        with pytest.raises((MismatchError, InvalidArgumentError)) as caught:
            receive(comm)
        assert str(caught.value).startswith(text)
        if isinstance(caught.value, MismatchError):
            name = text.partition(":")[0].removesuffix("_object")
            assert re.search(rf"rank . ?: {name}\(", str(caught.value))
            assert re.search(rf"rank . ?: {name}_object\(", str(caught.value))


@on_ranks("pair")
def test_send_takes_structures_of_arrays_as_the_collectives_do(comm):
    Pair = namedtuple("Pair", "a b")
    x = OrderedDict(a=Pair(_X, [_X]), b=())
    for wrong in ({"a": "text"}, [None], (1.5,), [_X, {1}], {"a": b""}):
        for call in (comm.broadcast, comm.all_gather, lambda x: comm.send(x, 1 - comm.rank)):
            if wrong == (1.5,) and call == comm.broadcast:
                continue  # numbers have a meaning there
            with pytest.raises(InvalidArgumentError):
                call(wrong)
    found = comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank)
    assert type(found) is dict
    assert type(found["a"]) is tuple
    assert [array.tolist() for array in nested.flatten(found)] == [_X.tolist()] * 2
