"""The sampler that shares a dataset among ranks, and the loader that prefetches batches."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset  # noqa: E402

from collective.adapters.torch.data import PrefetchLoader, ShardedSampler  # noqa: E402
from collective.errors import InvalidArgumentError, RankError  # noqa: E402
from collective.testing import run_ranks  # noqa: E402

quick = settings(deadline=None, derandomize=True, max_examples=120)
LENGTHS, SIZES, EPOCHS = st.integers(0, 40), st.integers(1, 9), st.integers(0, 3)
SEEDS = st.integers(0, 2**32)


def shards(length: int, size: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    lists = []
    for rank in range(size):
        sampler = ShardedSampler(length, (rank, size), **options)
        sampler.set_epoch(epoch)
        lists.append(list(sampler))
        assert len(lists[-1]) == len(sampler)
    return lists


@quick
@given(LENGTHS, SIZES, EPOCHS, SEEDS, st.booleans())
def test_sharded_sampler_gives_each_sample_to_one_rank(
    length: int, size: int, epoch: int, seed: int, shuffle: bool
) -> None:
    lists = shards(length, size, epoch, seed=seed, shuffle=shuffle)
    assert sorted(chain(*lists)) == list(range(length))
    lengths = [len(shard) for shard in lists]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@quick
@given(LENGTHS, SIZES, EPOCHS, SEEDS, st.booleans(), st.booleans())
def test_sharded_sampler_padded_equals_distributed_sampler(
    length: int, size: int, epoch: int, seed: int, shuffle: bool, drop_last: bool
) -> None:
    lists = shards(
        length, size, epoch, seed=seed, shuffle=shuffle, padded=True, drop_last=drop_last
    )
    for rank, shard in enumerate(lists):
        reference = DistributedSampler(
            range(length), size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        reference.set_epoch(epoch)
        assert shard == list(reference)
        assert len(shard) == len(reference)


@quick
@given(LENGTHS, SIZES, SEEDS)
def test_sharded_sampler_drop_last_gives_equal_lengths(length: int, size: int, seed: int) -> None:
    lists = shards(length, size, seed=seed, drop_last=True)
    assert {len(shard) for shard in lists} == {length // size}
    samples = list(chain(*lists))
    assert len(set(samples)) == len(samples) > length - size


def test_sharded_sampler_shuffles_each_epoch_reproducibly() -> None:
    first, second = shards(50, 2, 0), shards(50, 2, 1)
    assert first != second
    assert shards(50, 2, 0) == first
    assert shards(50, 2, 0, seed=1) == second  # as in torch, seed and epoch are added
    assert shards(50, 2, 0, shuffle=False) == [list(range(0, 50, 2)), list(range(1, 50, 2))]


def test_sharded_sampler_accepts_communicator_and_dataset() -> None:
    dataset = TensorDataset(torch.arange(7))
    lists = run_ranks(3, lambda comm: list(ShardedSampler(dataset, comm)))
    assert lists == shards(7, 3)


@quick
@given(LENGTHS, SIZES, st.data(), st.booleans())
def test_sharded_sampler_resumes_in_mid_epoch(
    length: int, size: int, data: st.DataObject, padded: bool
) -> None:
    done = data.draw(st.integers(0, length // size))
    whole = shards(length, size, 2, padded=padded, seed=5)
    for rank in range(size):
        sampler = ShardedSampler(length, (rank, size), padded=padded, seed=5)
        sampler.set_epoch(2)
        running = iter(sampler)
        assert [next(running) for _ in range(done)] == whole[rank][:done]
        state = sampler.state_dict()
        assert state == sampler.state_dict(taken=done)
        resumed = ShardedSampler(length, (rank, size), padded=padded)
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert resumed.epoch == 2
        assert resumed.state_dict() == state
        resumed.set_epoch(2)
        assert list(resumed) == whole[rank][done:]
        assert list(resumed) == whole[rank]
        resumed.load_state_dict(state)
        resumed.set_epoch(3)
        assert list(resumed) == shards(length, size, 3, padded=padded, seed=5)[rank]


@quick
@given(LENGTHS, SIZES, SIZES, st.data())
def test_sharded_sampler_resumes_on_other_number_of_ranks(
    length: int, size: int, other: int, data: st.DataObject
) -> None:
    done = data.draw(st.integers(0, length // size))
    sampler = ShardedSampler(length, (0, size))
    state = sampler.state_dict(taken=done)
    before = [index for shard in shards(length, size) for index in shard[:done]]
    after = []
    for rank in range(other):
        resumed = ShardedSampler(length, (rank, other))
        resumed.load_state_dict(state)
        after.extend(resumed)
    assert sorted(before + after) == list(range(length))


def test_sharded_sampler_second_resumption_counts_from_first() -> None:
    whole = shards(40, 2)[1]
    sampler = ShardedSampler(40, (1, 2))
    sampler.load_state_dict(ShardedSampler(40, (1, 2)).state_dict(taken=5))
    running = iter(sampler)
    assert [next(running) for _ in range(3)] == whole[5:8]
    assert sampler.state_dict() == sampler.state_dict(taken=3)
    again = ShardedSampler(40, (1, 2))
    again.load_state_dict(sampler.state_dict(taken=2))
    assert list(again) == whole[7:]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_with_workers_resumes_after_used_batches(workers: int) -> None:
    dataset = TensorDataset(torch.arange(23))
    whole = shards(23, 2)[0]

    def loader(sampler: Any) -> Any:
        batches = BatchSampler(sampler, 3, drop_last=False)
        return DataLoader(dataset, batch_sampler=batches, num_workers=workers)

    sampler = ShardedSampler(dataset, (0, 2))
    running = iter(loader(sampler))
    seen = [next(running)[0].tolist() for _ in range(2)]
    state = sampler.state_dict(taken=2 * 3)
    del running
    resumed = ShardedSampler(dataset, (0, 2))
    resumed.load_state_dict(state)
    seen += [x.tolist() for (x,) in loader(resumed)]
    assert seen == [whole[0:3], whole[3:6], whole[6:9], whole[9:12]]


@pytest.mark.parametrize("length", [-1, 2.5, True, None])
def test_sharded_sampler_with_bad_length_raises(length: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="length"):
        ShardedSampler(length, (0, 1))
    with pytest.raises(RankError, match=r"ShardedSampler: rank is 2 .*size is 2"):
        ShardedSampler(3, (2, 2))


def test_sharded_sampler_with_state_of_other_length_raises() -> None:
    sampler = ShardedSampler(8, (0, 2), seed=3)
    with pytest.raises(InvalidArgumentError, match="9 samples"):
        sampler.load_state_dict(ShardedSampler(9, (0, 2), seed=4).state_dict(taken=2))
    assert list(sampler) == shards(8, 2, seed=3)[0]


# -- prefetching ----------------------------------------------------------------------------


def prefetching() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert prefetching() == []


Pair = namedtuple("Pair", ["x", "y"])


def test_prefetch_loader_yields_batches_unchanged_in_order() -> None:
    x = torch.arange(3)
    nested = [
        x,
        (x, [x + 1]),
        {"a": x, "b": {"c": Pair(x, "text")}},
        OrderedDict(a=x),
        [],
        None,
        3,
        "text",
    ]
    loader = PrefetchLoader(nested)
    assert len(loader) == len(nested)
    for _ in range(2):  # each iteration starts from the beginning
        batches = list(loader)
        assert repr(batches) == repr(nested)
        assert type(batches[2]["b"]["c"]) is Pair


def test_prefetch_loader_moves_nested_tensors() -> None:
    x = torch.ones(2)
    ((moved,), text) = list(
        PrefetchLoader([[(x, {"a": [Pair(x, 1)]}, OrderedDict(b=x))], "x"], device="meta")
    )
    tensors = [moved[0], moved[1]["a"][0].x, moved[2]["b"]]
    assert [t.device.type for t in tensors] == ["meta"] * 3
    assert moved[1]["a"][0].y == 1
    assert type(moved[2]) is OrderedDict
    assert text == "x"


@pytest.mark.parametrize("ahead", [1, 3])
def test_prefetch_loader_fetches_exactly_ahead_batches(ahead: int) -> None:
    taken = []
    fetched = threading.Condition()

    def batches() -> Iterator[int]:
        for index in range(10):
            with fetched:
                taken.append(index)
                fetched.notify_all()
            yield index

    running = iter(PrefetchLoader(batches(), ahead=ahead))
    assert next(running) == 0
    with fetched:
        assert fetched.wait_for(lambda: len(taken) > ahead, timeout=5)
    time.sleep(0.05)
    assert len(taken) == ahead + 1
    assert list(running) == list(range(1, 10))


class BadAtError(Exception):
    pass


class Bad(torch.utils.data.Dataset):  # type: ignore[type-arg, misc]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise BadAtError(index)
        return index


def test_prefetch_loader_raises_error_after_earlier_batches() -> None:
    running = iter(PrefetchLoader(DataLoader(Bad(), batch_size=2)))
    assert [next(running).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(BadAtError) as raised:
        next(running)
    assert "__getitem__" in str(raised.value) + "".join(map(str, raised.traceback))
    assert list(running) == []


def test_prefetch_loader_passes_on_keyboard_interrupt() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    running = iter(PrefetchLoader(batches()))
    assert next(running) == 1
    with pytest.raises(KeyboardInterrupt):
        next(running)


def test_prefetch_loader_left_early_ends_thread() -> None:
    closed = threading.Event()

    def batches() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    for batch in PrefetchLoader(batches(), ahead=2):
        if batch == 3:
            break
    assert prefetching() == []
    assert closed.wait(60)
    running = iter(PrefetchLoader(range(1000)))
    next(running)
    assert len(prefetching()) == 1
    running.close()  # type: ignore[attr-defined]
    assert prefetching() == []
    iter(PrefetchLoader(range(3)))  # an iterator that is never advanced starts no thread


def test_prefetch_loader_thread_ends_after_error_in_loop() -> None:
    def loop() -> None:
        for batch in PrefetchLoader(range(1000)):
            _ = 1 / (2 - batch)

    with pytest.raises(ZeroDivisionError):
        loop()
    gc.collect()
    assert prefetching() == []


def test_prefetch_loader_releases_used_batches() -> None:
    class Batch:
        alive = 0

        def __init__(self) -> None:
            Batch.alive += 1

        def __del__(self) -> None:
            Batch.alive -= 1

    most = 0
    for batch in PrefetchLoader((Batch() for _ in range(20)), ahead=1):
        most = max(most, Batch.alive)
        del batch
    # One batch is in use, one waits in the queue, and the thread holds one.
    assert most <= 3
    assert Batch.alive == 0


def test_prefetch_loader_with_ahead_0_raises() -> None:
    with pytest.raises(InvalidArgumentError, match="ahead"):
        PrefetchLoader([], ahead=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_prefetch_loader_on_gpu_copies_on_separate_stream() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4096.0).reshape(64, 64)), batch_size=4)
    total = torch.zeros((), device="cuda")
    for (x,) in PrefetchLoader(loader, "cuda", ahead=2):
        assert x.is_cuda
        total += x.sum()
        # This work keeps the stream busy while the memory of x is freed and reused.
        torch.cuda._sleep(1_000_000)
        total += x.sum()
    assert total.item() == 2 * sum(range(4096))
