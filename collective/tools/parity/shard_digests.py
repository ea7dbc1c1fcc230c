"""Digests of weights that were trained on virtual shards, for each number of ranks.

The library folds the shards alike on any number of ranks. If the digests differ nevertheless, a
framework's kernels on this machine round differently from rank to rank or from run to run.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.testing.frameworks import framework

from . import weights
from .runner import Comparison, on_ranks, row
from .training import Setup, make, setups_of

__all__ = ["compare_digests"]


def compare_digests(
    plan: Comparison, steps: int, model: str | None, total: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Train on ``total`` shards in every framework, over every transport; compare the bits.

    Args:
        plan, steps, model, say: as for :func:`.training.compare`.
        total: number of shards. It must divide the number of samples in a batch.

    Returns:
        A row for each training, as from :func:`.training.compare`, whose ``text`` has the digest of
        the weights, or the digest for each transport and number of ranks if they differ.

    Raises:
        InvalidArgumentError: the shards do not divide a batch.
    """
    rows: list[dict[str, Any]] = []
    digests: dict[Setup, dict[str, str]] = {}
    with setups_of(plan, steps, model) as setups:
        for setup in setups:
            _batches(setup, total)
        what = f"training of {total} shards"
        for name, size, found in on_ranks(plan, what, say, rows, _digests_on_ranks, setups, total):
            where = f"{size} ranks over {name}" if size > 1 else "1 rank"
            for nth, setup in enumerate(setups):
                of_ranks = list(dict.fromkeys(one[nth] for one in found))
                digests.setdefault(setup, {})[where] = " / ".join(of_ranks)
    return rows + [_agreement(setup, total, by_place) for setup, by_place in digests.items()]


def _digests_on_ranks(comm: Communicator, setups: Sequence[Setup], total: int) -> list[str]:
    """Train each setup; return the digest of this rank's weights."""
    digests = []
    for setup in setups:
        framework(setup.framework).settle(comm.rank)
        module = importlib.import_module(f"collective.tools.models.{setup.framework}")
        trained = module.train_shards(
            comm, make(setup.model, setup.framework), weights.load(setup.start), setup.optimizer,
            _batches(setup, total), total,
        )  # fmt: skip
        digest = hashlib.sha256()
        for name in sorted(trained):
            digest.update(trained[name].tobytes())
        digests.append(digest.hexdigest()[:16])
    return digests


def _batches(setup: Setup, total: int) -> list[list[tuple[Any, Any]]]:
    """Return for each step the inputs and targets of each shard."""
    data = np.load(setup.data)
    length = data["y"].shape[1]
    if length % total:
        raise InvalidArgumentError(
            f"--shards: {total} shards of a batch of {length} samples; expected a divisor of "
            f"{length}."
        )
    return [list(zip(np.split(x, total), np.split(y, total))) for x, y in zip(data["x"], data["y"])]


def _agreement(setup: Setup, total: int, digests: dict[str, str]) -> dict[str, Any]:
    values = set(digests.values())
    what = f"{setup.model}, {setup.optimizer}, {setup.framework}: {total} shards on "
    same = len(values) == 1 and " / " not in next(iter(values))
    text = "; ".join(f"{where}: {digest}" for where, digest in digests.items())
    return row(what + ", ".join(digests), None, None, same, next(iter(values)) if same else text)
