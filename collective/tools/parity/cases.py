"""The cases to compare: each is a call of the public API on arrays of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from collective import DtypeError, ReduceOp
from collective.algorithms.arithmetic import check as check_op
from collective.inner import BY_NAME
from collective.ops import NAMES

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
class Case:
    """Call, made twice, with other numbers and another root: for a new array, then with ``out=``.

    Attributes:
        operation: one of :data:`OPERATIONS`.
        shape: shape of each rank's array.
        dtype: name of the dtype.
        steps: distance of neighbouring elements along each axis of the larger array that each array
            is a view of. Empty for contiguous arrays.
        op: one of :data:`OPS`, if the call reduces.
        order: ``"rank"`` or None.
        frameworks: names of frameworks; rank r uses entry ``r % len(frameworks)``.
        seed: seed of the numbers.
        shape_class: shape class in the matrix.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    steps: tuple[int, ...] = ()
    op: str = "sum"
    order: str | None = None
    frameworks: tuple[str, ...] = ("numpy",)
    seed: int = 0
    shape_class: str = ""

    @property
    def framework(self) -> str:
        """Name of the framework, or ``"mixed"``."""
        return self.frameworks[0] if len(set(self.frameworks)) == 1 else "mixed"

    def root(self, turn: int, size: int) -> int:
        """Return the root of a turn."""
        return (1 + turn) % size

    def title(self) -> str:
        """Return the case as text, such as ``all_reduce(sum) of numpy float32[3, 5]``."""
        options = [] if self.operation not in REDUCTIONS else [self.op]
        options += [f"order={self.order!r}"] if self.order else []
        chosen = f"({', '.join(options)})" if options else ""
        array = f"{self.dtype}{list(self.shape)}"
        array += f" of steps {list(self.steps)}" * any(self.steps)
        return f"{self.operation}{chosen} of {'+'.join(self.frameworks)} {array}"


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
            shape, steps = SHAPES[name]
            model = Case(
                "", shape, dtype, steps, seed=seed, frameworks=tuple(frameworks), shape_class=name
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
