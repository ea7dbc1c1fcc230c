"""What a transport can do, as one frozen value.

It drives the choice of a transport, the texts of refusals and which conformance checks
run, so that nothing about a transport is written down twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from collective.memory.dtypes import BY_NAME
from collective.ops import NAMES

__all__ = ["ALL_OPS", "FOLDED", "Capabilities"]

#: Every reduction, for transports that fold in Python.
ALL_OPS = frozenset((*NAMES, "premul_sum", "user"))
#: The element types that are folded in Python.
FOLDED = frozenset(name for name in BY_NAME if not name.startswith("float8"))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do.

    Attributes:
        devices: device kinds its buffers may be on (``"cpu"``, ``"cuda"``). Where ``"cuda"``
            is missing the communicator takes arrays of GPUs through host memory.
        dtypes: names of the element types that it can reduce; any type can be moved.
        ops: names of the reductions (:data:`collective.ops.NAMES`, ``"premul_sum"``,
            ``"user"``).
        across_hosts: whether ranks may be on different hosts.
        in_process: whether the ranks are threads of one process.
        checks_calls: whether every collective call compares what the ranks asked for, at
            no message of its own. Where it is False the communicator compares by messages: calls
            whose sizes may differ always, the others when asked to (``COLLECTIVE_CHECK=always``).
        symmetric_memory: whether :meth:`Backend.empty` returns memory that reduces
            without copies.
        any_source: whether ``recv`` takes ``ANY_SOURCE``.
        detects_lost_peers: whether a peer's death ends the calls that wait for it.
        shrinks: whether the ranks that are left after one can connect anew, by
            :meth:`Backend.reconnect`, and :meth:`Backend.lost` says who is not.
        grows: whether processes can join them: these call :meth:`Backend.connect` when the others
            call ``reconnect``, with one world. Only where it shrinks.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[str] = FOLDED
    ops: frozenset[str] = ALL_OPS
    across_hosts: bool = False
    in_process: bool = False
    checks_calls: bool = False
    symmetric_memory: bool = False
    any_source: bool = False
    detects_lost_peers: bool = False
    shrinks: bool = False
    grows: bool = False
