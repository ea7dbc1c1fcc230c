"""Adapter for PyTorch: its tensors as arrays of ``collective``, and data-parallel training.

Each exported name is imported at its first use. So a program that only passes tensors to a
communicator does not import the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.inner import on_demand as _on_demand

from .autoload import autoload as _autoload

if TYPE_CHECKING:
    from . import functional
    from .batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from .data import PrefetchLoader, ShardedSampler
    from .distributed_data_parallel import DistributedDataParallel
    from .replicas import DataParallel, data_parallel, parallel_apply
    from .replicating import broadcast_coalesced, reduce_add_coalesced, replicate
    from .scattering import gather, scatter
    from .sharded_optimizer import ShardedOptimizer
    from .splits import Split
    from .synchronous import (
        all_reduce_sparse,
        broadcast_state,
        sync_gradients,
        sync_initial_weights,
    )
else:  # for a type checker, a __getattr__ would mean that the module has every name
    __getattr__, __dir__ = _on_demand(
        __name__,
        {
            "": "functional",
            "batch_norm": "SyncBatchNorm convert_sync_batchnorm",
            "data": "PrefetchLoader ShardedSampler",
            "distributed_data_parallel": "DistributedDataParallel",
            "replicas": "DataParallel data_parallel parallel_apply",
            "replicating": "broadcast_coalesced reduce_add_coalesced replicate",
            "scattering": "gather scatter",
            "sharded_optimizer": "ShardedOptimizer",
            "splits": "Split",
            "synchronous": "all_reduce_sparse broadcast_state sync_gradients sync_initial_weights",
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
