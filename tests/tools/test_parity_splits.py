"""Parity of split models: both frameworks agree with the oracle, and a difference is found."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("chainer") is None:
    pytest.skip("chainer is not installed", allow_module_level=True)

from collective.errors import InvalidArgumentError
from collective.tools.models import torch as of_torch
from collective.tools.parity import splits
from collective.tools.parity.layers import NETWORKS, draw, gradients
from collective.tools.parity.runner import Comparison
from collective.tools.parity.transports import survey


def plan(backend: str, size: int, *frameworks: str) -> Comparison:
    return Comparison(
        transports=survey([backend]), frameworks=list(frameworks), operations=(), ops=(),
        dtypes=(), shapes=(), sizes=(size,),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
def test_compare_splits_of_both_frameworks_with_oracle_passes(backend: str) -> None:
    rows = splits.compare(plan(backend, 3, "torch", "chainer"), lambda text: None)
    assert [row for row in rows if not row["passed"]] == []
    # Each of the two frameworks has four splits computed in turn and four over ranks.
    assert len(rows) == 16


def test_compare_splits_finds_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = of_torch.gradients

    def wrong(layers: Any, arrays: Any, **how: Any) -> Any:
        result = right(layers, arrays, **how)
        if how.get("batch") == 2 and "channels" not in how:
            result["weight 0"] = result["weight 0"] + 1e-10
        return result

    monkeypatch.setattr(of_torch, "gradients", wrong)
    in_turn = replace(plan("threads", 2, "torch"), transports=[])
    rows = splits.compare(in_turn, lambda text: None)
    assert [row["what"] for row in rows if not row["passed"]] == ["torch, batch=2, in turn"]


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_oracle_match_finite_differences(name: str) -> None:
    layers = NETWORKS[name]
    arrays = draw(layers, 0)
    computed = gradients(layers, arrays)
    step = 1e-5
    for key in arrays:
        index = tuple(length // 2 for length in arrays[key].shape)
        losses = []
        for sign in (1, -1):
            moved = {name: array.copy() for name, array in arrays.items()}
            moved[key][index] += sign * step
            losses.append((gradients(layers, moved)["y"] ** 2).sum() / 2)
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx(computed[key][index], rel=1e-5, abs=1e-5), key


def test_require_without_split_framework_raises_invalid_argument() -> None:
    with pytest.raises(InvalidArgumentError, match="--splits: neither torch nor chainer"):
        splits.require(plan("threads", 2, "numpy"))
