"""A function on ranks that are actors, which are started for it and ended after it."""

from __future__ import annotations

import contextlib
import importlib
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from collective import InvalidArgumentError, RendezvousError
from collective.inner import Deadline
from collective.launch.outcome import Outcome, RankDiedError, RanksFailedError

from .group import forget, meet_actors, tell_dead

# Seconds that the other ranks have to end after one has failed, so that the error can show the
# failures of all.
_GRACE_S = 1.0
# Longest wait for Ray that no signal ends.
_LOOK_S = 0.5


def run(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    runtime_env: Mapping[str, Any] | None = None,
    start_timeout: float = 60.0,
    min_ranks: int | None = None,
) -> list[Any]:
    """Call ``function(comm, *args)`` on ranks that are Ray's actors and return their results.

    The ranks start at once or not at all: they are bundles of one placement group. Actors,
    placement group and keys are gone after the call, also if it raises or is interrupted.

    Args:
        function: function of a communicator. Ray pickles it.
        size: number of ranks.
        args: further arguments of the function.
        num_cpus, num_gpus, resources: what each rank reserves in Ray.
        strategy: the placement group's strategy: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or
            ``STRICT_SPREAD``.
        runtime_env: runtime environment of the ranks; by default the job's.
        start_timeout: seconds until the resources must be free, and then until the ranks must have
            met.
        min_ranks: if set, continue when ranks fail, as long as so many are left. The function
            must then call ``comm.shrink()`` after a ``PeerLostError``.

    Returns:
        The results by rank. With ``min_ranks``, the place of a failed rank has its exception.

    Raises:
        InvalidArgumentError: the cluster does not have the resources for so many ranks.
        RendezvousError: other programs kept the resources until ``start_timeout``.
        RanksFailedError: ranks failed. The error shows the traceback of the first of them first.
    """
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init()
    if size < 1:
        raise InvalidArgumentError(f"run: size={size}; pass the number of ranks, at least 1.")
    if min_ranks is not None and not 1 <= min_ranks <= size:
        raise InvalidArgumentError(
            f"run: min_ranks={min_ranks}; of {size} ranks, from 1 to {size} can be left."
        )
    reserved = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
    bundle = {name: amount for name, amount in reserved.items() if amount}
    _check_resources(ray.cluster_resources(), bundle, size)
    placement = importlib.import_module("ray.util.placement_group")
    group: Any = None
    name = f"run/{secrets.token_hex(8)}"
    actors: list[Any] = []
    try:
        group = placement.placement_group([bundle or {"CPU": 0.001}] * size, strategy)
        if not _is_placed(group, start_timeout):
            raise RendezvousError(
                f"run: Ray has not placed {size} ranks with {_listed(bundle)} each within "
                f"{start_timeout:g} s (strategy {strategy}); free are "
                f"{_listed(ray.available_resources())}. Wait until other programs have ended, or "
                "raise start_timeout."
            )
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        kind = ray.remote(_RankActor)
        for rank in range(size):
            place = scheduling.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            )
            actors.append(
                kind.options(
                    num_cpus=num_cpus, num_gpus=num_gpus, resources=dict(resources or {}),
                    scheduling_strategy=place, max_restarts=0,
                    **({"runtime_env": dict(runtime_env)} if runtime_env else {}),
                ).remote(rank, size, name)
            )  # fmt: skip
        settings: dict[str, Any] = {"start_timeout": start_timeout}
        if min_ranks is not None:
            settings["min_ranks"] = min_ranks
        calls = {
            actor.work.remote(function, args, settings): rank for rank, actor in enumerate(actors)
        }
        least = size if min_ranks is None else min_ranks
        return _results(ray, calls, size, least, partial(tell_dead, name))
    finally:
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            placement.remove_placement_group(group)
        with contextlib.suppress(RendezvousError):  # Ray itself has ended
            forget(name, ends=True)


class _RankActor:
    """Actor that is one rank."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        self._place = (size, rank, name)

    def work(
        self, function: Callable[..., Any], args: tuple[Any, ...], settings: Mapping[str, Any]
    ) -> Outcome:
        """Meet the other ranks, call the function and return its outcome."""
        __tracebackhide__ = True
        try:
            with meet_actors(*self._place, lasting=True, **settings) as comm:
                return Outcome(function(comm, *args))
        except BaseException as error:
            pickler = importlib.import_module("ray.cloudpickle")
            return Outcome.failed(error).portable(pickler.dumps, pickler.loads)


def _is_placed(group: Any, seconds: float) -> bool:
    """Wait until Ray has placed a group, for at most ``seconds``; return whether it has."""
    deadline = Deadline(seconds)
    # Ray's wait ends at no signal, so Ctrl-C takes effect between two waits.
    while not deadline.expired:
        if group.wait(deadline.at_most(_LOOK_S)):
            return True
    return False


def _check_resources(cluster: Mapping[str, float], bundle: Mapping[str, float], size: int) -> None:
    """Raise InvalidArgumentError if the cluster will never have the resources."""
    for name, amount in bundle.items():
        if amount * size > cluster.get(name, 0.0):
            raise InvalidArgumentError(
                f"run: {size} ranks with {amount:g} {name} each need {amount * size:g} {name}, and "
                f"Ray's cluster has {cluster.get(name, 0.0):g}. Start fewer ranks, give each of "
                "them less, or add hosts to the cluster."
            )


def _listed(amounts: Mapping[str, float]) -> str:
    shown = [
        f"{amount:g} {name}" for name, amount in amounts.items() if not name.startswith("node:")
    ]
    return ", ".join(shown) or "nothing"


def _results(
    ray: Any, calls: dict[Any, int], size: int, least: int, tell: Callable[[int, int, str], object]
) -> list[Any]:
    """Return the ranks' results, or raise as soon as too many ranks have failed.

    Args:
        ray: the module.
        calls: ranks by the references of their calls.
        size: number of ranks.
        least: number of ranks that must be left.
        tell: function that tells the ranks that still meet of a rank that has died, of how many
            ranks, and how.
    """
    outcomes: dict[int, Outcome] = {}
    grace: Deadline | None = None
    while calls and (grace is None or not grace.expired):
        patience = None if grace is None else grace.left()
        for reference in ray.wait(list(calls), timeout=patience)[0]:
            rank = calls.pop(reference)
            outcomes[rank] = _outcome(ray, reference, rank)
            if isinstance(error := outcomes[rank].error, RankDiedError):
                with contextlib.suppress(RendezvousError):  # Ray itself has ended
                    tell(rank, size, str(error))
        failed = sum(outcome.error is not None for outcome in outcomes.values())
        if grace is None and size - failed < least:
            grace = Deadline(_GRACE_S)
    if grace is not None and (failure := RanksFailedError.of(outcomes, size)) is not None:
        raise failure
    ordered = (outcomes[rank] for rank in range(size))
    return [outcome.value if outcome.error is None else outcome.error for outcome in ordered]


def _outcome(ray: Any, reference: Any, rank: int) -> Outcome:
    try:
        outcome = ray.get(reference)
        assert isinstance(outcome, Outcome)
        return outcome
    except ray.exceptions.RayActorError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome(error=RankDiedError(f"rank {rank} has died: {' '.join(lines)}"))
    except ray.exceptions.RayError as error:  # such as a function that cannot be unpickled
        return Outcome.failed(error)
