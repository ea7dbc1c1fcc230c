"""The first difference between what the ranks describe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import collective
from collective.training.replicas import refuse_differences

COMM: Any = SimpleNamespace(rank=0, size=2)


def _refuse(own: list[Any], expected: list[Any], **options: Any) -> None:
    refuse_differences("step", "parameters", [expected, own], COMM, "Repair it.", **options)


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ([["a", "float32[2]", 1]], "only rank 0 has b"),
        ([["a", "float32[2]", 1], ["b", None, 0], ["c", None, 0]], "only rank 1 has c"),
        ([["b", None, 0], ["a", "float32[2]", 1]], "in their order b of rank 1 stands beside a"),
        ([["a", "float32[3]", 1], ["b", None, 0]], "a is float32[3] on rank 1, but float32[2] on"),
        ([["a", "float32[2]", 1], ["b", "int8[]", 0]], "b is int8[] on rank 1, but without values"),
        ([["a", "float32[2]", 2], ["b", None, 0]], "the values of a differ on rank 1"),
    ],
)
def test_refused_difference_names_the_first_thing(own: list[Any], text: str) -> None:
    with pytest.raises(collective.MismatchError) as caught:
        _refuse(own, [["a", "float32[2]", 1], ["b", None, 0]])
    told = str(caught.value)
    assert told.startswith(f"step: the parameters of rank 1 are not those of rank 0: {text}")
    assert told.endswith("[rank 0 of 2]. Repair it.")


def test_values_that_the_root_fills_are_no_difference() -> None:
    _refuse([["a", None]], [["a", "float32[2]"]], fills=True)
    with pytest.raises(collective.MismatchError, match="a is without values on rank 1"):
        _refuse([["a", None]], [["a", "float32[2]"]])
