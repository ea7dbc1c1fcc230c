"""Chainer: alive on today's Python, its arrays in ``collective``, and data-parallel training.

Importing this package makes ``import chainer`` and ``import chainermn`` work with a current
NumPy, where they would fail: see :mod:`collective.adapters.chainer.compatibility`. What is
exported is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from collective.adapters.chainer import compatibility

if TYPE_CHECKING:
    from collective.adapters.chainer import functional
    from collective.adapters.chainer.batch_normalization import (
        SyncBatchNormalization,
        convert_batch_normalization,
    )
    from collective.adapters.chainer.compatibility.processes import WorkerLostError
    from collective.adapters.chainer.dataset import ShardedIterator, scatter_dataset
    from collective.adapters.chainer.evaluator import create_multi_node_evaluator
    from collective.adapters.chainer.optimizer import (
        MultiNodeOptimizer,
        create_multi_node_optimizer,
    )
    from collective.adapters.chainer.parallel_updater import ParallelUpdater, Replicas
    from collective.adapters.chainer.pipeline import Pipeline
    from collective.adapters.chainer.snapshot import (
        MultiNodeSnapshot,
        SnapshotError,
        load_snapshot,
        save_snapshot,
    )
    from collective.adapters.chainer.splits import Split
    from collective.adapters.chainer.state import broadcast_state
    from collective.adapters.chainer.updaters import MultiNodeUpdater

__all__ = [
    "MultiNodeOptimizer",
    "MultiNodeSnapshot",
    "MultiNodeUpdater",
    "ParallelUpdater",
    "Pipeline",
    "Replicas",
    "ShardedIterator",
    "SnapshotError",
    "Split",
    "SyncBatchNormalization",
    "WorkerLostError",
    "broadcast_state",
    "convert_batch_normalization",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "functional",
    "load_snapshot",
    "save_snapshot",
    "scatter_dataset",
]

_MODULES = {
    "MultiNodeOptimizer": "optimizer",
    "MultiNodeSnapshot": "snapshot",
    "MultiNodeUpdater": "updaters",
    "ParallelUpdater": "parallel_updater",
    "Pipeline": "pipeline",
    "Replicas": "parallel_updater",
    "ShardedIterator": "dataset",
    "SnapshotError": "snapshot",
    "Split": "splits",
    "SyncBatchNormalization": "batch_normalization",
    "WorkerLostError": "compatibility.processes",
    "broadcast_state": "state",
    "convert_batch_normalization": "batch_normalization",
    "create_multi_node_evaluator": "evaluator",
    "create_multi_node_optimizer": "optimizer",
    "load_snapshot": "snapshot",
    "save_snapshot": "snapshot",
    "scatter_dataset": "dataset",
}

compatibility.install()


def __getattr__(name: str) -> Any:
    if name == "functional":
        return importlib.import_module(f"{__name__}.functional")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
