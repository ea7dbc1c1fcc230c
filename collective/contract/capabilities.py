"""Abilities of a transport, as one frozen value.

Three things follow from this value: the choice of a transport, the texts of refusals, and the
selection of conformance checks. So each fact about a transport is written down once.
"""

from __future__ import annotations

from dataclasses import dataclass

from collective.memory.dtypes import BY_NAME
from collective.ops import NAMES

__all__ = ["ALL_OPS", "FOLDED", "Capabilities"]

#: Every reduction, for transports that fold in Python.
ALL_OPS = frozenset((*NAMES, "premul_sum", "user"))
#: The element types that Python code can fold.
FOLDED = frozenset(name for name in BY_NAME if not name.startswith("float8"))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of a transport.

    Attributes:
        devices: device kinds its buffers may be on (``"cpu"``, ``"cuda"``). Where ``"cuda"``
            is missing, the communicator copies GPU arrays through host memory.
        dtypes: names of the element types that the transport can reduce; it can move any type.
        ops: names of the reductions (:data:`collective.ops.NAMES`, ``"premul_sum"``,
            ``"user"``).
        across_hosts: whether ranks may be on different hosts.
        in_process: whether the ranks are threads of one process.
        checks_calls: whether every collective call compares the ranks' requests without an extra
            message. If False, the communicator compares requests by messages: of ``gather`` and
            ``all_gather`` without ``counts`` and of ``all_to_all`` always, of other calls with
            ``COLLECTIVE_CHECK=always``. Without that setting, the root of a ``broadcast`` or
            ``scatter`` sends at once, and a call that differs breaks the communicator. If calls
            are enqueued (:attr:`Backend.enqueues`), these two are always compared, too.
        symmetric_memory: whether :meth:`Backend.empty` returns memory that reduces
            without copies.
        any_source: whether ``recv`` takes ``ANY_SOURCE``.
        detects_lost_peers: whether a peer's death ends the calls that wait for that peer.
        shrinks: whether the remaining ranks can connect anew after a loss, by
            :meth:`Backend.reconnect`; :meth:`Backend.lost` then names the lost ranks.
        grows: whether new processes can join the ranks. The new processes call
            :meth:`Backend.connect` while the old ranks call ``reconnect``, with the same world.
            Requires ``shrinks``.
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
