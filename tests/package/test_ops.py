"""Operators: names, arguments, printing and comparison."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from collective.errors import InvalidArgumentError
from collective.ops import NAMES, ReduceOp, as_op, premul_sum, user_op

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", NAMES)
def test_as_op_of_name_returns_operator(name: str) -> None:
    op = as_op(name)
    assert (op.name, str(op)) == (name, name)
    assert as_op(name) is op
    assert as_op(op) is op
    assert op.commutative


@pytest.mark.parametrize("given", ["summ", "", "premul_sum", "user", None, 3, np.add, ["sum"]])
def test_as_op_of_other_object_lists_operators(given: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is not a reduction; one of sum, prod, .*lor"):
        as_op(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0.5, 3, -0.0, np.float32(0.25), np.int8(2), 1e300])
def test_premul_sum_keeps_its_factor(factor: float) -> None:
    op = premul_sum(factor)
    assert op.factor == factor
    assert type(op.factor) is float
    assert str(op) == f"premul_sum({float(factor)!r})"


@pytest.mark.parametrize("factor", [True, "2", None, 1j, np.complex64(2), np.array(2.0), [2.0]])
def test_premul_sum_of_non_real_factor_raises_invalid_argument(factor: object) -> None:
    with pytest.raises(InvalidArgumentError, match="not a real number"):
        premul_sum(factor)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan, np.float32("inf"), 10**400])
def test_premul_sum_of_non_finite_factor_raises_invalid_argument(factor: float) -> None:
    with pytest.raises(InvalidArgumentError, match="not finite"):
        premul_sum(factor)


def test_user_op_prints_name_of_function() -> None:
    def blend(a: object, b: object) -> object:
        return a

    assert str(user_op(blend)) == "user_op(blend)"
    assert str(user_op(np.hypot)) == "user_op(hypot)"


def test_user_op_of_callable_object_prints_name_of_class() -> None:
    class Blend:
        def __call__(self, a: object, b: object) -> object:
            return a

    assert str(user_op(Blend())) == "user_op(Blend)"  # type: ignore[arg-type]


@pytest.mark.parametrize("commutative", [False, True])
def test_user_op_is_not_commutative_by_default(commutative: bool) -> None:
    assert user_op(np.add, commutative=commutative).commutative is commutative
    assert user_op(np.add).commutative is False


@pytest.mark.parametrize("function", [None, "sum", 3])
def test_user_op_of_non_callable_raises_invalid_argument(function: object) -> None:
    with pytest.raises(InvalidArgumentError, match="not callable"):
        user_op(function)  # type: ignore[arg-type]


def test_user_ops_are_equal_only_if_functions_are() -> None:
    assert user_op(np.add) == user_op(np.add)
    assert user_op(lambda a, b: a) != user_op(lambda a, b: b)


def test_operators_of_equal_functions_of_other_values_differ() -> None:
    @dataclass(frozen=True)
    class Blend:
        name: str
        share: float = field(compare=False)

        def __call__(self, a: Any, b: Any) -> Any:
            return a + self.share * b

    half, third = Blend("blend", 1 / 2), Blend("blend", 1 / 3)
    assert half == third
    assert user_op(half) != user_op(third)
    assert user_op(half) == user_op(half)
    assert user_op(half.__call__) == user_op(half.__call__)


def test_operator_of_unhashable_function_has_a_hash() -> None:
    @dataclass
    class Blend:
        share: float

        def __call__(self, a: Any, b: Any) -> Any:
            return a + self.share * b

    blend = Blend(1 / 2)
    assert {user_op(blend): 1}[user_op(blend)] == 1


def test_premul_sums_of_both_zeros_differ() -> None:
    assert premul_sum(0.0) != premul_sum(-0.0)
    assert premul_sum(2) == premul_sum(2.0)
    assert hash(premul_sum(2)) == hash(premul_sum(2.0))


def test_operator_is_immutable() -> None:
    with pytest.raises(AttributeError):
        as_op("sum").name = "prod"  # type: ignore[misc]


def test_named_operators_survive_pickle() -> None:
    assert pickle.loads(pickle.dumps(as_op("max"))) == ReduceOp("max")
