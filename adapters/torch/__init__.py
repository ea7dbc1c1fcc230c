"""PyTorch: its tensors as arrays of ``collective``, and data-parallel training.

What is exported is imported when it is first asked for: a program that only passes tensors to a
communicator does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.lazy import on_demand as _on_demand

from .autoload import autoload as _autoload

if TYPE_CHECKING:
    from . import functional
    from .applying import parallel_apply
    from .batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from .coalescing import broadcast_coalesced, reduce_add_coalesced
    from .data import PrefetchLoader, ShardedSampler
    from .distributed_data_parallel import DistributedDataParallel, broadcast_state
    from .loops import sync_gradients, sync_initial_weights
    from .replicas import DataParallel, data_parallel
    from .replicating import replicate
    from .scattering import gather, scatter
    from .sharded_optimizer import ShardedOptimizer
    from .sparse import all_reduce_sparse
    from .splits import Split
else:  # to a type checker it would mean that there is any name
    __getattr__, __dir__ = _on_demand(
        __name__,
        {
            "DataParallel": "replicas",
            "DistributedDataParallel": "distributed_data_parallel",
            "PrefetchLoader": "data",
            "ShardedOptimizer": "sharded_optimizer",
            "ShardedSampler": "data",
            "Split": "splits",
            "SyncBatchNorm": "batch_norm",
            "all_reduce_sparse": "sparse",
            "broadcast_coalesced": "coalescing",
            "broadcast_state": "distributed_data_parallel",
            "convert_sync_batchnorm": "batch_norm",
            "data_parallel": "replicas",
            "functional": "functional",
            "gather": "scattering",
            "parallel_apply": "applying",
            "reduce_add_coalesced": "coalescing",
            "replicate": "replicating",
            "scatter": "scattering",
            "sync_gradients": "loops",
            "sync_initial_weights": "loops",
        },
    )

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "PrefetchLoader",
    "ShardedOptimizer",
    "ShardedSampler",
    "Split",
    "SyncBatchNorm",
    "all_reduce_sparse",
    "broadcast_coalesced",
    "broadcast_state",
    "convert_sync_batchnorm",
    "data_parallel",
    "functional",
    "gather",
    "parallel_apply",
    "reduce_add_coalesced",
    "replicate",
    "scatter",
    "sync_gradients",
    "sync_initial_weights",
]

# For torch.distributed.init_process_group("collective").
_autoload()
