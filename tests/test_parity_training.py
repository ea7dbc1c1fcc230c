"""Training parity: a pair of models agrees, or the difference is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
if importlib.util.find_spec("chainer") is None:
    pytest.skip("chainer is not installed", allow_module_level=True)

from collective.errors import InvalidArgumentError, ShapeError
from collective.tools.parity import weights
from collective.tools.parity.cases import OPERATIONS
from collective.tools.parity.runner import Comparison
from collective.tools.parity.training import compare
from collective.tools.parity.transports import survey


def plan(*backends: str) -> Comparison:
    return Comparison(
        transports=survey(backends), frameworks=["numpy", "torch", "chainer"],
        operations=OPERATIONS, ops=(), dtypes=(), shapes=(), sizes=(2,),
    )  # fmt: skip


def test_a_pair_that_is_alike_agrees() -> None:
    rows = compare(plan("threads", "shm"), 5, "tests.parity_pairs:make_alike", lambda line: None)
    assert [row["what"] for row in rows if not row["passed"]] == []
    text = " ".join(row["what"] for row in rows)
    for words in ("torch: 1, 2 ranks over threads, shm", "chainer and torch", "order='rank'"):
        assert words in text.replace("torch and chainer", "chainer and torch")
    assert sum("order='rank'" in row["what"] for row in rows) == 4
    assert all(row["difference"] > 0 for row in rows if "one process" in row["what"])


def test_a_pair_that_differs_is_found() -> None:
    rows = compare(plan("threads"), 3, "tests.parity_pairs:make_unlike", lambda line: None)
    failed = [row for row in rows if not row["passed"]]
    assert {row["what"].partition(":")[2] for row in failed} == {
        ":".join(row["what"].split(":")[1:]) for row in rows if " and " in row["what"][-18:]
        and "one process" not in row["what"]
    }  # fmt: skip
    assert min(row["difference"] for row in failed) > 1e-4


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="module:function"):
        compare(plan("threads"), 1, "tests.parity_pairs:missing", lambda line: None)
    with pytest.raises(InvalidArgumentError, match="a PyTorch module, a"):
        compare(plan("threads"), 1, "os:getcwd", lambda line: None)


def test_weights_travel_between_frameworks(tmp_path: Path) -> None:
    from tests.parity_pairs import make_alike

    module, link, _ = make_alike()
    path = str(tmp_path / "weights.safetensors")
    weights.save(path, weights.torch_parameters(module))
    weights.put(weights.chainer_parameters(link), weights.load(path))
    assert np.array_equal(link.fc1.W.array, module.fc1.weight.detach().numpy())
    assert np.array_equal(link.fc2.b.array, module.fc2.bias.detach().numpy())
    with pytest.raises(ShapeError, match=r"fc2\.bias"):
        weights.put({"fc1.weight": np.ones(3), "fc2.bias": np.ones(2)}, {"fc1.weight": np.ones(3)})
    with pytest.raises(ShapeError, match="shape"):
        weights.put({"fc1.weight": np.ones(3)}, {"fc1.weight": np.ones(4)})
