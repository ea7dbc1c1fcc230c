"""A rank's part of the comparison: make the calls of a case, and compare with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import collective
from collective import Communicator, UnsupportedError
from collective.inner import BY_NAME, ArrayFramework, framework
from collective.testing.samples import spread, told

from . import oracle
from .cases import REDUCTIONS, ROOTED, Case

Array = np.ndarray[Any, Any]

# Filler for memory that a call must not write to.
_GUARD = 7


class Difference(AssertionError):
    """Difference between a result and the oracle's; the text says where."""

    def __init__(self, text: str, error: float = float("inf"), bound: float = 0.0) -> None:
        super().__init__(text)
        self.error = error
        self.bound = bound


@dataclass(frozen=True)
class Verdict:
    """Outcome of a case on one rank.

    Attributes:
        status: ``"passed"``, ``"failed"`` or ``"unsupported"`` (refused by the library, with
            UnsupportedError).
        error: largest error, in units in the last place; see
            :mod:`collective.tools.parity.oracle`.
        bound: largest error that is allowed.
        text: description of the failure, or why the case is not supported.
    """

    status: str
    error: float = 0.0
    bound: float = 0.0
    text: str = ""


def prepare(comm: Communicator, names: Sequence[str]) -> None:
    """Import the frameworks, which takes seconds."""
    for name in names:
        framework(name).settle(comm.local_rank)


def run_case(comm: Communicator, case: Case) -> Verdict:
    """Make the calls of a case, and return this rank's outcome.

    Collective: every rank calls it with the same case. If a call fails, the rank raises. Then the
    other ranks get an error, too, and so does the caller that started the ranks.
    """
    try:
        return _turns(comm, case)
    except UnsupportedError as error:
        # Each rank refuses the call by itself, before anything is sent.
        return Verdict("unsupported", text=str(error))


def _turns(comm: Communicator, case: Case) -> Verdict:
    errors = []
    wrong: Difference | None = None
    for turn in range(2):
        try:
            errors.append(_turn(comm, case, turn))
        except Difference as difference:
            # Other ranks may have got the right result and make the next call, so go on.
            wrong = wrong or difference
    if wrong is not None:
        return Verdict("failed", wrong.error, wrong.bound, str(wrong))
    return Verdict("passed", *max(errors, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0))


def _turn(comm: Communicator, case: Case, turn: int) -> tuple[float, float]:
    """Make one call; return its largest error, and the bound of that error."""
    kind = framework(case.frameworks[comm.rank % len(case.frameworks)])
    stored = oracle.input_of(case, comm.rank, turn)
    wanted = oracle.reference(case, comm.rank, comm.size, turn)
    x = lay_out(kind, stored, case.dtype, case.steps)
    out = None
    # A call cannot write to arrays that never change, so these ranks pass outputs of NumPy's.
    target = framework("numpy") if kind.immutable else kind
    if turn and wanted is not None:
        steps = case.steps if len(case.steps) == len(wanted.shape) else ()
        out = lay_out(target, _blank(wanted.shape, case.dtype), case.dtype, steps)
    found = call(comm, case, x, out, turn)
    what = f"rank {comm.rank}, {case.title()}, turn {turn}"
    if wanted is None:
        if found is not None:
            raise Difference(f"{what}: got {type(found).__name__}; only the root gets a result")
    elif out is not None and found is not out:
        raise Difference(f"{what}: the result is not out")
    if _differ(kind.read(x), stored).any():
        raise Difference(f"{what}: the input of dtype {case.dtype} was changed")
    if wanted is None:
        return 0.0, 0.0
    return _judge(kind if out is None else target, found, wanted, case.dtype, what)


def lay_out(kind: ArrayFramework, array: Array, dtype: str, steps: tuple[int, ...]) -> Any:
    """Return an array of a framework with the contents of ``array`` and steps between elements."""
    if not steps:
        return kind.make(np.ascontiguousarray(array).reshape(array.shape), dtype, ())
    whole, part = spread(array, steps, _GUARD)
    return kind.make(whole, dtype, part)


def _blank(shape: tuple[int, ...], dtype: str) -> Array:
    return np.full(shape, _GUARD, BY_NAME[dtype].storage)


# -- the calls ----------------------------------------------------------------------------------


def keep_right(a: Array, b: Array) -> Array:
    """Return ``b``; this operator is associative but does not commute."""
    return b


def operator(op: str, rank: int) -> Any:
    """Return the ``op=`` that ``rank`` passes."""
    if op == "premul_sum":
        return collective.premul_sum(oracle.factor(rank))
    return collective.user_op(keep_right) if op == "user" else op


def call(comm: Communicator, case: Case, x: Any, out: Any, turn: int) -> Any:
    """Make the call of a case, and return its result."""
    options: dict[str, Any] = {} if out is None else {"out": out}
    if case.operation in ROOTED:
        options["root"] = case.root(turn, comm.size)
    if case.operation in REDUCTIONS:
        options["op"] = operator(case.op, comm.rank)
        if case.order is not None:
            options["order"] = case.order
    if case.operation not in ("sendrecv", "send_recv"):
        return getattr(comm, case.operation)(x, **options)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    # send and recv do not work with the rank itself.
    if case.operation == "sendrecv" or comm.size == 1:
        return comm.sendrecv(x, right, left, tag=3, **options)
    # Send to the next rank in the background, and receive from the one before.
    work = comm.send(x, right, async_op=True)
    found = comm.recv(out, left, like=x)
    work.wait()
    return found


# -- the comparison -------------------------------------------------------------------------------


def _judge(
    kind: ArrayFramework, x: Any, wanted: oracle.Reference, dtype: str, what: str
) -> tuple[float, float]:
    if not kind.owns(x):
        raise Difference(f"{what}: got {type(x).__name__}; expected an array of {kind.name}")
    if kind.dtype_of(x) != dtype:
        raise Difference(f"{what}: dtype {kind.dtype_of(x)}; expected {dtype}")
    if tuple(x.shape) != wanted.shape:
        raise Difference(f"{what}: shape {tuple(x.shape)}; expected {wanted.shape}")
    return _errors(kind.read(x), wanted, dtype, what), wanted.bound


def _errors(found: Array, reference: oracle.Reference, dtype: str, what: str) -> float:
    """Return the largest error in ULP.

    Raises:
        Difference: an error is beyond the bound.
    """
    if not found.size:
        return 0.0
    if reference.bits is not None:
        wrong = _differ(found, reference.bits)
        if not wrong.any():
            return 0.0
        errors = np.where(wrong, np.inf, 0.0)
        expected = oracle.decoded(reference.bits, dtype)
    else:
        assert reference.value is not None
        assert reference.magnitude is not None
        expected, low = reference.value
        with np.errstate(invalid="ignore", over="ignore"):
            apart = (oracle.decoded(found, dtype) - expected) - low
            size = np.hypot(apart[..., 0], apart[..., 1]) if found.dtype.kind == "c" else abs(apart)
            errors = size / oracle.ulp(reference.magnitude, dtype)
        wrong = ~(errors <= reference.bound)
        if not wrong.any():
            return float(errors.max())
    largest = float(np.where(np.isnan(errors), np.inf, errors)[wrong].max())
    allowed = f"up to {largest:.3g} ULP off; {reference.bound:.3g} allowed"
    raise Difference(
        f"{what}: {told(wrong, oracle.decoded(found, dtype), expected)} "
        f"({allowed if reference.bits is None else 'must be exact'})",
        largest,
        reference.bound,
    )


def _differ(found: Array, wanted: Array) -> Array:
    """Tell which elements have different bits: NaN equals itself, and -0 is not 0."""
    a, b = _bits(found), _bits(wanted)
    return np.zeros(found.shape, bool) if np.array_equal(a, b) else (a != b).any(-1)


def _bits(array: Array) -> Array:
    """Return an array as unsigned integers: one for each element, two for a complex element.

    They are in a new last axis.
    """
    whole = np.ascontiguousarray(array).reshape(*array.shape, 1)
    return whole.view(f"u{array.real.itemsize}")
