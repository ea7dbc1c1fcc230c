"""LeNet and a transformer on virtual shards: one digest on 1 to 4 ranks, also after kills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("collective.adapters.chainer", exc_type=ImportError)

from collective.testing import RankPool
from tests.support import shard_training
from tests.support.interpreter import run_python

pytestmark = [
    pytest.mark.whole,
]

STEPS, FAR_S = 8, 120
models = pytest.mark.parametrize("model", ["lenet", "transformer"])
frameworks = pytest.mark.parametrize("framework", ["torch", "chainer"])


@pytest.fixture(scope="module")
def pools() -> Iterator[list[RankPool]]:
    pools = [RankPool(size, "shm", timeout=FAR_S) for size in (1, 2, 3, 4)]
    yield pools
    for pool in pools:
        pool.close()


@models
@frameworks
def test_weights_have_the_same_bits_through_kills_and_joins(
    pools: list[RankPool], framework: str, model: str
) -> None:
    results = [
        result
        for pool in pools
        for result in pool.run(shard_training.train, framework, model, STEPS)
    ]
    digest = results[0][0]
    assert results == [(digest, [size]) for size in (1, 2, 3, 4) for _ in range(size)]

    elastic = ["-n", "4", "--min-ranks", "2", "--replace"]
    done = run_python(
        "-m", "collective", "run", *elastic, shard_training.__file__, framework, model, str(STEPS),
        "3@2", "0@4", timeout=2 * FAR_S, COLLECTIVE_SHRINK_GRACE="0.5",
        COLLECTIVE_TIMEOUT=str(FAR_S),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
    assert [end for end, *_ in ends] == [digest] * 4
    assert {size for _, *sizes in ends for size in sizes} >= {"3", "4"}
