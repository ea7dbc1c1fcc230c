"""Parts of a Trainer in several processes: its updater, and evaluation on shards."""

from __future__ import annotations

import math
import types
from typing import TYPE_CHECKING, Any

import chainer
from chainer.dataset import convert

from collective import InvalidArgumentError, UnsupportedError
from collective.inner import comm_or_current, refuse_differences, refuses, shares

from .parallel_updater import call_with

if TYPE_CHECKING:
    from collective import Communicator

_Updater: Any = chainer.training.updaters.StandardUpdater


class MultiNodeUpdater(_Updater):  # type: ignore[misc, unused-ignore]
    """``StandardUpdater`` on every rank, in step with the other ranks.

    Each rank makes a Trainer with the same extensions. Exceptions are extensions that only print or
    write (reports, plots, progress bars): these belong on rank 0 only, because they need no peer.
    Evaluators and snapshots of this package belong on all ranks, with the same triggers.

    Triggers by epoch have to fire in the same step on all ranks. Otherwise extensions would wait
    for peers that do not run them. So iterators over shards of different lengths are refused.

    Collective: every rank makes it, and calls ``update`` equally often.

    Args:
        iterator, options: those of ``StandardUpdater``.
        optimizer: result of :func:`create_multi_node_optimizer`, or a dictionary of such
            optimizers.
        comm: communicator that connects the ranks; None: the current one.
        mean_observations: if true, each number that a step reports is the mean over the ranks
            instead of this rank's own; this costs one message a step.

    Raises:
        InvalidArgumentError: an optimizer is not wrapped by :func:`create_multi_node_optimizer`.
        UnsupportedError: an optimizer has virtual shards.
        MismatchError: the ranks' iterators would not stay in step; every rank raises it.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        comm: Communicator | None = None,
        *,
        mean_observations: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(iterator, optimizer, **options)
        self.comm = comm_or_current(comm, "MultiNodeUpdater")
        self.mean_observations = mean_observations
        for name, wrapped in self.get_all_optimizers().items():
            if isinstance(wrapped, chainer.Optimizer):
                raise InvalidArgumentError(
                    f"MultiNodeUpdater: optimizer {name!r} is a {type(wrapped).__name__} that "
                    "steps by itself, so the ranks' models would diverge. Wrap it by "
                    "create_multi_node_optimizer()."
                )
            if getattr(wrapped, "shards", None) is not None:
                raise UnsupportedError(
                    f"MultiNodeUpdater: optimizer {name!r} has shards, whose samples do not come "
                    "from an iterator on each rank. Call its update(lossfun) in a loop, with "
                    "collective.ShardBatches."
                )
        self._hold_in_step()

    def _hold_in_step(self) -> None:
        mine = []
        for name, iterator in sorted(self._iterators.items()):
            dataset: Any = getattr(iterator, "dataset", None)
            length = len(dataset) if hasattr(dataset, "__len__") else None
            batch = getattr(iterator, "batch_size", None)
            mine.append([name, f"of {length} samples, in batches of {batch},"])
        remedy = (
            "Their epochs would end in different steps: use a ShardedIterator, or "
            "scatter_dataset(padded=True)."
        )
        every = self.comm.all_gather_object(mine)
        refuse_differences("MultiNodeUpdater", "iterators", every, self.comm, remedy)

    def rebind(self, comm: Communicator) -> None:
        """Continue among other ranks; iterators and optimizers are rebound separately."""
        self.comm = comm

    def update_core(self) -> None:
        """Make a step; every rank calls it."""
        super().update_core()
        if self.mean_observations:
            self._average()

    def _average(self) -> None:
        observation = chainer.reporter.get_current_reporter().observation
        mine = {}
        for name, value in observation.items():
            if isinstance(value, chainer.Variable):
                value = value.array
            if isinstance(value, (int, float)) or getattr(value, "ndim", 1) == 0:
                mine[name] = float(value)
        every = self.comm.all_gather_object(mine)
        for name in mine:
            # A rank may report nothing for a branch that it has not taken.
            values = [theirs[name] for theirs in every if name in theirs]
            observation[name] = math.fsum(values) / len(values)


# By name, for each batch: the reported value times its weight, and the weight.
_Sums = dict[str, list[list[float]]]
_Evaluator: Any = chainer.training.extensions.Evaluator
_Bar: Any = chainer.training.extensions.evaluator._IteratorProgressBar


@refuses({"communicator": "use comm="})
def create_multi_node_evaluator(actual_evaluator: Any, comm: Communicator | None = None) -> Any:
    """Make an evaluator report the means over the samples of all ranks.

    Each rank evaluates its own samples, of which it may have any number, 0 included. A value that
    is reported for a batch counts as often as the batch has samples, so that the lengths of batches
    and shards make no difference. The result is the same as in one process, and is bit-identical on
    all ranks. This requires values that are means over a batch's samples, as losses and accuracies
    are. If a value is the mean of fewer or more items (pixels, words), report it as Chainer's
    ``(value, weight)``. A value that is not a mean (a perplexity) has to be computed from a mean.

    Collective: every rank calls the evaluator equally often. The batches inside need no peer.

    Args:
        actual_evaluator: ``Evaluator`` to change and return. Its iterator must not repeat, and
            ranks must not share samples: use a shard of ``scatter_dataset`` (not padded), or a
            ``ShardedIterator`` with ``repeat=False``.
        comm: ranks that take part; None: those of the current communicator.

    Raises:
        InvalidArgumentError: the evaluator's class has its own ``evaluate``, whose batches are
            unknown.
    """
    if type(actual_evaluator).evaluate is not _Evaluator.evaluate:
        raise InvalidArgumentError(
            f"create_multi_node_evaluator: {type(actual_evaluator).__name__} has an evaluate() of "
            "its own (expected the method of chainer.training.extensions.Evaluator, which "
            "separates the batches). Give the evaluator an eval_func instead."
        )
    actual_evaluator.comm = comm_or_current(comm, "create_multi_node_evaluator")
    actual_evaluator.evaluate = types.MethodType(_evaluate, actual_evaluator)
    actual_evaluator.rebind = types.MethodType(_rebind, actual_evaluator)
    return actual_evaluator


def _rebind(evaluator: Any, comm: Communicator) -> None:
    """Evaluate among other ranks; a shard of ``scatter_dataset`` stays unchanged."""
    evaluator.comm = comm
    for iterator in evaluator.get_all_iterators().values():
        if isinstance(iterator, shares.Rebindable):
            iterator.rebind(comm)


def _evaluate(evaluator: Any) -> dict[str, float]:
    """Return the means over all ranks' samples; replacement for ``Evaluator.evaluate``."""
    mine: _Sums = {}
    iterator = evaluator.get_iterator("main")
    if not hasattr(iterator, "reset"):
        raise InvalidArgumentError(
            f"evaluate: the iterator of type {type(iterator).__name__} has no reset(), but each "
            "evaluation starts from the first sample. Use an iterator with reset()."
        )
    if evaluator.eval_hook:
        evaluator.eval_hook(evaluator)
    iterator.reset()
    function = evaluator.eval_func or evaluator.get_target("main")
    bar = _Bar(iterator=iterator) if evaluator._progress_bar else None
    # Chainer's own iterators cannot begin an epoch without samples.
    dataset: Any = getattr(iterator, "dataset", None)
    empty = hasattr(dataset, "__len__") and len(dataset) == 0
    for batch in () if empty else iterator:
        observation: dict[str, Any] = {}
        with chainer.reporter.report_scope(observation):
            arguments = convert._call_converter(evaluator.converter, batch, evaluator.device)
            with chainer.no_backprop_mode():
                call_with(function, arguments)
        _add(mine, observation, len(batch))
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()
    return _merged(evaluator.comm, mine)


def _add(mine: _Sums, observation: dict[str, Any], samples: int) -> None:
    for name, value in observation.items():
        weight: Any = samples
        if isinstance(value, tuple):
            value, weight = value
        if getattr(value, "ndim", 0):
            continue  # Chainer's own summary skips arrays with axes, too
        if isinstance(value, chainer.Variable):
            value = value.array
        number, weight = float(value), float(weight)
        mine.setdefault(name, []).append([number * weight, weight])


def _merged(comm: Communicator, mine: _Sums) -> dict[str, float]:
    every: list[_Sums] = comm.all_gather_object(mine)
    means = {}
    for name in sorted({name for theirs in every for name in theirs}):
        parts = [part for theirs in every for part in theirs.get(name, ())]
        # The sums are exact, so they do not depend on which rank had which batch.
        total, weight = map(_sum, zip(*parts))
        means[name] = total / weight if weight else math.nan
    return means


def _sum(values: tuple[float, ...]) -> float:
    """Return the sum, rounded once; infinite and NaN values follow IEEE 754."""
    return math.fsum(values) if all(map(math.isfinite, values)) else float(sum(values))
