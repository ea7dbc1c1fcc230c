"""The cases to compare: each is a call of the public API on arrays of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from collective import DtypeError, ReduceOp
from collective.algorithms.arithmetic import check as check_op
from collective.inner import BY_NAME, nested
from collective.ops import NAMES

__all__ = [
    "DTYPES",
    "MOVES",
    "OPERATIONS",
    "OPS",
    "REDUCTIONS",
    "ROOTED",
    "SHAPES",
    "Case",
    "CaseLeaf",
    "matrix",
    "reduces",
]

#: The calls that compute, and those that only move data.
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan")
MOVES = (
    "broadcast", "scatter", "gather", "all_gather", "all_to_all", "sendrecv", "send_recv",
)  # fmt: skip
OPERATIONS = (*REDUCTIONS, *MOVES)
#: The calls with a root.
ROOTED = ("reduce", "broadcast", "scatter", "gather")
#: The reductions; ``"user"`` stands for a user-defined operator that does not commute.
OPS = (*NAMES, "premul_sum", "user")
DTYPES = tuple(BY_NAME)


@dataclass(frozen=True)
class CaseLeaf:
    """Array of a case.

    Attributes:
        shape: shape of each rank's array, but see :attr:`Case.rows`.
        dtype: name of the dtype.
        steps: distance of neighbouring elements along each axis of the larger array that this
            array is a view of; negative steps go backwards. Empty for a contiguous array.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """Call, made in turns that differ in the root and in the numbers.

    Attributes:
        operation: one of :data:`OPERATIONS`.
        data: a :class:`CaseLeaf`, or a nested list, tuple or dict of them.
        op: one of :data:`OPS`, if the call reduces.
        order: ``"rank"`` or None.
        root: root of the first turn, modulo the number of ranks; each turn has the next root.
        axis: axis along which arrays are cut or joined.
        counts: lengths of the ranks' pieces along ``axis``, if the call cuts; they must add up to
            its length. None cuts as ``numpy.array_split`` does.
        rows: each rank's own length along ``axis``, if the call joins; None for that in the shape.
        frameworks: names of frameworks; rank r uses entry ``r % len(frameworks)``.
        outs: output of each turn: ``"new"``, ``"given"`` (``out=``) or ``"in place"``.
        omitted: whether ranks pass None if only the root's array matters.
        seed: seed of the numbers.
        shape_class: shape class in the matrix.
    """

    operation: str
    data: Any
    op: str = "sum"
    order: str | None = None
    root: int = 0
    axis: int = 0
    counts: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    frameworks: tuple[str, ...] = ("numpy",)
    outs: tuple[str, ...] = ("new", "given")
    omitted: bool = False
    seed: int = 0
    shape_class: str = ""

    @property
    def dtype(self) -> str:
        """Name of the array's dtype, or of the dtypes of the structure."""
        return " ".join(dict.fromkeys(leaf.dtype for leaf in nested.flatten(self.data)))

    @property
    def framework(self) -> str:
        """Name of the framework, or ``"mixed"``."""
        return self.frameworks[0] if len(set(self.frameworks)) == 1 else "mixed"

    def title(self) -> str:
        """Return the case as text, such as ``all_reduce(sum) of numpy float32[3, 5]``."""
        options = [] if self.operation not in REDUCTIONS else [self.op]
        options += [f"order={self.order!r}"] if self.order else []
        options += [f"root={self.root}"] if self.operation in ROOTED else []
        options += [f"axis={self.axis}"] if self.axis else []
        options += [f"counts={list(self.counts)}"] if self.counts is not None else []
        chosen = f"({', '.join(options)})" if options else ""
        arrays = ", ".join(
            f"{leaf.dtype}{list(leaf.shape)}" + (f" of steps {list(leaf.steps)}" * any(leaf.steps))
            for leaf in nested.flatten(self.data)
        )
        return f"{self.operation}{chosen} of {'+'.join(self.frameworks)} {arrays}"


def reduces(op: str, dtype: str) -> bool:
    """Tell whether the library defines ``op`` for ``dtype``, and CPUs support the dtype."""
    made = ReduceOp(op, factor=1.0 if op == "premul_sum" else None)
    try:
        check_op(made, BY_NAME[dtype])
    except DtypeError:
        return False
    return not dtype.startswith("float8")


#: Shape class -> shape and steps. Large is over 1 MiB in four bytes, and not a multiple of any
#: small number.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "scalar": ((), ()),
    "empty": ((0, 3), ()),
    "odd": ((5, 7), ()),
    "strided": ((7, 5), (3, 2)),
    "large": ((300_007,), ()),
}


def matrix(
    operations: Sequence[str],
    ops: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[str],
    frameworks: Sequence[str],
    seed: int,
) -> Iterator[Case]:
    """Yield the fixed cases of one framework, or of several that are mixed.

    Cases that fold the same arrays come one after the other. For large arrays, only some
    reductions are tried, each of which represents others of the same cost.
    """
    reductions = [name for name in operations if name in REDUCTIONS]
    moves = [name for name in operations if name in MOVES]
    for dtype in dtypes:
        for name in shapes:
            data = CaseLeaf(SHAPES[name][0], dtype, SHAPES[name][1])
            model = Case(
                "", data, seed=seed, root=1, frameworks=tuple(frameworks), shape_class=name
            )
            for op in (op for op in ops if reduces(op, dtype)):
                if name == "large" and op not in _LARGE:
                    continue
                for operation in reductions:
                    if operation != "scan" or op != "avg":
                        yield replace(model, operation=operation, op=op)
                    if operation != "scan" and op in _ROUNDED and BY_NAME[dtype].kind in "fc":
                        yield replace(model, operation=operation, op=op, order="rank")
            for operation in moves:
                yield replace(model, operation=operation)


# The reductions for large arrays, and the reductions whose results depend on the order.
_LARGE = ("sum", "avg", "max", "bxor", "user")
_ROUNDED = ("sum", "prod", "avg")
