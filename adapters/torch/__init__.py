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
            "DataParallel": "replicas",
            "DistributedDataParallel": "distributed_data_parallel",
            "PrefetchLoader": "data",
            "ShardedOptimizer": "sharded_optimizer",
            "ShardedSampler": "data",
            "Split": "splits",
            "SyncBatchNorm": "batch_norm",
            "all_reduce_sparse": "synchronous",
            "broadcast_coalesced": "replicating",
            "broadcast_state": "synchronous",
            "convert_sync_batchnorm": "batch_norm",
            "data_parallel": "replicas",
            "functional": "functional",
            "gather": "scattering",
            "parallel_apply": "replicas",
            "reduce_add_coalesced": "replicating",
            "replicate": "replicating",
            "scatter": "scattering",
            "sync_gradients": "synchronous",
            "sync_initial_weights": "synchronous",
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
