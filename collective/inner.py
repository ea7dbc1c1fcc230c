"""The inner API: what adapters, tools, the test kit and launchers use of the rooms below them.

``docs/reference/inner.md`` says what each name is for. Other code of these rooms comes from
:mod:`collective` itself. A name may change in any release, but not without this list. Each name is
imported at its first use, so an adapter imports no launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.lazy import on_demand as _on_demand

if TYPE_CHECKING:
    from collective import cuda, install, native, platform, trace
    from collective.communicator.foreign_names import refuses
    from collective.contract import registry
    from collective.contract.backend import Backend, Capabilities
    from collective.contract.failure import Failure
    from collective.contract.process import NotCopied
    from collective.contract.world import World
    from collective.deadline import Deadline
    from collective.launch.command_starter import under_mpiexec
    from collective.launch.mpiexec import Mpiexec
    from collective.launch.outcome import RankDiedError, RankHungError, RanksFailedError
    from collective.launch.ranks import Participant, Ranks
    from collective.lazy import on_demand
    from collective.memory import dtypes, nested
    from collective.memory.annotations import Framework
    from collective.memory.arrays import Adapter, adapter_like
    from collective.memory.buffer import Buffer, Spot
    from collective.memory.device_array import DeviceArray
    from collective.memory.dtypes import BY_NAME, DType
    from collective.memory.overlap import call_in_place
    from collective.ops import Op, as_op
    from collective.request import Request, pass_over
    from collective.start import session
    from collective.start.config import Config, load, not_read, settings
    from collective.start.host_list import HostSlots
    from collective.start.keys import KEYS
    from collective.start.launchers import detect
    from collective.start.session import comm_or_current
    from collective.start.stores import FileStore
    from collective.testing.frameworks import ArrayFramework, encoded, framework
    from collective.training import differentiable, shares
    from collective.training.gradients import Bucket, Gradients, Parameter
    from collective.training.replicas import StateEntry, check_values, refuse_differences
    from collective.training.shard_passes import ShardPasses
    from collective.training.splits.filters import Filters, whole_gradients
else:  # for a type checker, a __getattr__ would mean that the module has every name
    __getattr__, __dir__ = _on_demand(
        "collective",
        {
            "": "cuda install native platform trace",
            "communicator.foreign_names": "refuses",
            "contract.": "registry",
            "contract.backend": "Backend Capabilities",
            "contract.failure": "Failure",
            "contract.process": "NotCopied",
            "contract.world": "World",
            "deadline": "Deadline",
            "launch.command_starter": "under_mpiexec",
            "launch.mpiexec": "Mpiexec",
            "launch.outcome": "RankDiedError RankHungError RanksFailedError",
            "launch.ranks": "Participant Ranks",
            "lazy": "on_demand",
            "memory.": "dtypes nested",
            "memory.annotations": "Framework",
            "memory.arrays": "Adapter adapter_like",
            "memory.buffer": "Buffer Spot",
            "memory.device_array": "DeviceArray",
            "memory.dtypes": "BY_NAME DType",
            "memory.overlap": "call_in_place",
            "ops": "Op as_op",
            "request": "Request pass_over",
            "start.": "session",
            "start.config": "Config load not_read settings",
            "start.host_list": "HostSlots",
            "start.keys": "KEYS",
            "start.launchers": "detect",
            "start.session": "comm_or_current",
            "start.stores": "FileStore",
            "testing.frameworks": "ArrayFramework encoded framework",
            "training.": "differentiable shares",
            "training.gradients": "Bucket Gradients Parameter",
            "training.replicas": "StateEntry check_values refuse_differences",
            "training.shard_passes": "ShardPasses",
            "training.splits.filters": "Filters whole_gradients",
        },
    )

__all__ = [
    "BY_NAME",
    "KEYS",
    "Adapter",
    "ArrayFramework",
    "Backend",
    "Bucket",
    "Buffer",
    "Capabilities",
    "Config",
    "DType",
    "Deadline",
    "DeviceArray",
    "Failure",
    "FileStore",
    "Filters",
    "Framework",
    "Gradients",
    "HostSlots",
    "Mpiexec",
    "NotCopied",
    "Op",
    "Parameter",
    "Participant",
    "RankDiedError",
    "RankHungError",
    "Ranks",
    "RanksFailedError",
    "Request",
    "ShardPasses",
    "Spot",
    "StateEntry",
    "World",
    "adapter_like",
    "as_op",
    "call_in_place",
    "check_values",
    "comm_or_current",
    "cuda",
    "detect",
    "differentiable",
    "dtypes",
    "encoded",
    "framework",
    "install",
    "load",
    "native",
    "nested",
    "not_read",
    "on_demand",
    "pass_over",
    "platform",
    "refuse_differences",
    "refuses",
    "registry",
    "session",
    "settings",
    "shares",
    "trace",
    "under_mpiexec",
    "whole_gradients",
]
