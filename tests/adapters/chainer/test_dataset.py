"""Shards of a dataset, and an iterator that all ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.dataset")

import chainer

from collective.adapters.chainer import ShardedIterator, scatter_dataset
from collective.errors import InvalidArgumentError, MismatchError, RankError
from tests.support.chainer_ranks import on, run

WORLDS = ["threads-2", "threads-4"]


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


# -- scatter_dataset ------------------------------------------------------------------------------


def scattered(comm: Any, length: int, **options: Any) -> list[int]:
    shard = scatter_dataset(range(length), comm, **options)
    return [int(sample) for sample in shard[:]]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("length", [0, 3, 13, 16])
@pytest.mark.parametrize("shuffle", [False, True])
def test_scatter_dataset_puts_each_sample_in_one_shard(
    world: str, length: int, shuffle: bool
) -> None:
    shards = run(world, scattered, length, shuffle=shuffle)
    assert sorted(flat(shards)) == list(range(length))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("length", [3, 13, 16])
def test_scatter_dataset_padded_gives_equal_lengths(world: str, length: int) -> None:
    shards = run(world, scattered, length, shuffle=True, seed=4, padded=True)
    assert {len(shard) for shard in shards} == {-(-length // int(world[-1]))}
    assert set(flat(shards)) == set(range(length))


@pytest.mark.parametrize("world", WORLDS)
def test_scatter_dataset_equals_chainermn_shards(world: str) -> None:
    from chainermn.datasets.scatter import _scatter_index

    for padded in (False, True):
        shards = run(world, scattered, 13, shuffle=True, seed=9, padded=padded)
        order = np.random.RandomState(9).permutation(13)
        expected = [order[b:e].tolist() for _, b, e in _scatter_index(13, int(world[-1]), padded)]
        assert shards == expected


@pytest.mark.parametrize("world", WORLDS)
def test_scatter_dataset_seed_determines_order(world: str) -> None:
    first, again, other = (
        run(world, scattered, 100, shuffle=True, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    drawn = [run(world, scattered, 100, shuffle=True) for _ in range(2)]
    assert drawn[0] != drawn[1]


@on(*WORLDS)
def test_scatter_dataset_of_different_datasets_raises(comm: Any) -> None:
    with pytest.raises(MismatchError, match="no dataset"):
        scatter_dataset([1] if comm.rank == 0 else None, comm)
    with pytest.raises(MismatchError, match=r"rank 1 has 9 samples.* rank 0 has 10 samples"):
        scatter_dataset(range(9 if comm.rank == 1 else 10), comm)


# -- ShardedIterator ------------------------------------------------------------------------------


def together(iterators: list[Any], steps: int) -> list[list[int]]:
    """Return all ranks' samples, step by step."""
    return [sorted(flat(iterator.next() for iterator in iterators)) for _ in range(steps)]


def of(length: int, batch: int, size: int, **options: Any) -> list[ShardedIterator]:
    return [ShardedIterator(range(length), batch, (r, size), **options) for r in range(size)]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_sharded_iterators_together_equal_serial_iterator(
    length: int, batch: int, size: int, shuffle: bool
) -> None:
    iterators = of(length, batch, size, shuffle=shuffle, seed=3)
    serial = chainer.iterators.SerialIterator(range(length), batch * size, shuffle=False)
    seen: Counter[int] = Counter()
    for _ in range(12):
        parts = [iterator.next() for iterator in iterators]
        assert {len(part) for part in parts} == {batch}
        expected = serial.next()
        if not shuffle:
            assert sorted(flat(parts)) == sorted(expected)
        seen.update(flat(parts))
        for sharded in iterators:
            assert (sharded.epoch, sharded.is_new_epoch) == (serial.epoch, serial.is_new_epoch)
            assert sharded.epoch_detail == pytest.approx(serial.epoch_detail)
            assert sharded.previous_epoch_detail == pytest.approx(serial.previous_epoch_detail)
        # Each sample has occurred once per complete epoch, or once more.
        assert all(serial.epoch <= seen[n] <= serial.epoch + 1 for n in range(length))


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))
def test_sharded_iterator_epoch_has_each_sample_once(length: int, batch: int, size: int) -> None:
    parts = [flat(iterator) for iterator in of(length, batch, size, repeat=False)]
    assert sorted(flat(parts)) == list(range(length))


def test_sharded_iterator_shuffles_each_epoch_differently() -> None:
    (iterator,) = of(20, 20, 1)
    first, second = iterator.next(), iterator.next()
    assert first != second
    iterator.reset()
    assert iterator.next() == first
    assert of(20, 20, 1, seed=1)[0].next() != first


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sharded_iterator_resumes_on_other_number_of_ranks(size: int) -> None:
    before = of(23, 4, 2, seed=5)
    done = flat(together(before, 3))  # 24 samples, the last one from the second epoch
    state = chainer.serializers.npz.serialize(before[1])
    after = of(23, 2, size, seed=5)
    for iterator in after:
        chainer.serializers.NpzDeserializer(state).load(iterator)
        assert (iterator.epoch, iterator.current_position, iterator.is_new_epoch) == (1, 1, True)
        assert iterator.epoch_detail == before[0].epoch_detail
    seen = list(done)
    while after[0].epoch == 1:
        seen += flat(iterator.next() for iterator in after)
    extra = after[0].current_position
    assert len(seen) == 2 * 23 + extra
    assert all(count >= 2 for count in Counter(seen).values())


def test_sharded_iterator_resumes_with_same_batches() -> None:
    before = of(23, 4, 2)
    together(before, 3)
    after = of(23, 4, 2)
    for old, new in zip(before, after, strict=True):
        chainer.serializers.NpzDeserializer(chainer.serializers.npz.serialize(old)).load(new)
    assert together(after, 8) == together(before, 8)


def test_sharded_iterator_with_state_of_other_order_raises() -> None:
    state = chainer.serializers.npz.serialize(of(23, 4, 2, seed=1)[0])
    for other in (of(23, 4, 2, seed=2), of(24, 4, 2, seed=1), of(23, 4, 2, seed=1, shuffle=False)):
        with pytest.raises(InvalidArgumentError, match="a state with length 23, seed 1, shuffle 1"):
            chainer.serializers.NpzDeserializer(state).load(other[0])
        assert other[0].current_position == 0


def test_sharded_iterator_with_bad_arguments_raises() -> None:
    with pytest.raises(RankError, match=r"rank is 2 .*size is 2"):
        ShardedIterator(range(3), 1, (2, 2))
    with pytest.raises(InvalidArgumentError, match="batch_size is 0"):
        ShardedIterator(range(3), 0, (0, 1))
    with pytest.raises(InvalidArgumentError, match="an empty dataset"):
        ShardedIterator([], 1, (0, 1))
