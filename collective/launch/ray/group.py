"""Group of actors: Ray's ``BaseGroup`` over a communicator."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any
from urllib.parse import quote

from collective import Communicator
from collective.inner import Deadline, load
from collective.launch.actor_calls import ActorCalls
from collective.start.connecting import refuse_ended, tell_ended
from collective.start.meeting import connect_met
from collective.start.ray_store import RayStore
from collective.start.rendezvous import from_text

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
        # Quoted, so that no name's keys are below those of another name.
        self.comm = meet_actors(world_size, rank, f"group/{quote(group_name, safe='')}")

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


def meet_actors(
    size: int, rank: int, name: str, *, lasting: bool = False, **settings: Any
) -> Communicator:
    """Connect the processes that meet under a name in Ray's key-value store.

    Args:
        size: number of processes.
        rank: number of this process.
        name: name under which they meet, in the namespace of Ray's job.
        lasting: if true, the ranks can shrink, and the caller calls :func:`forget` at the end.
        settings: settings that replace those of variables and files.

    Raises:
        RendezvousError: not all processes came within ``COLLECTIVE_START_TIMEOUT``, or they
            cannot be one group.
        ConfigError, BackendUnavailableError: as for :func:`collective.init`.
    """
    context = importlib.import_module("ray").get_runtime_context()
    actor = context.get_actor_id()
    place = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1}
    deadline = Deadline(load({**place, **settings}).start_timeout)
    if rank == 0:
        forget(name)  # also the keys of ranks that met here, and then failed to connect
    comm = connect_met(
        _store(name),
        rank,
        size,
        context=("ray", name),
        # This host's address is the one toward Ray's control service, which all hosts reach.
        toward=lambda config: from_text(
            str(context.gcs_address or ""), "the address of Ray's control service"
        ),
        label=f"actor {actor[:8]}" if actor else "a process that is no actor",
        look=partial(refuse_ended, _store(_ends_of(name)), rank, size),
        **settings,
    )
    # Delete the keys as early as possible: a driver or an actor that is killed deletes nothing.
    try:
        if not lasting:
            # The connected ranks need no store.
            comm.barrier(timeout=max(deadline.left(), 1.0))
        if rank == 0:
            # A rank connects after the roll call, so no rank reads the keys of that any more.
            forget(f"{name}/roll" if lasting else name)
    except BaseException:
        comm.close()
        raise
    return comm


def tell_dead(name: str, rank: int, size: int, why: str) -> None:
    """Tell the processes that still meet under a name that one of them has ended."""
    tell_ended(_store(_ends_of(name)), {rank: why}, [0] * size, size)


def _ends_of(name: str) -> str:
    """Return the name for what :func:`tell_dead` tells, which rank 0 does not delete at first."""
    return f"{name}-ends"


def forget(name: str, *, ends: bool = False) -> None:
    """Delete all keys of a name under which processes have met.

    Args:
        name: the name.
        ends: whether to delete what :func:`tell_dead` has told, too.
    """
    _store(name).delete_all()
    if ends:
        _store(_ends_of(name)).delete_all()


def _store(name: str) -> RayStore:
    namespace = importlib.import_module("ray").get_runtime_context().namespace
    return RayStore(importlib.import_module("ray.experimental.internal_kv"), f"{namespace}/{name}")
