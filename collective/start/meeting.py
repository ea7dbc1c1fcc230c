"""Facts that ranks without a launcher of ours exchange in a store before they connect."""

from __future__ import annotations

import secrets
import socket

from collective.contract.store import Store
from collective.deadline import Deadline
from collective.platform import boot_id

__all__ = ["meet"]


def meet(
    store: Store, framework: str, rank: int, size: int, deadline: Deadline
) -> tuple[str, int, int]:
    """Return a unique name of the ranks, this rank's local rank, and its host's number of ranks.

    Args:
        store: store that belongs to these ranks alone.
        framework: beginning of the name.
        rank, size: number of this rank, and of ranks.
        deadline: moment by which all ranks must have come.

    Raises:
        RendezvousError: not all ranks came, or the store cannot be used.
    """
    if size == 1:
        return f"{framework}-{secrets.token_hex(8)}", 0, 1
    if rank == 0:
        store.set("job", f"{framework}-{secrets.token_hex(8)}".encode())
    host = f"{socket.gethostname()} {boot_id()}".encode()
    store.set(f"host-{rank}", host)
    hosts = [store.get(f"host-{other}", deadline) for other in range(size)]
    job = store.get("job", deadline).decode()
    return job, hosts[:rank].count(host), hosts.count(host)
