"""Group of actors: Ray's ``BaseGroup`` over a communicator."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from collective.communicator import Communicator
from collective.deadline import Deadline
from collective.launch.actor_calls import ActorCalls
from collective.platform import boot_id
from collective.start.config import load, secret_of, settings
from collective.start.met_ranks import connect_met
from collective.start.ray_store import RayStore
from collective.start.rendezvous import Endpoint
from collective.start.roll_call import Card, call_roll
from collective.start.sealed_store import seal

__all__ = ["ActorGroup", "meet_actors"]

# Untyped, because mypy also runs where Ray is not installed.
_Base: Any = importlib.import_module(
    "ray.util.collective.collective_group.base_collective_group"
).BaseGroup


class ActorGroup(ActorCalls, _Base):  # type: ignore[misc]
    """Group of actors that Ray makes for the backend ``collective``.

    Args:
        world_size: number of actors.
        rank: number of this actor among them.
        group_name: name of the group. It may be used again once the group is destroyed or its
            actors are dead.

    Attributes:
        comm: the communicator, for calls that Ray's interface does not have.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        _Base.__init__(self, world_size, rank, group_name)
        self.comm = meet_actors(world_size, rank, f"group/{group_name}")

    @classmethod
    def backend(cls) -> str:
        """Return the name that Ray has for this backend."""
        return "COLLECTIVE"

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: the transport is chosen when the actors meet."""
        return True

    def destroy_group(self) -> None:
        """Close the communicator; the other actors close theirs on their own."""
        self.comm.close()


def meet_actors(size: int, rank: int, name: str) -> Communicator:
    """Connect the processes that meet under a name in Ray's key-value store.

    Args:
        size: number of processes.
        rank: number of this process.
        name: name under which they meet, in the namespace of Ray's job.

    Raises:
        RendezvousError: not all processes came within ``COLLECTIVE_START_TIMEOUT``, or they
            cannot be one group.
        ConfigError, BackendUnavailableError: as for :func:`collective.init`.
    """
    ray = importlib.import_module("ray")
    kv = importlib.import_module("ray.experimental.internal_kv")
    context = ray.get_runtime_context()
    name = f"{context.namespace}/{name}"
    secret = secret_of(settings({}))
    if secret is not None:
        secret = secret.within("ray", name)
    roll = RayStore(kv, f"{name}/roll")
    deadline = Deadline(load({"rank": 0, "size": 1}).start_timeout)
    if rank == 0:
        roll.delete_all()
    place = call_roll(seal(roll, secret), rank, _card(size, context), deadline)
    keys = RayStore(kv, f"{name}/{place.job}")
    comm = connect_met(place, seal(keys, secret), secret, _control_service(context))
    try:
        # The connected ranks need no store. So no key is left when the actors are killed.
        comm.barrier(timeout=max(deadline.left(), 1.0))
        if rank == 0:
            roll.delete_all()
            keys.delete_all()
    except BaseException:
        comm.close()
        raise
    return comm


def _card(size: int, context: Any) -> Card:
    from collective import __version__

    host = f"{socket.gethostname()} {boot_id()}"
    actor = context.get_actor_id()
    label = f"actor {actor[:8]}" if actor else "a process that is no actor"
    return Card(size, host, __version__, f"{label} on {socket.gethostname()}, pid {os.getpid()}")


def _control_service(context: Any) -> Endpoint | None:
    """Return the address of Ray's control service, toward which a host's address is chosen."""
    host, _, port = str(context.gcs_address or "").rpartition(":")
    if not host or not port.isdecimal():
        return None
    return Endpoint(host.strip("[]"), int(port), "the address of Ray's control service")
