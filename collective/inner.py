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
            "Adapter": "memory.arrays",
            "ArrayFramework": "testing.frameworks",
            "BY_NAME": "memory.dtypes",
            "Backend": "contract.backend",
            "Bucket": "training.gradients",
            "Buffer": "memory.buffer",
            "Capabilities": "contract.backend",
            "Config": "start.config",
            "DType": "memory.dtypes",
            "Deadline": "deadline",
            "DeviceArray": "memory.device_array",
            "Failure": "contract.failure",
            "FileStore": "start.stores",
            "Filters": "training.splits.filters",
            "Framework": "memory.annotations",
            "Gradients": "training.gradients",
            "HostSlots": "start.host_list",
            "KEYS": "start.keys",
            "Mpiexec": "launch.mpiexec",
            "NotCopied": "contract.process",
            "Op": "ops",
            "Parameter": "training.gradients",
            "Participant": "launch.ranks",
            "RankDiedError": "launch.outcome",
            "RankHungError": "launch.outcome",
            "Ranks": "launch.ranks",
            "RanksFailedError": "launch.outcome",
            "Request": "request",
            "ShardPasses": "training.shard_passes",
            "Spot": "memory.buffer",
            "StateEntry": "training.replicas",
            "World": "contract.world",
            "adapter_like": "memory.arrays",
            "as_op": "ops",
            "call_in_place": "memory.overlap",
            "check_values": "training.replicas",
            "comm_or_current": "start.session",
            "cuda": "cuda",
            "detect": "start.launchers",
            "differentiable": "training.differentiable",
            "dtypes": "memory.dtypes",
            "encoded": "testing.frameworks",
            "framework": "testing.frameworks",
            "install": "install",
            "load": "start.config",
            "native": "native",
            "nested": "memory.nested",
            "not_read": "start.config",
            "on_demand": "lazy",
            "pass_over": "request",
            "platform": "platform",
            "refuse_differences": "training.replicas",
            "refuses": "communicator.foreign_names",
            "registry": "contract.registry",
            "session": "start.session",
            "settings": "start.config",
            "shares": "training.shares",
            "trace": "trace",
            "under_mpiexec": "launch.command_starter",
            "whole_gradients": "training.splits.filters",
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
