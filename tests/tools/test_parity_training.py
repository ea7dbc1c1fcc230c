"""Training parity: a pair of models agrees, or the difference is found."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("chainer") is None:
    pytest.skip("chainer is not installed", allow_module_level=True)

import torch

import collective.adapters.chainer  # noqa: F401  # The adapter makes `import chainer` work.
from collective.errors import InvalidArgumentError, ShapeError
from collective.tools.parity import models
from collective.tools.parity.cases import OPERATIONS
from collective.tools.parity.runner import Comparison
from collective.tools.parity.training import compare
from collective.tools.parity.transports import survey

import chainer  # isort: skip


# -- pairs of models, as for ``collective parity --model`` -----------------------------------------


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fc1 = torch.nn.Linear(5, 8)
        self.fc2 = torch.nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.fc2(torch.tanh(self.fc1(x)))


class ChainerNet(chainer.Chain):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation
        with self.init_scope():
            self.fc1 = chainer.links.Linear(5, 8)
            self.fc2 = chainer.links.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.fc2(self.activation(self.fc1(x)))


def batch(step: int) -> tuple[Any, Any]:
    random = np.random.default_rng(step)
    x = random.standard_normal((12, 5))
    return x, np.stack([x.sum(1), np.sin(x[:, 0])], 1)


def make_alike() -> tuple[Any, ...]:
    return TorchNet(), ChainerNet(chainer.functions.tanh), batch


def make_unlike() -> tuple[Any, ...]:
    return TorchNet(), ChainerNet(chainer.functions.sigmoid), batch


class NoisyNet(TorchNet):
    """Network whose kernels round differently each time, as kernels of several threads may."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (1 + 1e-15 * np.random.default_rng().integers(100))


def make_noisy() -> tuple[Any, ...]:
    return NoisyNet(), ChainerNet(chainer.functions.tanh), batch


# -- comparisons -----------------------------------------------------------------------------------


def say_nothing(line: str) -> None:
    """Show no progress."""


def plan(*backends: str) -> Comparison:
    return Comparison(
        transports=survey(backends), frameworks=["numpy", "torch", "chainer"],
        operations=OPERATIONS, ops=(), dtypes=(), shapes=(), sizes=(2,),
    )  # fmt: skip


def test_compare_of_equal_models_passes() -> None:
    rows = compare(plan("threads", "shm"), 5, f"{__name__}:make_alike", None, say_nothing)
    assert [row["what"] for row in rows if not row["passed"]] == []
    text = " ".join(row["what"] for row in rows)
    for words in ("torch: 1, 2 ranks over threads, shm", "chainer and torch", "order='rank'"):
        assert words in text.replace("torch and chainer", "chainer and torch")
    assert sum("order='rank'" in row["what"] for row in rows) == 4
    assert all(row["difference"] > 0 for row in rows if "one process" in row["what"])


def test_compare_of_unequal_models_fails() -> None:
    rows = compare(plan("threads"), 3, f"{__name__}:make_unlike", None, say_nothing)
    failed = [row for row in rows if not row["passed"]]
    assert {row["what"].partition(":")[2] for row in failed} == {
        ":".join(row["what"].split(":")[1:]) for row in rows if " and " in row["what"][-18:]
        and "one process" not in row["what"]
    }  # fmt: skip
    assert min(row["difference"] for row in failed) > 1e-4


def test_digests_of_shards_are_equal_on_any_number_of_ranks() -> None:
    rows = compare(plan("threads", "shm"), 3, f"{__name__}:make_alike", 4, say_nothing)
    rows = [row for row in rows if "4 shards" in row["what"]]
    assert len(rows) == 4
    assert all(row["passed"] for row in rows)
    assert all(re.fullmatch("[0-9a-f]{16}", row["text"]) for row in rows)
    assert len({row["text"] for row in rows}) == 4
    places = "4 shards on 1 rank, 2 ranks over threads, 2 ranks over shm"
    assert all(row["what"].endswith(places) for row in rows)


def test_digests_of_noisy_kernels_differ() -> None:
    rows = compare(plan("threads"), 2, f"{__name__}:make_noisy", 2, say_nothing)
    rows = [row for row in rows if "2 shards" in row["what"]]
    failed = {row["what"].split(": ")[1][:5]: row["text"] for row in rows if not row["passed"]}
    assert rows
    assert all(row["passed"] == ("chainer" in row["what"]) for row in rows)
    assert all("1 rank: " in text and "2 ranks over threads: " in text for text in failed.values())


def test_digests_of_shards_that_do_not_divide_batch_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="5 shards of a batch of 12 samples"):
        compare(plan("threads"), 1, f"{__name__}:make_alike", 5, say_nothing)


def test_compare_without_model_pair_raises_invalid_argument() -> None:
    with pytest.raises(InvalidArgumentError, match="module:function"):
        compare(plan("threads"), 1, f"{__name__}:missing", None, say_nothing)
    with pytest.raises(InvalidArgumentError, match="a PyTorch module, a"):
        compare(plan("threads"), 1, "os:getcwd", None, say_nothing)


def test_weights_pass_between_frameworks() -> None:
    module, link, _ = make_alike()
    models.put(models.chainer_parameters(link), models.torch_parameters(module))
    assert np.array_equal(link.fc1.W.array, module.fc1.weight.detach().numpy())
    assert np.array_equal(link.fc2.b.array, module.fc2.bias.detach().numpy())
    with pytest.raises(ShapeError, match=r"fc2\.bias"):
        models.put({"fc1.weight": np.ones(3), "fc2.bias": np.ones(2)}, {"fc1.weight": np.ones(3)})
    with pytest.raises(ShapeError, match="shape"):
        models.put({"fc1.weight": np.ones(3)}, {"fc1.weight": np.ones(4)})
