"""Training parity: one model, its weights and data, in both frameworks, on any number of ranks.

Training uses double precision. There the rounding of a sum over R parts and of a sum over the whole
batch differ by 1e-16 relative. The effect of that on the trained weights stays far below the
tolerances, while the effect of a wrong gradient does not.

Where the library folds gradients in the same order, digests of the weights are compared: in rank
order between transports, and of virtual shards between any numbers of ranks. If the digests of
shards differ, a framework's kernels on this machine round differently from rank to rank or from run
to run.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from collective import Communicator, InvalidArgumentError
from collective.inner import framework

from . import models
from .runner import Comparison, on_ranks, row

Array = np.ndarray[Any, Any]
_Weights = dict[str, Array]

#: Optimizer -> largest absolute difference of weights after some tens of steps. After 8 steps of
#: LeNet, 2e-16 and 2e-14 were measured. Adam divides by the size of gradients, which amplifies
#: their noise.
TOLERANCES = {"sgd": 1e-12, "adam": 1e-10}

# The frameworks of a user's pair of models, in its order.
_FRAMEWORKS = ("torch", "chainer")


class Setup(NamedTuple):
    """Training run.

    Attributes:
        model: ``module:function`` of a user's pair.
        optimizer: ``"sgd"`` or ``"adam"``.
        framework: ``"torch"`` or ``"chainer"``.
    """

    model: str
    optimizer: str
    framework: str

    def __str__(self) -> str:
        return ", ".join(self)


def compare(
    plan: Comparison, steps: int, model: str, shards: int | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Train in every framework, over every transport, and compare the weights.

    Args:
        plan: the transports, frameworks and numbers of ranks.
        steps: number of steps of each run.
        model: ``module:function`` of a user's pair.
        shards: number of virtual shards to train on, too; it must divide the number of samples in a
            batch. None for no such training.
        say: called with a text about the current training.

    Returns:
        A row for each comparison: ``what``, ``passed``, ``difference`` and ``allowed``; for digests
        ``text`` instead of a difference.

    Raises:
        InvalidArgumentError: the plan has no framework to train in, ``model`` is no function that
            returns a pair with its data, or the shards do not divide a batch.
    """
    rows: list[dict[str, Any]] = []
    frameworks = [name for name in plan.frameworks if name in _FRAMEWORKS]
    if not frameworks:
        raise InvalidArgumentError(
            f"--model: got the frameworks {', '.join(plan.frameworks)} (expected torch or chainer)."
        )
    *pair, batch = _pair(model)
    first = models.PARAMETERS[frameworks[0]](pair[_FRAMEWORKS.index(frameworks[0])])
    start = {name: np.array(value, np.float64) for name, value in first.items()}
    samples = len(batch(0)[1])
    if shards and samples % shards:
        raise InvalidArgumentError(
            f"--shards: {shards} shards of a batch of {samples} samples; expected a divisor of "
            f"{samples}."
        )
    setups = [Setup(model, optimizer, f) for optimizer in TOLERANCES for f in frameworks]
    alone = {}
    for setup in setups:
        say(f"{setup} alone")
        alone[setup] = train(None, setup, start, steps)
    rows += _across_frameworks(alone)
    found: _Found = {setup: {} for setup in setups}
    asked = setups, start, steps, shards
    for name, size, ranks in on_ranks(plan, "training", say, rows, _train_on_ranks, *asked):
        for setup, every in zip(setups, zip(*ranks)):
            found[setup][name, size] = every[0]._replace(
                of_shards=" / ".join(dict.fromkeys(one.of_shards for one in every))
            )
    found = {setup: runs for setup, runs in found.items() if runs}
    rows += [_against_one(setup, alone[setup], runs) for setup, runs in found.items()]
    rows += [
        _in_rank_order(setup, runs)
        for setup, runs in found.items()
        if len({name for name, _ in runs}) > 1
    ]
    if shards:
        rows += [_on_shards(setup, shards, runs) for setup, runs in found.items()]
    return rows


def _pair(model: str) -> Sequence[Any]:
    module, _, name = model.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    # An empty name raises ValueError.
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(f"--model: {model!r}: {error}; give module:function.") from error
    pair = function()
    if not isinstance(pair, tuple) or len(pair) != 3:
        raise InvalidArgumentError(
            f"--model: {model} returned {type(pair).__name__}; it must return a PyTorch module, a "
            "Chainer link and a function of the step that returns inputs and targets, as a tuple."
        )
    return pair


# -- on the ranks ---------------------------------------------------------------------------------


class _Trained(NamedTuple):
    """Outcome of a setup on one rank.

    Attributes:
        weights: weights, on rank 0; the other ranks have the same bits.
        ordered: digest of the weights if gradients are summed in rank order.
        of_shards: digest of the weights of virtual shards; "" without them.
    """

    weights: _Weights
    ordered: str
    of_shards: str


def _train_on_ranks(
    comm: Communicator, setups: Sequence[Setup], start: _Weights, steps: int, shards: int | None
) -> list[_Trained]:
    found = []
    for setup in setups:
        trained = train(comm, setup, start, steps)
        ordered = _digest(train(comm, setup, start, steps, ordered=True))
        if len(set(map(tuple, comm.all_gather_object([_digest(trained), ordered])))) > 1:
            raise AssertionError(f"rank {comm.rank}: the replicas differ")
        of_shards = _digest(train(comm, setup, start, steps, shards=shards)) if shards else ""
        found.append(_Trained({} if comm.rank else trained, ordered, of_shards))
    return found


def _digest(weights: Mapping[str, Array]) -> str:
    data = b"".join(weights[name].tobytes() for name in sorted(weights))
    return hashlib.sha256(data).hexdigest()[:16]


def train(
    comm: Communicator | None, setup: Setup, start: _Weights, steps: int, *,
    ordered: bool = False, shards: int | None = None,
) -> _Weights:  # fmt: skip
    """Train on this rank's share of each batch, or on its virtual shards; return the weights.

    Args:
        comm: communicator of the ranks; None for one process, which trains on whole batches.
        start: initial weights, by name.
        steps: number of batches.
        ordered: whether gradients are summed in rank order.
        shards: number of virtual shards; None for none.
    """
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    framework(setup.framework).settle(rank)
    *pair, batch = _pair(setup.model)
    batches = []
    for x, y in map(batch, range(steps)):
        parts = np.array_split(np.arange(len(y)), shards or size)
        # With this factor, the average over the parts is the mean over the whole batch, also if
        # some parts have more rows.
        every = [(x[part], y[part], len(part) * len(parts) / len(y)) for part in parts]
        batches.append(every if shards else [every[rank]])
    how: dict[str, Any] = {"shards": shards} if shards else {}
    if ordered and comm is not None:
        how["reduce"] = _InRankOrder(comm)
    model = pair[_FRAMEWORKS.index(setup.framework)]
    return models.TRAIN[setup.framework](comm, model, start, setup.optimizer, batches, **how)


class _InRankOrder:
    """Averaging of a bucket of gradients in rank order: every transport gives the same bits."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.dup()

    def __call__(self, bucket: Any) -> None:
        self._comm.all_reduce(bucket.array, op="avg", order="rank", out=bucket.array)


# -- comparisons ----------------------------------------------------------------------------------

# Setup -> transport and number of ranks -> outcome.
_Found = dict[Setup, dict[tuple[str, int], _Trained]]


def _apart(a: Mapping[str, Array], b: Mapping[str, Array]) -> float:
    """Return the largest difference of two models' weights; NaN if there is a NaN."""
    return float(np.max([np.max(np.abs(a[name] - b[name])) for name in a]))


def _across_frameworks(alone: Mapping[Setup, _Weights]) -> list[dict[str, Any]]:
    rows = []
    for first, trained in alone.items():
        for second, others in alone.items():
            same = (first.model, first.optimizer) == (second.model, second.optimizer)
            if same and first.framework < second.framework:
                allowed = TOLERANCES[first.optimizer]
                what = f"{first.model}, {first.optimizer}: {first.framework} and {second.framework}"
                apart = _apart(trained, others)
                rows.append(row(what, apart, allowed, apart <= allowed))
    return rows


def _against_one(
    setup: Setup, alone: _Weights, runs: Mapping[tuple[str, int], _Trained]
) -> dict[str, Any]:
    worst = float(np.max([_apart(run.weights, alone) for run in runs.values()]))
    allowed = TOLERANCES[setup.optimizer]
    transports = ", ".join(dict.fromkeys(name for name, _ in runs))
    ranks = ", ".join(str(n) for n in sorted({n for _, n in runs}))
    what = f"{setup}: {ranks} ranks over {transports} and one process"
    return row(what, worst, allowed, worst <= allowed)


def _in_rank_order(setup: Setup, runs: Mapping[tuple[str, int], _Trained]) -> dict[str, Any]:
    """Compare the bits over the transports, for each number of ranks."""
    first: dict[int, str] = {}
    strays = [
        f"{name} on {size} ranks" for (name, size), run in runs.items()
        if first.setdefault(size, run.ordered) != run.ordered
    ]  # fmt: skip
    what = f"{setup}, order='rank': {', '.join(dict.fromkeys(name for name, _ in runs))}"
    text = f"other bits: {', '.join(strays)}" if strays else ""
    return row(what, None, None, not strays, text)


def _on_shards(
    setup: Setup, shards: int, runs: Mapping[tuple[str, int], _Trained]
) -> dict[str, Any]:
    """Compare the bits over all transports and numbers of ranks."""
    digests = {
        f"{size} ranks over {name}" if size > 1 else "1 rank": run.of_shards
        for (name, size), run in runs.items()
    }
    what = f"{setup}: {shards} shards on {', '.join(digests)}"
    values = set(digests.values())
    same = len(values) == 1 and " / " not in next(iter(values))
    text = "; ".join(f"{where}: {digest}" for where, digest in digests.items())
    return row(what, None, None, same, next(iter(values)) if same else text)
