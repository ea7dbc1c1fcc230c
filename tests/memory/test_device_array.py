"""``DeviceArray`` compared with NumPy, method by method, over the ABI fake."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective import cuda
from collective.cuda import pinning as pinned
from collective.errors import DeviceError, DtypeError, InvalidArgumentError, ShapeError
from collective.memory import device_copies as device_copies
from collective.memory.device_array import DeviceArray
from collective.memory.device_copies import PlainSpace
from tests import fakes
from tests.support.fake_stream_gate import Gate

POISON = fakes.POISON
DTYPES = ["bool", "uint8", "uint16", "float32", "int64", "complex128"]


@pytest.fixture(scope="module", autouse=True)
def fake():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fakes.environment().items():
            patch.setenv(name, value)
        patch.setattr(cuda, "_devices", {})
        fake_cuda = fakes.Fake()
        fake_cuda.knob("delay_us", 0)
        yield fake_cuda
        gc.collect()
        fake_cuda.knob("delay_us", 40)


@pytest.fixture(scope="module")
def device(fake) -> cuda.Device:
    return cuda.device(0)


@pytest.fixture(scope="module")
def stream(device) -> cuda.Stream:
    return device.new_stream()


@pytest.fixture
def gate(fake):
    new_gate = Gate()
    yield new_gate
    new_gate.open()


def on_device(x: np.ndarray, stream: cuda.Stream, **options: Any) -> DeviceArray:
    """Return a device array with the values, strides and gaps of a NumPy array."""
    low, high = np.lib.array_utils.byte_bounds(x) if x.size else (0, 0)
    memory = cuda.allocate(stream.device, high - low, stream)
    address = memory.address
    if x.size:
        address += x.__array_interface__["data"][0] - low
    array = DeviceArray(
        address, x.shape, x.dtype, stream.device, stream, strides=x.strides, owner=memory, **options
    )
    if x.size:
        span = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (high - low)).from_address(low))
        whole = DeviceArray(memory.address, (high - low,), np.uint8, stream.device, stream)
        whole.fill_from_host(span)
    return array


def numbers(shape: tuple[int, ...] | int, dtype: Any = "float32") -> np.ndarray:
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    return (np.arange(count) % 251).astype(dtype).reshape(shape)


def same(result: DeviceArray, expected: np.ndarray) -> None:
    assert type(result) is DeviceArray
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result.to_host(), expected)


@st.composite
def arrays(draw: Any, zero_strides: bool = False, max_dims: int = 4) -> np.ndarray:
    """Draw NumPy views of any strides, with gaps between the elements."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=max_dims)))
    steps = [draw(st.sampled_from([1, 1, 2, -1, -2])) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    whole = numbers(tuple(n * abs(step) for n, step in zip(shape, steps)), draw(DTYPE))
    x = whole.transpose(np.argsort(order)).copy().transpose(order)
    x = x[(*(slice(None, None, step) for step in steps), ...)]  # 0-d stays an array
    if zero_strides and shape:
        axis = draw(st.integers(0, len(shape) - 1))
        if shape[axis]:
            part = x[(slice(None),) * axis + (slice(0, 1),)]
            x = np.broadcast_to(part, x.shape)
    return x


DTYPE = st.sampled_from(DTYPES)
few = settings(max_examples=60, deadline=None)


# -- attributes ------------------------------------------------------------------------------


@few
@given(x=arrays(zero_strides=True))
def test_device_array_attributes_match_numpy(x, stream):
    array = on_device(x, stream)
    for name in "shape ndim size nbytes itemsize dtype".split():
        assert getattr(array, name) == getattr(x, name), name
    assert array.flags.c_contiguous == x.flags.c_contiguous
    if not x.flags.c_contiguous:
        assert array.strides == x.strides
    assert array.flags.aligned
    assert array.flags.carray == x.flags.c_contiguous
    if x.ndim:
        assert len(array) == len(x)


def test_device_array_construction_makes_no_driver_call(fake, device, stream):
    fake.clear_log()
    array = DeviceArray(4096, (2, 3), "float32", device, stream)
    assert array.strides == (12, 4)
    assert array.flags.carray
    assert array.ravel().view(np.uint8)[3:7].address == 4099
    assert not fake.log()


def test_flags_reflect_alignment_and_writeability(device, stream):
    odd = DeviceArray(4097, (3,), "float32", device, stream)
    assert not odd.flags.aligned
    assert not odd.flags.carray
    fixed = DeviceArray(4096, (3,), "float32", device, stream, writeable=False)
    assert not fixed.flags.carray
    assert not fixed[1:].flags.writeable
    assert fixed.flags.c_contiguous


def test_memory_is_freed_after_last_view(fake, device, stream):
    array = on_device(numbers(10), stream)
    owner = array.owner
    copied = array.copy()
    assert copied.owner is not owner
    fake.clear_log()
    view = copied[2:].reshape(2, 4)
    del copied
    gc.collect()
    assert not fake.log("cuMemFreeAsync")
    del view
    assert len(fake.log("cuMemFreeAsync")) == 1


# -- views -----------------------------------------------------------------------------------


def keys(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    def one(length: int) -> st.SearchStrategy[Any]:
        whole = st.slices(length)
        return whole if not length else st.one_of(whole, st.integers(-length, length - 1))

    full = st.tuples(*map(one, shape))
    some = st.integers(0, len(shape)).flatmap(lambda n: st.tuples(*map(one, shape[:n])))
    dotted = st.integers(0, len(shape)).flatmap(
        lambda n: st.tuples(*map(one, shape[:n]), st.just(Ellipsis), *map(one, shape[n + 1 :]))
    )
    single = [one(shape[0])] if shape else []
    return st.one_of(full, some, dotted, st.just(Ellipsis), *single)


def index(draw: Any, x: np.ndarray) -> Any:
    key = draw(keys(x.shape))
    return lambda a: a[key]


def reshape(draw: Any, x: np.ndarray) -> Any:
    if not x.size:
        return lambda a: a.reshape((0, 3))
    lengths = [n for n in range(1, x.size + 1) if x.size % n == 0]
    first = draw(st.sampled_from(lengths))
    second = draw(st.sampled_from([n for n in lengths if x.size // first % n == 0]))
    shapes = [(first, -1), (-1,), (first, second, -1), (1, -1, 1), (second, 1, -1)]
    shape = draw(st.sampled_from(shapes))
    return draw(st.sampled_from([lambda a: a.reshape(shape), lambda a: a.reshape(*shape)]))


def moveaxis(draw: Any, x: np.ndarray) -> Any:
    source = draw(st.lists(st.integers(0, x.ndim - 1), unique=True)) if x.ndim else []
    goes = draw(st.permutations(range(x.ndim)))[: len(source)]
    return lambda a: np.moveaxis(a, source, goes)


def split(draw: Any, x: np.ndarray) -> Any:
    if not x.ndim:
        return lambda a: a
    cuts = draw(st.lists(st.integers(0, 6), max_size=3))
    which = draw(st.integers(0, len(cuts)))
    return lambda a: (len(np.split(a, cuts)) == len(cuts) + 1) and np.split(a, cuts)[which]


def ravel(draw: Any, x: np.ndarray) -> Any:
    return lambda a: a.ravel()


def transpose(draw: Any, x: np.ndarray) -> Any:
    return lambda a: a.T


@pytest.mark.parametrize("change", [index, reshape, moveaxis, split, ravel, transpose])
@few
@given(data=st.data(), x=arrays(zero_strides=True))
def test_view_methods_match_numpy_and_share_memory(change, data, x, stream):
    changed = change(data.draw, x)
    mine, expected = on_device(x, stream), changed(x)
    result = changed(mine)
    same(result, np.asarray(expected))
    if expected.size and isinstance(expected, np.ndarray):
        assert np.may_share_memory(result, mine) == np.may_share_memory(expected, x)


@pytest.mark.parametrize("key", [(0, 0, 0), 3, -4, (..., ...), None, True, [0, 1], "a", 1.0])
def test_index_that_is_not_a_view_raises_index_error(key, stream):
    with pytest.raises(IndexError):
        on_device(numbers((3, 2)), stream)[key]


@pytest.mark.parametrize(
    ("shape", "is_view"),
    [((6, 2), True), ((3, 2, 2), True), ((1, 6, 1, 2), True), ((12,), False), ((4, 3), False)],
)
def test_reshape_copies_only_when_numpy_would(shape, is_view, stream):
    x = numbers((2, 3, 5))[:, :, :4:2]
    mine = on_device(x, stream)
    same(mine.reshape(shape), x.reshape(shape))
    assert np.may_share_memory(mine.reshape(shape), mine) == is_view


@few
@given(x=arrays(), dtype=DTYPE)
def test_view_of_other_dtype_matches_numpy(x, dtype, stream):
    array = on_device(x, stream)
    if x.dtype == bool or dtype == "bool":
        dtype = "uint8"  # arbitrary bytes are not valid bools
    try:
        expected = x.view(dtype)
    except (ValueError, TypeError):
        with pytest.raises(ShapeError, match="last axis"):
            array.view(dtype)
        return
    view = array.view(dtype)
    assert (view.shape, view.dtype, view.size) == (expected.shape, expected.dtype, expected.size)
    assert view.to_host().tobytes() == expected.tobytes()


# -- assignment and copies -------------------------------------------------------------------


@few
@given(data=st.data(), source=arrays(zero_strides=True))
def test_assignment_between_any_strides_matches_numpy(data, source, stream):
    target = data.draw(arrays().filter(lambda x: x.ndim == source.ndim)) if source.ndim else None
    steps = [data.draw(st.sampled_from([1, 2, -1])) for _ in source.shape]
    whole = np.full(tuple(n * abs(step) for n, step in zip(source.shape, steps)), 17).astype(
        source.dtype
    )
    order = data.draw(st.permutations(range(source.ndim)))
    whole = whole.transpose(order).copy().transpose(np.argsort(order))
    key = tuple(slice(None, None, step) for step in steps)
    mine, values = on_device(whole, stream), on_device(source, stream)
    mine[key] = values
    whole[key] = source
    same(mine, whole)  # the gaps between the elements are unchanged, too
    del target


@few
@given(data=st.data(), x=arrays())
def test_assignment_broadcasts_like_numpy(data, x, stream):
    lead = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    shape = lead + tuple(data.draw(st.integers(0, 5)) if n == 1 else n for n in x.shape)
    mine, expected = on_device(numbers(shape, x.dtype), stream), numbers(shape, x.dtype)
    mine[...] = on_device(x, stream)
    expected[...] = x
    same(mine, expected)


def test_assignment_of_repeated_row_takes_few_copies(fake, stream):
    target = on_device(numbers((1000, 64)), stream)
    source = on_device(numbers((1, 64)), stream)
    fake.clear_log()
    target[...] = source
    assert len(fake.log("cuMemcpy")) <= 11


@pytest.mark.parametrize(
    ("change", "copies"),
    [
        (lambda x: x, 1),
        (lambda x: x[:, :5], 1),
        (lambda x: x[::2], 1),
        (lambda x: x.T, 20),
        (lambda x: x[::-1], 20),
        (lambda x: x[:, ::3], 1),
    ],
    ids=["all", "columns", "rows", "transposed", "reversed", "every third column"],
)
def test_strided_copy_takes_few_driver_copies(fake, stream, change, copies):
    x = numbers((20, 30))
    source = change(on_device(x, stream))
    stream.synchronize()
    fake.clear_log()
    source.copy()
    assert len(fake.log("cuMemcpy")) == copies


def test_assignment_of_two_reversed_views_is_one_copy(fake, stream):
    target, source = on_device(numbers((4, 5)), stream), on_device(numbers((4, 6)), stream)
    fake.clear_log()
    target[::-1] = source[::-1, 1:]
    assert len(fake.log("cuMemcpy")) == 1
    same(target, numbers((4, 6))[:, 1:])


def test_copy_beyond_max_pitch_uses_no_2d_copy(fake, stream, monkeypatch):
    x = numbers((20, 30))
    source = on_device(x, stream)[:, :5]
    monkeypatch.setattr(stream.device, "max_pitch", 119)
    fake.clear_log()
    same(source.copy(), x[:, :5])
    assert not fake.log("cuMemcpy2D")


@pytest.mark.parametrize("key", [slice(2, 9), slice(0, 7), slice(None, None, -1)])
def test_assignment_of_overlapping_elements_matches_numpy(key, stream):
    x = numbers(12)
    mine = on_device(x, stream)
    start, stop = (0, 7) if key.start == 2 else (2, 9) if key.start == 0 else (0, 12)
    mine[start:stop] = mine[key]
    x[start:stop] = x[key].copy()
    same(mine, x)


def test_assignment_to_itself_makes_no_driver_call(fake, stream):
    mine = on_device(numbers(12), stream)
    fake.clear_log()
    mine[...] = mine
    mine[2:] = mine[2:]
    assert not fake.log()


@few
@given(data=st.data(), first=arrays(zero_strides=True))
def test_concatenate_matches_numpy(data, first, stream):
    if not first.ndim:
        return
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    parts = [numbers((length, *first.shape[1:]), first.dtype) for length in lengths]
    parts.append(first)
    mine = [on_device(part, stream) for part in parts]
    expected = np.concatenate(parts)
    same(np.concatenate(mine), expected)
    out = on_device(np.zeros_like(expected.T.copy().T), stream)
    assert np.concatenate(mine, out=out) is out
    same(out, expected)


@few
@given(data=st.data())
def test_may_share_memory_compares_bounds(data, stream):
    x = numbers((6, 8))
    mine = on_device(x, stream)
    one, other = (data.draw(keys(x.shape)) for _ in range(2))
    a, b = x[one], x[other]
    if a.size and b.size and isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        shares = np.may_share_memory(mine[one], mine[other])
        assert shares == np.may_share_memory(a, b)
    assert not np.may_share_memory(mine, x)
    assert not np.may_share_memory(x, mine)
    assert not np.may_share_memory(mine[3:3], mine)


def test_other_numpy_functions_work_on_device_array(stream):
    x = numbers((4, 6))
    mine = on_device(x, stream)
    like = np.empty_like(mine[:, 1:])
    assert (like.shape, like.dtype, np.may_share_memory(like, mine)) == ((4, 5), np.float32, False)
    np.copyto(mine[0], mine[1])
    same(mine[0], x[1])
    assert [part.shape for part in mine] == [(6,)] * 4


@pytest.mark.parametrize("function", [np.sum, np.stack, np.array_split])
def test_unsupported_numpy_function_raises_type_error(function, stream):
    with pytest.raises(TypeError, match="no implementation found"):
        function(on_device(numbers((4, 6)), stream), *([2] if function is np.array_split else []))


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [np.asarray, np.array, bool, lambda x: np.add.at(np.zeros(3), [0], x), lambda x: x.__array__()],
    ids=["asarray", "array", "bool", "ufunc.at", "__array__"],
)
def test_implicit_conversion_to_host_raises(use: Callable[[Any], Any], stream):
    with pytest.raises((DeviceError, TypeError)):
        use(on_device(numbers(3), stream))


@pytest.mark.parametrize("other", [numbers(3), 1.0, np.float32(2)])
def test_arithmetic_raises_type_error(other, stream):
    mine = on_device(numbers(3), stream)
    with pytest.raises(TypeError):
        mine + other
    with pytest.raises(TypeError):
        other * mine


def flat(of: Any) -> DeviceArray:
    return of(numbers(3))


def fixed(of: Any) -> DeviceArray:
    return of(numbers(3), writeable=False)


def far_away() -> DeviceArray:
    return on_device(numbers(3), cuda.device(1).new_stream())


def wide(of: Any) -> DeviceArray:
    return of(numbers((2, 3)))


def assign(to: DeviceArray, value: Any) -> None:
    to[...] = value


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        *((lambda of, shape=shape: wide(of).reshape(shape), ShapeError, "6 elements")
          for shape in [(4,), (-1, 4), (-1, -1), (-2, 3), (0, -1)]),
        *((lambda of, axes=axes: np.moveaxis(of(numbers((2, 3, 4))), *axes), ShapeError, "moveaxis")
          for axes in [(3, 0), (0, -4), ((0, 0), (1, 2)), ((0, 1), (2,))]),
        *((lambda of, to=to, x=x: assign(of(numbers(to)), of(numbers(x))), ShapeError, "fit into")
          for to, x in [((3,), (2,)), ((2,), (2, 3)), ((), (2,)), ((1, 3), (2, 3))]),
        *((lambda of, value=value: assign(flat(of), value), DeviceError, "fill_from_host")
          for value in (1.0, numbers(3), [1, 2, 3])),
        (lambda of: assign(flat(of), flat(of).view(np.int32)), DtypeError, "float32 from int32"),
        (lambda of: assign(flat(of), far_away()), DeviceError, "cuda:0 from cuda:1"),
        (lambda of: assign(fixed(of), flat(of)), InvalidArgumentError, "read-only"),
        (lambda of: fixed(of).fill_from_host(numbers(3)), InvalidArgumentError, "read-only"),
        (lambda of: assign(flat(of).broadcast_to((2, 3)), flat(of)), InvalidArgumentError,
         "read-only"),
        (lambda of: np.concatenate([wide(of), of(numbers((2, 4)))]), ShapeError, "beside axis 0"),
        (lambda of: np.concatenate([wide(of), wide(of).ravel()]), ShapeError, "beside axis 0"),
        (lambda of: np.concatenate([wide(of), wide(of)], out=wide(of)), ShapeError,
         "out has shape"),
        (lambda of: np.concatenate([wide(of), wide(of)], 1), TypeError, "concatenate"),
        (lambda of: np.concatenate([wide(of), wide(of).view(np.int32)]), DtypeError,
         "float32 and int32"),
        (lambda of: np.concatenate([wide(of), numbers((2, 3))]), DeviceError, "ndarray .*to_host"),
        (lambda of: np.concatenate([wide(of)], out=numbers((2, 3))), DeviceError, "out: ndarray"),
        (lambda of: np.asarray(flat(of)), DeviceError, r"cuda:0.*to_host\(\)"),
        (lambda of: wide(of).fill_from_host(numbers((3, 2))), ShapeError, r"\(3, 2\) on the host"),
        (lambda of: wide(of).to_host(numbers((3, 2))), ShapeError, r"\(3, 2\) on the host"),
        (lambda of: wide(of).fill_from_host(numbers((2, 3), "int64")), DtypeError, "int64 on the"),
        (lambda of: wide(of).to_host(numbers((2, 3), "int64")), DtypeError, "int64 on the host"),
    ],
)  # fmt: skip
def test_unsuitable_operands_raise_error(use, error, text, stream):
    with pytest.raises(error, match=text):
        use(lambda x, **options: on_device(x, stream, **options))


# -- the host ---------------------------------------------------------------------------------


@few
@given(x=arrays(zero_strides=True), data=st.data())
def test_to_host_fills_given_array(x, data, stream):
    out = data.draw(st.sampled_from([np.zeros(x.shape, x.dtype), np.zeros(x.T.shape, x.dtype).T]))
    assert on_device(x, stream).to_host(out) is out
    np.testing.assert_array_equal(out, x)


@few
@given(x=arrays(), y=arrays())
def test_fill_from_host_accepts_any_strides(x, y, stream):
    mine = on_device(x, stream)
    values = np.resize(y.real.astype(x.dtype), x.T.shape).T
    mine.fill_from_host(values)
    same(mine, values)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("locked", [False, True])
def test_host_copies_are_split_into_steps(fake, stream, monkeypatch, size, locked):
    monkeypatch.setattr(device_copies, "_STEP", 64)
    fake.knob("delay_us", 20)
    x = numbers(size, "uint8")
    mine = on_device(np.zeros(size, "uint8"), stream)
    source = cuda.pinned(size) if locked else np.empty(size, "uint8")
    source[:] = x
    fake.clear_log()
    mine.fill_from_host(source)
    source[:] = 0  # the caller may overwrite the source after the call
    assert len(fake.log("cuMemcpy")) == ((size > 0) if locked else -(-size // 64))
    out = cuda.pinned(size) if locked else np.zeros(size, "uint8")
    mine.to_host(out)
    fake.knob("delay_us", 0)
    np.testing.assert_array_equal(out, x)


def test_to_host_returns_pinned_memory_unless_large(stream, monkeypatch):
    mine = on_device(numbers(1000), stream)
    assert pinned.is_pinned(mine.to_host())
    monkeypatch.setattr(device_copies, "LARGEST", 1000)
    assert not pinned.is_pinned(mine.to_host())


def test_to_host_waits_for_work_on_stream(stream, gate, device):
    import threading

    mine, other = on_device(numbers(100), stream), on_device(numbers(100)[::-1], stream)
    gate.hold(stream)
    mine[...] = other
    copies: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: copies.append(mine.to_host()))
    thread.start()
    thread.join(0.05)
    assert not copies
    gate.open()
    thread.join()
    np.testing.assert_array_equal(copies[0], numbers(100)[::-1])


def test_failed_host_copy_synchronizes_before_freeing_block(fake, stream, gate, monkeypatch):
    """Check that a failed copy ends before its block is freed, as the copy still writes to it."""
    monkeypatch.setattr(device_copies, "_STEP", 4096)
    mine = on_device(numbers(3000), stream)
    order: list[str] = []

    def fails(event: cuda.Event) -> None:
        order.append("failed")
        raise KeyboardInterrupt

    class Watched:
        def __del__(self) -> None:
            order.append("dropped")

    monkeypatch.setattr(device_copies, "_finish", fails)
    real = cuda.Stream.synchronize
    monkeypatch.setattr(
        cuda.Stream, "synchronize", lambda self: (order.append("synchronized"), real(self))[1]
    )
    with pytest.raises(KeyboardInterrupt):
        mine.to_host(np.empty(3000, np.float32))
    assert order == ["failed", "synchronized"]


# -- streams ----------------------------------------------------------------------------------


def peek(array: DeviceArray) -> np.ndarray:
    """Return a copy of the bytes in memory, without waiting for any stream."""
    memory = np.ctypeslib.ctypes.c_uint8 * array.nbytes
    return np.ctypeslib.as_array(memory.from_address(array.address)).copy()


def test_assignment_is_asynchronous_on_stream(stream, gate):
    target, source = on_device(numbers((4, 6)), stream), on_device(numbers((6, 4)), stream)
    gate.hold(stream)
    target[...] = source.T
    assert (peek(target) == POISON).all()
    gate.open()
    same(target, numbers((6, 4)).T)


def test_other_stream_sees_elements_only_after_event(device, stream, gate):
    other = device.new_stream()
    source = on_device(numbers(16), stream)
    early, late = cuda.pinned(64), cuda.pinned(64)
    target = source.allocate(16)
    gate.hold(stream)
    target[...] = source
    cuda.copy(early.__array_interface__["data"][0], target.address, 64, other)
    other.synchronize()
    other.wait(stream.record())
    cuda.copy(late.__array_interface__["data"][0], target.address, 64, other)
    gate.open()
    other.synchronize()
    assert (early == POISON).all()
    np.testing.assert_array_equal(late.view(np.float32), numbers(16))


def test_assignment_between_two_streams_is_ordered_both_ways(device, stream, gate):
    other = device.new_stream()
    source, target = on_device(numbers(16), other), on_device(numbers(16)[::-1], stream)
    written = on_device(numbers(16) + 1, other)
    later = on_device(numbers(16) + 2, other)
    gate.hold(other)
    source[...] = written  # delayed by the gate
    target[...] = source  # must wait for the line above
    assert not stream.query()
    gate.open()
    same(target, numbers(16) + 1)
    gate.hold(stream)
    target[...] = source
    source[...] = later  # must wait for the line above
    assert not other.query()
    gate.open()
    other.synchronize()
    same(target, numbers(16) + 1)


def test_cuda_on_moves_work_and_new_memory_to_stream(fake, device, stream, gate):
    side = device.new_stream()
    mine = on_device(numbers((3, 4)), stream)
    gate.hold(stream)
    with cuda.on(side):
        assert mine.effective_stream is side
        fake.clear_log()
        raveled = mine.T.ravel()
        copied = mine.to_host()
        assert mine.__cuda_array_interface__["stream"] == side.handle
    assert raveled.stream is side
    assert not fake.log(f"stream={stream.handle:#x}")
    np.testing.assert_array_equal(copied, numbers((3, 4)))
    assert mine.stream is mine.effective_stream is stream
    gate.open()


# -- spaces and protocols ---------------------------------------------------------------------


class Recording(PlainSpace):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def empty(self, nbytes: int, device: cuda.Device, stream: cuda.Stream) -> tuple[int, Any]:
        self.calls.append(("empty", nbytes, device, stream))
        return super().empty(nbytes, device, stream)

    def assign(self, dst: DeviceArray, src: DeviceArray) -> None:
        self.calls.append(("assign", dst.shape, src.strides))
        super().assign(dst, src)


def test_space_allocates_memory_and_makes_strided_copies(device, stream):
    space = Recording()
    mine = on_device(numbers((3, 4)), stream, space=space)
    flat = mine.T.ravel()
    assert space.calls == [("empty", 48, device, stream), ("assign", (4, 3), (4, 16))]
    assert flat.space is flat[1:].reshape(11, 1).copy().space is space
    space.calls.clear()
    mine[...] = flat.reshape(3, 4)  # neither array has gaps
    assert not space.calls


def test_cuda_array_interface_describes_memory(stream, device):
    x = numbers((4, 6))
    mine = on_device(x, stream, writeable=False)
    assert mine.__cuda_array_interface__ == {
        "shape": (4, 6),
        "typestr": "<f4",
        "data": (mine.address, True),
        "version": 3,
        "strides": None,
        "stream": stream.handle,
    }
    part = mine[:, ::2].__cuda_array_interface__
    assert (part["shape"], part["strides"]) == ((4, 3), (24, 8))
    assert mine[2:2].__cuda_array_interface__["data"][0] == 0
    default = DeviceArray(mine.address, (3,), "int8", device, device.stream(0))
    assert default.__cuda_array_interface__["stream"] == 1


def test_dlpack_shares_memory(stream):
    from collective.memory import dlpack

    mine = on_device(numbers((4, 6), "int16"), stream)[:, ::2]
    assert mine.__dlpack_device__() == (2, 0)
    lent = dlpack.take(mine.__dlpack__(max_version=(1, 0)))
    assert (lent.address, lent.shape, lent.strides) == (mine.address, (4, 3), (12, 4))
