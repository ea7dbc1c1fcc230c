"""Batches split into pieces for several devices of a process, and gathered again."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.nn.utils.rnn import pack_sequence  # noqa: E402

from collective.adapters.torch import scattering  # noqa: E402
from collective.adapters.torch.scattering import (  # noqa: E402
    as_device,
    as_devices,
    gather,
    scatter,
    scatter_kwargs,
)
from collective.errors import (  # noqa: E402
    DeviceError,
    DtypeError,
    InvalidArgumentError,
    ShapeError,
    UnsupportedError,
)

CPUS = ["cpu"] * 4
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: Any = None
    seen: bool = dataclasses.field(default=False, init=False)


class Row(list):
    def __init__(self, owner, items):
        super().__init__(items)
        self.owner = owner


def same(a: Any, b: Any) -> bool:
    """Return whether two structures are equal; tensors are compared element by element."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Sample):
        return same(dataclasses.astuple(a), dataclasses.astuple(b))
    return bool(a == b)


LEAVES = st.one_of(
    st.tuples(st.just(6), st.integers(0, 3)).map(lambda shape: torch.randn(shape)),
    st.just(6).map(torch.arange),
    st.sampled_from([None, 3, "text", 1.5, True]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Sample, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(TREES, st.integers(1, 8))
def test_scatter_then_gather_restores_tree(tree, devices):
    pieces = scatter(tree, ["cpu"] * devices)
    assert same(gather(pieces, "cpu"), tree)
    wholes = list(scattering.tensors_in(tree))
    for at, piece in enumerate(pieces):
        cut = list(scattering.tensors_in(piece))
        assert all(map(torch.equal, cut, [whole.chunk(devices)[at] for whole in wholes]))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 12), st.integers(1, 6), st.sampled_from([0, 1, -1]))
def test_scatter_pieces_equal_torch_chunk(length, devices, dim):
    x = torch.randn(length, length)
    pieces = scatter(x, ["cpu"] * devices, dim)
    expected = x.chunk(devices, dim) if length else [x]
    assert len(pieces) == len(expected)
    assert all(map(torch.equal, pieces, expected))
    assert torch.equal(gather(pieces, "cpu", dim), x)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_scatter_chunk_sizes_set_lengths_of_pieces(sizes):
    x = torch.arange(sum(sizes) * 2).reshape(-1, 2)
    pieces = scatter({"x": x, "flag": True}, ["cpu"] * len(sizes), 0, sizes)
    assert [len(piece["x"]) for piece in pieces] == sizes
    assert same(gather(pieces, "cpu"), {"x": x, "flag": True})


@pytest.mark.parametrize("requires_grad", [False, True])
def test_scatter_pieces_share_memory_of_input(requires_grad):
    x = torch.zeros(5, 3, requires_grad=requires_grad)
    pieces = scatter(x, ["cpu", "cpu"])
    assert [piece.data_ptr() for piece in pieces] == [x.data_ptr(), x[3:].data_ptr()]
    assert scatter(x, ["cpu"])[0] is x


def test_scatter_piece_written_in_place_keeps_other_pieces_valid():
    weight = torch.ones(2, requires_grad=True)
    first, second = scatter(torch.ones(4, 2), ["cpu", "cpu"])
    saved = (first * weight).sum()
    second.div_(2)
    saved.backward()
    assert weight.grad.tolist() == [2, 2]


def test_scatter_shares_objects_and_copies_containers():
    thing = object()
    x = [torch.zeros(2), thing, []]
    first, second = scatter(x, ["cpu", "cpu"])
    assert first[1] is second[1] is thing
    assert first[2] is not second[2]
    assert x[0].shape == (2,)


def test_scatter_keeps_container_subclasses():
    batch = torch.arange(4)
    piece = scatter(
        {
            "user": UserDict(x=batch),
            "default": defaultdict(list, x=batch),
            "row": Row("me", [batch]),
            "size": torch.Size([2, 3]),
        },
        ["cpu", "cpu"],
    )[1]
    assert type(piece["user"]) is UserDict
    assert piece["user"]["x"].tolist() == [2, 3]
    assert piece["default"]["new"] == []
    assert piece["default"]["x"].tolist() == [2, 3]
    assert (piece["row"].owner, piece["row"][0].tolist()) == ("me", [2, 3])
    assert type(piece["size"]) is torch.Size


def test_scatter_without_tensors_gives_one_piece_per_device():
    assert scatter((1, "a"), ["cpu"] * 3) == [(1, "a")] * 3
    assert scatter_kwargs((1,), {"a": 2}, ["cpu"] * 3) == ([(1,)], [{"a": 2}])
    assert scatter_kwargs((), None, ["cpu"] * 3) == ([()], [{}])


def test_scatter_kwargs_flag_adds_no_pieces():
    args, kwargs = scatter_kwargs((torch.ones(1, 2),), {"flag": True}, CPUS)
    assert (len(args), kwargs) == (1, [{"flag": True}])
    args, kwargs = scatter_kwargs((), {"x": torch.arange(3)}, CPUS)
    assert (args, [k["x"].tolist() for k in kwargs]) == ([()] * 3, [[0], [1], [2]])


def test_scatter_repeats_empty_tensor_in_each_piece():
    pieces = scatter((torch.ones(4), torch.ones(0, 3)), ["cpu", "cpu"])
    assert [(len(a), tuple(b.shape)) for a, b in pieces] == [(2, (0, 3))] * 2


@pytest.mark.parametrize(
    ("inputs", "options", "error", "text"),
    [
        ((torch.ones(4, 2), torch.ones(1, 2)), {}, ShapeError, r"\(1, 2\) and \(4, 2\).* 1 and 2"),
        (torch.tensor(1.0), {}, ShapeError, r"shape \(\) has no dim.*item\(\)"),
        (torch.ones(3), {"dim": 1}, ShapeError, "no dim 1"),
        (torch.ones(3), {"chunk_sizes": [1, 1]}, ShapeError, "add up to 3"),
        (torch.ones(3), {"chunk_sizes": [3]}, ShapeError, "as many"),
        (torch.ones(3), {"chunk_sizes": [3, 0]}, ShapeError, "positive"),
        (torch.eye(3).to_sparse(), {}, UnsupportedError, "to_dense"),
        (pack_sequence([torch.ones(2), torch.ones(1)]), {}, UnsupportedError, "pack them inside"),
    ],
    ids="counts scalar dim sum few zero sparse packed".split(),
)
def test_scatter_of_indivisible_input_raises(inputs, options, error, text):
    with pytest.raises(error, match=text):
        scatter(inputs, ["cpu", "cpu"], **options)


def test_as_device_matches_tensor_device():
    assert as_device("cpu:0") == torch.zeros(1).device
    assert as_device(1) == torch.device("cuda:1")
    for wrong in ("nowhere", None, -1.5):
        with pytest.raises(DeviceError, match="device"):
            as_device(wrong)
    for wrong in ([], "cpu", 0, torch.device("cpu")):
        with pytest.raises(DeviceError, match="a list"):
            as_devices(wrong)


def test_scatter_and_gather_move_between_devices():
    x = torch.ones(4, 2, requires_grad=True)
    here, there = scatter(x, ["cpu", "meta"])
    assert (here.device.type, there.device.type, there.shape) == ("cpu", "meta", (2, 2))
    assert gather([here, here], "meta").shape == (4, 2)


def test_scatter_gradient_is_gathered():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def pieces(x):
        return tuple(scatter({"x": x}, ["cpu"] * 3, 0)[i]["x"] * (i + 1) for i in range(3))

    assert gradcheck(pieces, x)
    assert gradgradcheck(lambda x: tuple(p**3 for p in pieces(x)), x)
    sum(piece.sum() for piece in pieces(x)).backward()
    assert x.grad[:, 0].tolist() == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_gradient_is_split(dim):
    shapes = [(2, 3), (1, 3)] if dim == 0 else [(2, 3), (2, 1)]
    xs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert gradcheck(lambda *xs: gather([x * x for x in xs], "cpu", dim), xs)
    assert gradgradcheck(lambda *xs: gather([x**3 for x in xs], "cpu", dim), xs)


def test_gather_of_scalars_gives_vector_and_warns_once():
    scattering._warn_of_scalars.cache_clear()
    losses = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    with pytest.warns(UserWarning, match="every replica returned a scalar") as caught:
        gathered = gather([{"loss": loss, "again": loss} for loss in losses], "cpu", 1)
    assert len(caught) == 1
    assert gathered["loss"].tolist() == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gather(losses[:1], "cpu").shape == (1,)
        total = gather(losses, "cpu")
    (total * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert [loss.grad.item() for loss in losses] == [1, 2, 3]


def test_gather_of_equal_objects_returns_first():
    thing, nan = object(), float("nan")
    item = {"none": None, "n": 3, "what": thing, "nan": nan}
    gathered = gather([item, dict(reversed(item.items()))], "cpu")
    assert gathered == item
    assert list(gathered) == list(item)


@pytest.mark.parametrize(
    ("outputs", "error", "text"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], ShapeError, r"\(2, 3\) and \(2, 4\).*Pad"),
        ([torch.ones(2), torch.tensor(1.0)], ShapeError, r"\(2,\) and \(\)"),
        ([torch.ones(2), torch.ones(2, dtype=torch.int32)], DtypeError, "float32 and torch.int32"),
        ([1, 2], InvalidArgumentError, r"int differ.*\(1, 2\)"),
        ([object(), object()], InvalidArgumentError, "object differ"),
        ([None, torch.ones(1)], InvalidArgumentError, "NoneType, Tensor"),
        ([{"a": 1}, {"b": 1}], InvalidArgumentError, r"\['a', 'b'\]"),
        ([[1], [1, 1]], InvalidArgumentError, r"lengths \[1, 2\]"),
        ([], InvalidArgumentError, "at least one replica"),
    ],
    ids="shapes ranks dtypes values objects types keys lengths none".split(),
)
def test_gather_of_incompatible_outputs_raises(outputs, error, text):
    with pytest.raises(error, match=text):
        gather(outputs, "cpu")
    with pytest.raises(ShapeError, match="dim 1 and tensors"):
        gather([torch.ones(2), torch.ones(2)], "cpu", 1)
