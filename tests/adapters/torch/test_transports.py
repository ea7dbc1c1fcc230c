"""PyTorch's adapters on transports and sizes that their own tests leave out: MPI and 4 ranks.

Each rank runs the programs of those tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from collective.testing import RankPool  # noqa: E402
from tests.adapters.torch import test_batch_norm as test_torch_batch_norm  # noqa: E402
from tests.adapters.torch import test_ddp as test_torch_ddp  # noqa: E402
from tests.adapters.torch import test_ddp_inputs as test_torch_ddp_inputs  # noqa: E402
from tests.adapters.torch import test_functional as test_torch_functional  # noqa: E402
from tests.adapters.torch import test_loops as test_torch_loops  # noqa: E402
from tests.support.mpi_launches import pool_of, world_of  # noqa: E402

pytestmark = pytest.mark.whole

_WORLDS = [("threads", 4), ("shm", 4), ("tcp", 4), ("gloo", 4), ("openmpi", 2), ("mpich", 4)]


@pytest.fixture(scope="module", params=[world_of(*world) for world in _WORLDS])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with pool_of(request.param, torch) as ranks:
            yield ranks


def test_ddp_equals_one_process_on_joined_batch(pool: RankPool) -> None:
    case = test_torch_ddp.test_ddp_equals_one_process_on_joined_batch
    pool.run(case.program, 0.001, True)


def test_ddp_finds_unused_parameters(pool: RankPool) -> None:
    pool.run(test_torch_ddp.test_ddp_finds_unused_parameters.program)


def test_ddp_handles_uneven_inputs_and_sparse_gradients(pool: RankPool) -> None:
    pool.run(
        test_torch_ddp_inputs.test_ddp_join_averages_over_present_or_all_ranks.program, False, True
    )
    pool.run(test_torch_ddp_inputs.test_all_reduce_sparse_equals_dense_sum.program)
    pool.run(test_torch_ddp_inputs.test_ddp_sparse_embeddings_train_as_dense.program, True)


def test_differentiable_collectives_have_right_derivatives(pool: RankPool) -> None:
    pool.run(test_torch_functional.TAPE.check_directions)


def test_sync_batch_norm_equals_joined_batch(pool: RankPool) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        options = {"dtype": dtype} if dtype is torch.float64 else {}
        case = [16, 0, 8, 4][: pool.size], (2, 3), dtype, options
        test_torch_batch_norm.compare(pool.run(test_torch_batch_norm.one_rank, *case), *case)


def test_manual_loop_and_sharded_optimizer_equal_one_process(pool: RankPool) -> None:
    pool.run(test_torch_loops.test_manual_loop_with_synced_gradients_equals_one_process.program)
    pool.run(test_torch_loops.test_sharded_optimizer_equals_unsharded.program, "adam")
    pool.run(
        test_torch_loops.test_sharded_optimizer_state_loads_on_any_number_of_ranks.program, "groups"
    )
