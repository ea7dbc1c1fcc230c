"""Evaluation on shards: means over the samples of all ranks."""

from __future__ import annotations

import math
import types
from typing import TYPE_CHECKING, Any

import chainer
from chainer.dataset import convert

from collective.communicator.foreign_names import refuses
from collective.errors import InvalidArgumentError
from collective.start.session import comm_or_current
from collective.training.rebinding import Rebindable

from .parallel_updater import call_with

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["create_multi_node_evaluator"]

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
        if isinstance(iterator, Rebindable):
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
