"""Nested containers of arrays: flattening and rebuilding."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective.errors import InvalidArgumentError
from collective.memory import nested
from tests.support.on_ranks import on_ranks, ranks_of

pytestmark = pytest.mark.quick

pair = ranks_of(("threads", 2))

Pair = namedtuple("Pair", "first second")

KEYS = st.text(max_size=3) | st.nothing()
TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.integers(0, 200), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(TREES)
def test_rebuild_of_flattened_tree_restores_tree(value):
    leaves = nested.flatten(value)
    assert nested.rebuild(value, iter(leaves)) == value
    assert type(nested.rebuild(value, iter(leaves))) is type(value)


@given(TREES)
def test_skeleton_through_json_keeps_order_of_leaves(value):
    """Check that a rank that has only the skeleton, as JSON, puts each leaf in its place."""
    leaves = nested.flatten(value)
    skeleton = json.loads(json.dumps(nested.skeleton(value)))
    built = nested.rebuild(skeleton, iter(leaves))
    assert nested.flatten(built) == leaves

    def plain(node):
        if isinstance(node, dict):
            return {str(key): plain(item) for key, item in node.items()}
        return [plain(item) for item in node] if isinstance(node, (list, tuple)) else node

    assert built == plain(value)


def test_flatten_ignores_insertion_order_of_dict():
    a, b = {"x": 1, "y": 2}, {"y": 2, "x": 1}
    assert nested.flatten(a) == nested.flatten(b) == [1, 2]
    assert nested.skeleton(a) == nested.skeleton(b)
    assert list(nested.rebuild(b, iter([10, 20]))) == ["y", "x"]


def test_rebuild_keeps_named_tuple():
    built = nested.rebuild(Pair([1], 2), iter([3, 4]))
    assert built == Pair([3], 4)
    assert type(built) is Pair


@pytest.mark.parametrize("value", [[], (), {}, [[], {}]], ids=str)
def test_rebuild_restores_empty_containers(value):
    assert nested.flatten(value) == []
    assert nested.rebuild(value, iter([])) == value


@pytest.mark.parametrize("leaf", [0, None, "text", np.zeros(3), 1.5])
def test_leaf_is_not_a_tree(leaf):
    assert not nested.is_tree(leaf)
    assert nested.skeleton(leaf) == 0
    assert nested.flatten(leaf)[0] is leaf


@pytest.mark.parametrize("function", [nested.flatten, nested.skeleton])
def test_unsortable_keys_raise_invalid_argument(function):
    with pytest.raises(InvalidArgumentError, match="use strings"):
        function([{1: 0, "a": 0}])


@pytest.mark.parametrize(
    "call", ["all_reduce", "broadcast", "all_gather", "scan", "reduce_scatter", "all_to_all"]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: OrderedDict(b=x, a=x + 1),
        lambda x: Pair(x, [x + 1]),
        lambda x: {2: x, 10: x + 1, 1: x + 2},
    ],
    ids=["ordered_dict", "named_tuple", "integer_keys"],
)
@on_ranks("pair")
def test_calls_accept_any_kind_of_container(comm, call, make):
    value = make(np.arange(4.0) + comm.rank)
    result = getattr(comm, call)(value)
    alone = [getattr(comm, call)(leaf) for leaf in nested.flatten(value)]
    assert nested.skeleton(result) == nested.skeleton(value)
    assert all(map(np.array_equal, nested.flatten(result), alone))


@on_ranks("pair")
def test_scatter_of_dict_without_template_keeps_integer_keys(comm):
    value = {1: np.array([1, 1]), 2: np.array([2, 2]), 10: np.array([10, 10])}
    received = comm.scatter(value if comm.rank == 0 else None)
    assert {int(key): int(piece[0]) for key, piece in received.items()} == {1: 1, 2: 2, 10: 10}


@on_ranks("pair")
def test_dict_with_two_keys_of_one_text_is_refused(comm):
    x = {0.1: np.ones(1), np.float16(0.1): np.zeros(1)}
    assert len(x) == 2
    for call in (comm.all_reduce, comm.all_gather, comm.broadcast):
        with pytest.raises(InvalidArgumentError, match="have the same text"):
            call(x)


@on_ranks("pair")
def test_scatter_with_different_template_uses_nesting_of_root(comm):
    received = comm.scatter([np.arange(2), np.arange(2)] if comm.rank == 0 else [])
    assert [piece.tolist() for piece in received] == [[comm.rank]] * 2


@on_ranks("pair")
def test_structure_that_contains_itself_twice_is_refused_by_every_call(comm):
    endless = []
    endless += [endless, endless]
    peer = 1 - comm.rank
    calls = [
        comm.all_reduce, comm.broadcast, comm.all_gather, comm.all_to_all, comm.all_gather_object,
        lambda x: comm.scatter(x, root=comm.rank), lambda x: comm.send(x, peer),
        lambda x: comm.sendrecv(x, peer, peer), lambda x: comm.all_reduce([np.ones(2)], out=x),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="contains itself, or is nested too deeply"):
            call(endless)
