"""Chainer on current Python versions, its arrays in ``collective``, and data-parallel training.

Importing this package makes ``import chainer`` and ``import chainermn`` work with a current
NumPy, where they would otherwise fail: see :mod:`collective.adapters.chainer.compatibility`. The
exported names are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.inner import on_demand as _on_demand

from . import compatibility

if TYPE_CHECKING:
    from collective.adapters.chainer.compatibility.processes import WorkerLostError

    from . import functional
    from .batch_normalization import SyncBatchNormalization, convert_batch_normalization
    from .dataset import ShardedIterator, scatter_dataset
    from .optimizer import MultiNodeOptimizer, create_multi_node_optimizer
    from .parallel_updater import ParallelUpdater, Replicas
    from .pipeline import Pipeline
    from .splits import Split
    from .state import broadcast_state
    from .trainer import MultiNodeUpdater, create_multi_node_evaluator
else:  # not for type checkers: with __getattr__ they would accept any name
    _get, __dir__ = _on_demand(
        __name__,
        {
            "compatibility.processes": "WorkerLostError",
            "": "functional",
            "batch_normalization": "SyncBatchNormalization convert_batch_normalization",
            "dataset": "ShardedIterator scatter_dataset",
            "optimizer": "MultiNodeOptimizer create_multi_node_optimizer",
            "parallel_updater": "ParallelUpdater Replicas",
            "pipeline": "Pipeline",
            "splits": "Split",
            "state": "broadcast_state",
            "trainer": "MultiNodeUpdater create_multi_node_evaluator",
        },
    )

    def __getattr__(name):
        if name in ("MultiNodeSnapshot", "SnapshotError", "load_snapshot", "save_snapshot"):
            raise AttributeError(
                f"collective.adapters.chainer has no {name}: rank 0 writes a snapshot for all by "
                "chainer.training.extensions.snapshot(condition=lambda: comm.rank == 0)."
            )
        return _get(name)


__all__ = [
    "MultiNodeOptimizer",
    "MultiNodeUpdater",
    "ParallelUpdater",
    "Pipeline",
    "Replicas",
    "ShardedIterator",
    "Split",
    "SyncBatchNormalization",
    "WorkerLostError",
    "broadcast_state",
    "convert_batch_normalization",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "functional",
    "scatter_dataset",
]

compatibility.install()
