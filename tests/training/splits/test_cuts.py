"""Modules and links computed in pieces, in turn or over ranks, compared with the unsplit ones.

Properties of a single framework are tested in adapters/torch/test_splits.py and
adapters/chainer/test_splits.py.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import collective
from collective.testing import run_ranks
from tests.support.split_frameworks import CLOSE, far, of, one_thread

__all__ = ["of", "one_thread"]  # fixtures

NAMES = ("unet", "resized", "vgg", "batch norm", "group norm", "instance norm")

Outcome = list[np.ndarray[Any, Any]]


def whole(of: ModuleType, name: str) -> Outcome:
    module, x = of.made(name)
    outcome: Outcome = of.outcome(module, x, module)
    return outcome


def layers(of: ModuleType, seed: int, count: int) -> Iterator[tuple[Any, Any]]:
    """Yield random convolutions, plain and transposed, with one to three data axes, and inputs."""
    of.seed(seed)
    chance = random.Random(seed)
    while count:
        axes, groups = chance.randint(1, 3), chance.choice([1, 1, 2, 4])

        def lengths(most: int, least: int = 1, axes: int = axes) -> tuple[int, ...]:
            return tuple(chance.randint(least, most) for _ in range(axes))

        how = {
            "stride": lengths(4),
            "dilation": lengths(3),
            "padding": lengths(4, 0),
            "groups": groups,
        }
        layer = of.convolution(chance, lengths(5), **how)
        x = of.inputs(2, 4, *lengths(14 if axes < 3 else 7, 2))
        if of.fits(layer, x):
            count -= 1
            yield layer, x


# -- in turn ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize(
    "how",
    [
        {"data": (5,)},
        {"data": (4, 3)},
        {"data": (40,)},
        {"batch": 2},
        {"channels": 3},
        {"batch": 2, "channels": 3, "data": (3, 2)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_split_in_turn_matches_whole_model(
    of: ModuleType, name: str, how: dict[str, Any], recompute: bool
) -> None:
    module, x = of.made(name)
    split = of.Split(module, recompute=recompute, **how)
    assert far(of.outcome(module, x, split), whole(of, name)) < CLOSE
    assert not split.joined


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(6))
def test_split_in_turn_of_random_layers_matches_whole(of: ModuleType, seed: int) -> None:
    chance = random.Random(seed)
    for layer, x in layers(of, seed, 30):
        expected = of.outcome(layer, x, layer)
        # Inputs with three data axes are short, so three pieces are often more than there are rows.
        # Nine pieces along each of three axes would take most of the time of this test.
        axes = x.ndim - 2
        how = {
            "data": tuple(chance.randint(1, 9 if axes < 3 else 3) for _ in range(axes)),
            "channels": chance.randint(1, 3),
            "batch": chance.randint(1, 2),
            "recompute": chance.random() < 0.5,
        }
        outcome = of.outcome(layer, x, of.Split(layer, **how))
        assert far(outcome, expected) < CLOSE, (layer, x.shape, how)


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(4))
def test_split_in_turn_of_random_towers_matches_whole(of: ModuleType, seed: int) -> None:
    of.seed(seed)
    chance = random.Random(seed)
    for _ in range(8):
        tower, x = of.tower(chance), of.inputs(2, 4, 12, 11)
        how = {
            "channels": chance.randint(2, 6),
            "data": chance.choice([(1,), (3,), (2, 2)]),
            "recompute": chance.random() < 0.7,
        }
        outcome = of.outcome(tower, x, of.Split(tower, **how))
        assert far(outcome, of.outcome(tower, x, tower)) < CLOSE, (tower, how)


@pytest.mark.parametrize(("name", "most"), [("apart", 0.3), ("pooled", 0.5)])
def test_split_of_separate_channels_does_not_keep_them(
    of: ModuleType, name: str, most: float
) -> None:
    module, x = of.made(name)
    assert of.Split(module, channels=4).memory_report(x).ratio < most
    outcome = of.outcome(module, x, of.Split(module, channels=4))
    assert far(outcome, of.outcome(module, x, module)) < CLOSE


@pytest.mark.parametrize("how", [{"data": (3,)}, {"channels": 2}, {"batch": 2}], ids=str)
def test_split_dropout_uses_mask_of_whole_model(of: ModuleType, how: dict[str, Any]) -> None:
    module, x = of.made("dropout")
    of.seed(3)
    expected = of.outcome(module, x, module)
    of.seed(3)
    assert far(of.outcome(module, x, of.Split(module, **how)), expected) < CLOSE


def test_split_joins_array_for_function_without_rule(of: ModuleType) -> None:
    module, x = of.made("sorted")
    split = of.Split(module, data=(3,))
    assert far(of.outcome(module, x, split), of.outcome(module, x, module)) == 0
    assert [name.endswith(f"({of.WITHOUT_A_RULE})") for name in split.joined] == [True]
    split = of.Split(module, data=(3,), strict=True)
    with pytest.raises(collective.UnsupportedError, match=rf"\({of.WITHOUT_A_RULE}\).*strict"):
        split(x)


# -- over ranks ------------------------------------------------------------------------------


def _on_a_rank(
    comm: collective.Communicator, of: ModuleType, module: Any, x: Any, how: dict[str, Any]
) -> Outcome:
    module = copy.deepcopy(module)  # ranks are threads here
    outcome: Outcome = of.outcome(module, x, of.Split(module, comm=comm, **how))
    return outcome


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (2, {"data": (2,)}),
        (3, {"data": (1, 3)}),
        (4, {"data": (2, 2)}),
        (3, {"channels": 3}),
        (3, {"batch": 3}),  # the batch has two samples, so one rank has none
        (4, {"batch": 2, "data": (2,)}),
        (8, {"batch": 2, "channels": 2, "data": (2,)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_split_over_ranks_matches_whole_model(
    of: ModuleType, name: str, size: int, how: dict[str, Any]
) -> None:
    expected = whole(of, name)
    for outcome in run_ranks(size, _on_a_rank, of, *of.made(name), how):
        assert far(outcome, expected) < CLOSE


@pytest.mark.parametrize("seed", range(3))
def test_split_over_ranks_of_random_layers_matches_whole(of: ModuleType, seed: int) -> None:
    chance = random.Random(seed)
    for layer, x in layers(of, seed + 50, 12):
        size = chance.choice([2, 3, 4])
        how = chance.choice([{"data": (size,)}, {"channels": size}])
        expected = of.outcome(layer, x, layer)
        for outcome in run_ranks(size, _on_a_rank, of, layer, x, how):
            assert far(outcome, expected) < CLOSE, (layer, x.shape, size, how)


@pytest.mark.parametrize("seed", range(2))
def test_split_over_ranks_of_random_towers_matches_whole(of: ModuleType, seed: int) -> None:
    of.seed(seed)
    chance = random.Random(seed)
    for _ in range(6):
        tower, x = of.tower(chance), of.inputs(2, 4, 12, 11)
        size = chance.choice([2, 3, 4])
        expected = of.outcome(tower, x, tower)
        for outcome in run_ranks(size, _on_a_rank, of, tower, x, {"channels": size}):
            assert far(outcome, expected) < CLOSE, (tower, size)


def _messages(comm: collective.Communicator, of: ModuleType) -> list[str]:
    module, x = of.made("apart")
    split = of.Split(module, channels=2, comm=comm)
    operations: list[str] = []
    remove = comm.hook(before=lambda event: operations.append(event.operation))
    y = split(x)
    remove()
    del y
    return operations


def test_split_of_separate_channels_does_not_exchange_them(of: ModuleType) -> None:
    # In Chainer, the ranks compare their parameters first. The last call sums the last layer's
    # results of each rank's channels.
    calls = 2 if of.__name__.endswith("chainer") else 1
    for operations in run_ranks(2, _messages, of):
        assert operations == ["all_reduce"] * calls


def _pieces(comm: collective.Communicator, of: ModuleType, module: Any, x: Any) -> Outcome:
    module = copy.deepcopy(module)
    # These pieces differ from the library's own.
    mine, rows = [(slice(15), slice(11)), (slice(15, None), slice(11, None))][comm.rank]
    split = of.Split(module, data=(2,), comm=comm, inputs="pieces", outputs="pieces")
    outcome: Outcome = of.outcome(module, x[:, :, mine], split, (2, 1, 21, 18), rows)
    return outcome


def test_split_accepts_and_returns_pieces(of: ModuleType) -> None:
    y, x_gradient, *gradients = whole(of, "unet")
    ranks = run_ranks(2, _pieces, of, *of.made("unet"))
    assert far([np.concatenate([outcome[0] for outcome in ranks], 2)], [y]) < CLOSE
    assert far([np.concatenate([outcome[1] for outcome in ranks], 2)], [x_gradient]) < CLOSE
    for _, _, *outcome in ranks:
        assert far(outcome, gradients) < CLOSE


def _masks(comm: collective.Communicator, of: ModuleType) -> Any:
    module, _ = of.made("mask")
    x = np.ones((1, 1, 64, 2))
    y, *_ = of.outcome(module, of.array(x), of.Split(module, data=(2,), comm=comm))
    return y


def test_split_over_ranks_uses_one_dropout_mask(of: ModuleType) -> None:
    first, second = run_ranks(2, _masks, of)
    np.testing.assert_array_equal(first, second)
    assert set(np.unique(first)) == {0.0, 2.0}


# -- reports ---------------------------------------------------------------------------------


def test_verify_of_correct_split_reports_no_difference(of: ModuleType) -> None:
    verification = of.Split(of.single("batch norm"), data=(3,)).verify(of.made("batch norm")[1])
    assert verification
    assert verification.largest < 1e-9


def test_verify_names_first_differing_layer(of: ModuleType) -> None:
    module, x = of.made("differing")
    verification = of.Split(module, data=(2,)).verify(x)
    assert not verification
    assert re.search(r"the output of \S+ \(Differing\) is the first", str(verification))


@pytest.mark.parametrize(
    ("how", "most"), [({"batch": 2}, 1), ({"channels": 2}, 1), ({"data": (4,)}, 1.3)], ids=str
)
def test_split_padding_keeps_no_copy(of: ModuleType, how: dict[str, Any], most: float) -> None:
    split = of.Split(of.padding(), recompute=False, **how)
    assert split.memory_report(of.inputs(2, 1, 32, 32)).ratio <= most  # includes overlapping rows


# -- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"data": (0,)}, r"data=\(0,\), expected a sequence of positive integers"),
        ({"channels": 0}, "channels=0, expected a positive integer"),
        ({"batch": 1.5}, "batch=1.5, expected a positive integer"),
        ({"batch": True}, "batch=True, expected a positive integer"),
        ({"data": 2}, r"data=2, expected a sequence.*pass data=\(2,\)"),
        ({"data": "2"}, "data='2', expected a sequence"),
        ({"data": ()}, r"data=\(\), expected a sequence"),
        ({"inputs": "pieces"}, "without comm"),
        ({"filters": "own"}, "without comm"),
        ({"filters": "mine"}, "one of all, own"),
    ],
    ids=str,
)
def test_split_with_bad_options_raises_invalid_argument(
    of: ModuleType, how: dict[str, Any], text: str
) -> None:
    with pytest.raises(collective.InvalidArgumentError, match=text):
        of.Split(of.made("unet")[0], **how)


@pytest.mark.parametrize("how", [{"data": (2,)}, {"channels": 2}, {"batch": 2}], ids=str)
def test_split_of_wrong_channels_names_both_numbers(of: ModuleType, how: dict[str, Any]) -> None:
    module, _ = of.made("pairs")
    expected = r"the input has 3 channels \(expected 1, as the weights of shape \(6, 1, 3, 3\) read"
    with pytest.raises(collective.ShapeError, match=expected):
        of.Split(module, **how)(of.inputs(2, 3, 10, 10))


def test_split_of_wrong_channels_between_layers_raises_shape_error(of: ModuleType) -> None:
    # Each part of the channels alone would fit a part of the weights.
    with pytest.raises(collective.ShapeError, match=r"the input has 4 channels \(expected 5"):
        of.Split(of.unfitting(), channels=2)(of.inputs(2, 1, 10, 10))


def test_split_of_wrong_channels_in_normalisation_raises(of: ModuleType) -> None:
    with pytest.raises(Exception, match=r"(?s)6.*4"):  # Chainer's own type check, or ShapeError
        of.Split(of.norm(4), data=(2,))(of.inputs(2, 6, 10, 10))


def test_split_of_input_smaller_than_window_raises_shape_error(of: ModuleType) -> None:
    module, _ = of.made("pairs")
    with pytest.raises(collective.ShapeError, match=r"data axis 1 has 2 rows \(expected enough"):
        of.Split(module, data=(2,))(of.inputs(2, 1, 10, 2))
