"""``collective parity``: the oracle, the bounds, the matrix, the command."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.memory.dtypes import BY_NAME
from collective.testing.frameworks import framework, unavailable
from collective.tools.cli.main import main
from collective.tools.parity import oracle
from collective.tools.parity.cases import (
    DTYPES,
    OPERATIONS,
    OPS,
    SHAPES,
    Case,
    reduces,
)
from collective.tools.parity.oracle import bound, ulp, unit_roundoff
from collective.tools.parity.runner import CaseResult, Comparison, run
from collective.tools.parity.transports import survey
from tests.algorithms.test_arithmetic import NAN, extreme

pytestmark = pytest.mark.whole


def fractions(x: Any, dtype: str) -> list[Fraction]:
    return [Fraction(v) for v in oracle.decoded(np.asarray(x), dtype).ravel().tolist()]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
def test_oracle_is_exact_to_95_bits(op: str, dtype: str) -> None:
    case = Case("all_reduce", (50,), dtype, op=op)
    reference = oracle.reference(case, 0, 5, 0)
    assert reference is not None
    inputs = [fractions(oracle.input_of(case, rank, 0), dtype) for rank in range(5)]
    assert reference.value is not None
    assert reference.magnitude is not None
    for index, (high, low) in enumerate(zip(*(part.tolist() for part in reference.value))):
        terms = [x[index] for x in inputs]
        exact = sum(terms, Fraction()) / (5 if op == "avg" else 1)
        if op == "prod":
            exact = Fraction(1)
            for term in terms:
                exact *= term
        computed = Fraction(high) + Fraction(low)
        scale = Fraction(float(reference.magnitude[index]))
        assert abs(computed - exact) <= scale * Fraction(1, 2**95)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_oracle_complex_products_are_exact_to_90_bits(dtype: str) -> None:
    case = Case("all_reduce", (20,), dtype, op="prod")
    reference = oracle.reference(case, 0, 3, 0)
    assert reference is not None
    assert reference.value is not None
    a, b, c = (fractions(oracle.input_of(case, rank, 0), dtype) for rank in range(3))
    for k in range(20):
        real, imaginary = a[2 * k], a[2 * k + 1]
        for x in (b, c):
            real, imaginary = (
                real * x[2 * k] - imaginary * x[2 * k + 1],
                real * x[2 * k + 1] + imaginary * x[2 * k],
            )
        for part, exact in enumerate((real, imaginary)):
            computed = sum(Fraction(float(half[k, part])) for half in reference.value)
            assert abs(computed - exact) < Fraction(1, 2**90)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bool" and reduces("band", d)])
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_oracle_integers_wrap(op: str, dtype: str) -> None:
    case = Case("all_reduce", (200,), dtype, op=op)
    inputs = [oracle.input_of(case, rank, 0).tolist() for rank in range(3)]
    reference = oracle.reference(case, 0, 3, 0)
    assert reference is not None
    assert reference.bits is not None
    exact = [sum(terms) if op == "sum" else math.prod(terms) for terms in zip(*inputs)]
    low, values = int(np.iinfo(dtype).min), 1 << (8 * np.dtype(dtype).itemsize)
    assert reference.bits.tolist() == [(number - low) % values + low for number in exact]
    assert reference.bits.tolist() != exact


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_oracle_extremes_order_zeros_and_nan(op: str, dtype: str) -> None:
    case = Case("all_reduce", (500,), dtype, op=op)
    unsigned = f"u{BY_NAME[dtype].itemsize}"
    inputs = [oracle.input_of(case, rank, 0).view(unsigned).tolist() for rank in range(3)]
    reference = oracle.reference(case, 0, 3, 0)
    assert reference is not None
    assert reference.bits is not None
    two = functools.partial(extreme, op, dtype)
    expected = [functools.reduce(two, column) for column in zip(*inputs)]
    assert reference.bits.view(unsigned).tolist() == expected
    minus_zero = 1 << (8 * BY_NAME[dtype].itemsize - 1)
    assert {0, minus_zero, NAN[dtype]} <= set(expected)
    on_a_gpu = dataclasses.replace(case, frameworks=("numpy", "cuda"))
    assert np.isfinite(oracle.decoded(oracle.input_of(on_a_gpu, 0, 0), dtype)).all()


def test_bound_grows_with_ranks_and_excludes_narrower_dtype() -> None:
    assert bound("sum", "float32", 1) == 0
    assert bound("sum", "float64", 2) == pytest.approx(1)
    assert bound("avg", "float64", 4) == pytest.approx(4)
    assert bound("sum", "bfloat16", 4) > 3
    assert bound("max", "float32", 4) == bound("sum", "int32", 4) == 0
    assert ulp(np.array([1.0, 1.99, 2.0]), "float32").tolist() == [2.0**-23, 2.0**-23, 2.0**-22]
    assert unit_roundoff("float16") == np.finfo("float16").eps / 2
    # A sum in float32 of float64 arrays is 2**29 units off.
    x, y = np.random.default_rng(0).random((2, 100))
    narrow = (x.astype(np.float32) + y.astype(np.float32)).astype(np.float64)
    assert (abs(narrow - (x + y)) / ulp(x + y, "float64")).max() > 1e6


def outcomes(backend: str, sizes: tuple[int, ...], **options: Any) -> list[CaseResult]:
    defaults: dict[str, Any] = {
        "frameworks": ["numpy"], "operations": OPERATIONS, "ops": OPS, "dtypes": DTYPES,
        "shapes": ["scalar", "empty", "odd", "strided"], "seed": 5, "timeout": 30.0,
    }  # fmt: skip
    results: list[CaseResult] = []
    run(
        Comparison(transports=survey([backend]), sizes=sizes, **(defaults | options)),
        results.append,
        lambda transport, size: None,
    )
    return results


def wrong(results: list[CaseResult]) -> list[str]:
    return [result.text for result in results if result.status != "passed"]


def test_threads_agree_with_oracle() -> None:
    results = outcomes("threads", (1, 3))
    assert wrong(results) == []
    assert {result.case.operation for result in results} == set(OPERATIONS)
    sums = [e for e in results if e.case.dtype == "float32" and e.case.op == "sum" and e.size == 3]
    assert any(0 < result.error <= result.bound for result in sums)


def test_frameworks_agree_with_oracle_alone_and_mixed() -> None:
    names = [n for n in ("numpy", "torch", "chainer") if not unavailable([n])[n]]
    if len(names) < 2:
        pytest.skip("NumPy alone")
    results = outcomes(
        "threads", (3,), frameworks=[*names, "mixed"], shapes=["scalar", "strided"],
        ops=["sum", "max"], dtypes=["bool", "int64", "bfloat16", "float32", "complex64"],
    )  # fmt: skip
    assert wrong(results) == []
    assert {result.case.framework for result in results} == {*names, "mixed"}


def test_shm_agrees_with_oracle() -> None:
    results = outcomes(
        "shm", (2,), shapes=["odd", "large"], ops=["sum", "user"],
        dtypes=["int8", "float16", "float32"],
    )  # fmt: skip
    assert wrong(results) == []


def test_lay_out_makes_arrays_that_read_back_in_each_framework() -> None:
    from collective.tools.parity.execution import lay_out

    for name in ("numpy", "torch", "chainer"):
        kind = framework(name)
        if kind.unavailable():
            continue
        for dtype in sorted(kind.dtypes()):
            for shape, steps in SHAPES.values():
                stored = oracle.values(dtype, shape, 0, "", (1,))
                x = lay_out(kind, stored, dtype, steps)
                assert kind.owns(x)
                assert (kind.dtype_of(x), tuple(x.shape)) == (dtype, shape)
                assert np.array_equal(kind.read(x), stored)


# -- the command ----------------------------------------------------------------------------------


def test_parity_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "parity.json"
    code = main(
        ["parity", "--backend", "threads", "--framework", "numpy", "--op", "all_reduce,gather",
         "--dtype", "float32,int8", "--ranks", "2,3", "--seed", "9", "--json", str(file)]
    )  # fmt: skip
    printed = capsys.readouterr().out
    data = json.loads(file.read_text())
    assert code == data["exit_code"] == 0, printed
    assert (data["seed"], data["ranks"]) == (9, [2, 3])
    assert {row["operation"] for row in data["results"]} == {"all_reduce", "gather"}
    row = next(r for r in data["results"] if (r["dtype"], r["op"]) == ("float32", "sum"))
    assert 0 < row["worst_ulp"] <= row["bound_ulp"]
    assert "all_reduce" in printed
    assert "0 failed" in printed


def test_parity_command_with_wrong_transport_fails(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--framework", "numpy", "--op", "all_reduce", "--dtype", "float32", "--ranks", "2"]
    arguments += ["--shape", "odd", "--backend", "tests.support.broken_transport:Undivided"]
    assert main(["parity", *arguments]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_parity_command_lists_unavailable_transport(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from collective.tools import doctor

    report = {
        "transports": {"gloo": {"works": False, "reason": "no torch", "fix": "pip install x"}}
    }
    monkeypatch.setattr(doctor, "examine", lambda **options: report)
    file = tmp_path / "parity.json"
    arguments = ["--op", "gather", "--ranks", "2", "--framework", "numpy", "--json", str(file)]
    assert main(["parity", "--backend", "gloo,threads", *arguments]) == 0
    assert "not here: gloo: no torch; pip install x" in capsys.readouterr().out
    rows = {
        transport["name"]: transport["available"]
        for transport in json.loads(file.read_text())["transports"]
    }
    assert rows == {"gloo": False, "threads": True}
