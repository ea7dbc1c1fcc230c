"""``nccl`` over the ABI fake for the public suite, whose arrays are in the memory of its GPUs.

The fake does its work later, as a GPU would. What of its own work the library forgets to order is
seen: outputs are poisoned until they are written.
"""

from __future__ import annotations

from nccl_callers import FakeNccl

__all__ = ["NewNccl", "OldNccl"]


class NewNccl(FakeNccl):
    """A library that has all."""

    name = "nccl-fake"
    knobs = {"delay_us": 20, "log": 0}  # noqa: RUF012


class OldNccl(NewNccl):
    """A library without native all_to_all, gather, scatter, split or windows."""

    name = "nccl-fake-2.14"
    version = 21403
