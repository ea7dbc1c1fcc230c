"""Parity of splits: networks computed in pieces, in turn and over ranks, and NumPy's oracle."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.testing.frameworks import framework

from .layers import NETWORKS, draw, gradients
from .runner import Comparison, on_ranks, row

__all__ = ["TOLERANCE", "compare", "require"]

#: Largest difference of a result or a gradient from the oracle's, relative to its largest element.
TOLERANCE = 1e-12

_FRAMEWORKS = ("torch", "chainer")
_IN_TURN: dict[str, dict[str, Any]] = {
    "batch=2": {"batch": 2},
    "channels=2": {"channels": 2},
    "data=(4, 2)": {"data": (4, 2)},
    "batch=2, channels=2, data=(3,)": {"batch": 2, "channels": 2, "data": (3,)},
}
_OVER_RANKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "batch": lambda size: {"batch": size},
    "channels": lambda size: {"channels": size},
    "data": lambda size: {"data": (size,)},
    "data, halo='chain'": lambda size: {"data": (size,), "halo": "chain"},
}


def require(plan: Comparison) -> list[str]:
    """Return the frameworks in which splits are computed.

    Raises:
        InvalidArgumentError: the plan has no such framework.
    """
    chosen = [name for name in plan.frameworks if name in _FRAMEWORKS]
    if not chosen:
        raise InvalidArgumentError("--splits: neither torch nor chainer is among the frameworks.")
    return chosen


def compare(plan: Comparison, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Compute the networks in every framework, in turn and over every transport.

    Args:
        plan: the transports, frameworks, numbers of ranks and the seed.
        say: called with a text about the current computation.

    Returns:
        A row for each comparison: ``what``, ``passed``, ``difference`` and ``allowed``.
    """
    rows: list[dict[str, Any]] = []
    frameworks = require(plan)
    for name in frameworks:
        say(f"splits: {name} in turn")
        found = _differences(None, name, plan.seed)
        rows += [_row(f"{name}, {how}, in turn", apart) for how, apart in found.items()]
    for name, size, ranks in on_ranks(
        plan, "splits", say, rows, _on_a_rank, frameworks, plan.seed, alone=False
    ):
        for how in ranks[0]:
            worst = float(np.max([differences[how] for differences in ranks]))
            rows.append(_row(f"{how}, over {name} on {size} ranks", worst))
    return rows


def _on_a_rank(comm: Communicator, frameworks: list[str], seed: int) -> dict[str, float]:
    differences = {}
    for name in frameworks:
        for how, apart in _differences(comm, name, seed).items():
            differences[f"{name}, {how}"] = apart
    return differences


def _differences(comm: Communicator | None, name: str, seed: int) -> dict[str, float]:
    """Return the largest difference from the oracle, for each way to split."""
    framework(name).settle(0 if comm is None else comm.rank)
    module = importlib.import_module(f"collective.tools.models.{name}")
    if comm is None:
        ways = _IN_TURN
    else:
        ways = {how: {**make(comm.size), "comm": comm} for how, make in _OVER_RANKS.items()}
    worst = dict.fromkeys(ways, 0.0)
    for layers in NETWORKS.values():
        arrays = draw(layers, seed)
        right = gradients(layers, arrays)
        for how, options in ways.items():
            found = module.gradients(layers, arrays, **options)
            # np.maximum keeps NaN, which Python's max() could lose.
            worst[how] = float(np.maximum(worst[how], _apart(found, right)))
    return worst


def _apart(found: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    if found.keys() != right.keys():
        return float("inf")
    if any(found[name].shape != right[name].shape for name in right):
        return float("inf")
    return float(
        np.max([np.max(abs(found[name] - x)) / np.max(abs(x)) for name, x in right.items()])
    )


def _row(what: str, difference: float) -> dict[str, Any]:
    return row(what, difference, TOLERANCE, difference <= TOLERANCE)
