"""Reports on a split: the memory that it saves, and a comparison with the whole module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Name of a piece that is computed again, in the list of layers.
_PIECE = "one piece, again"
_HEAD = "kept for backward, MiB"


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a forward pass keeps for its backward pass.

    The count includes each array once: arrays that functions save, arrays from which recomputed
    pieces start, and masks. It excludes parameters and the input, which exist in any case.

    Attributes:
        whole: bytes by layer of the unsplit module, in the order of the calls.
        split: bytes by layer of the split module.
        piece: additional bytes while the backward pass computes a piece again, for the piece that
            keeps most; 0 if no piece is computed again.
        joined: names of the calls that took whole arrays, where the cut ends.
        weights: bytes of the parameters, of the unsplit module and of this rank's.
    """

    whole: Mapping[str, int]
    split: Mapping[str, int]
    piece: int = 0
    joined: tuple[str, ...] = ()
    weights: tuple[int, int] = (0, 0)

    @property
    def ratio(self) -> float:
        """Largest number of bytes that the split module keeps, relative to the whole one's."""
        return (sum(self.split.values()) + self.piece) / max(1, sum(self.whole.values()))

    def __str__(self) -> str:
        names = list(dict.fromkeys((*self.whole, *self.split)))
        width = max(map(len, (*names, _HEAD)))
        rows = [(_HEAD, "whole", "split")]
        for name in names:
            rows.append((name, _mib(self.whole.get(name, 0)), _mib(self.split.get(name, 0))))
        if self.piece:
            rows.append((_PIECE, _mib(0), _mib(self.piece)))
        most = sum(self.split.values()) + self.piece
        rows.append(("all", _mib(sum(self.whole.values())), _mib(most)))
        rows.append(("parameters besides", _mib(self.weights[0]), _mib(self.weights[1])))
        lines = [f"{name:<{width}} {whole:>10} {split:>10}" for name, whole, split in rows]
        lines += [f"whole at {name}" for name in self.joined]
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


@dataclass(frozen=True)
class LayerDifference:
    """Difference between one result of a split module and the whole module's.

    Attributes:
        name: name of the layer, the parameter or the input.
        what: ``"output"`` or ``"gradient"``.
        relative: largest difference of elements, divided by the largest element.
    """

    name: str
    what: str
    relative: float


class Computation(NamedTuple):
    """Results of a forward and a backward pass of a module.

    Attributes:
        outputs: name and array of each layer, in the order of the calls.
        gradients: gradients of the input and the parameters, by name.
        joined: names of the calls that took whole arrays.
    """

    outputs: Sequence[tuple[str, Any]]
    gradients: Mapping[str, Any]
    joined: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """Comparison of a split module with the whole one.

    Attributes:
        differences: differences of each layer's output in the order of the calls, then of the
            gradients.
        tolerance: largest relative difference that counts as equal.
        joined: names of the calls that took whole arrays.
    """

    differences: tuple[LayerDifference, ...]
    tolerance: float
    joined: tuple[str, ...] = ()

    @classmethod
    def of(cls, whole: Computation, split: Computation, tolerance: float) -> Verification:
        """Compare the results of a whole module with those of the split one."""
        differences = [
            LayerDifference(name, "output", _apart(a, b))
            for (name, a), (_, b) in zip(whole.outputs, split.outputs, strict=True)
        ]
        differences += [
            LayerDifference(name, "gradient", _apart(gradient, split.gradients[name]))
            for name, gradient in whole.gradients.items()
        ]
        return cls(tuple(differences), tolerance, split.joined)

    @property
    def first(self) -> LayerDifference | None:
        """The first result that differs."""
        return next(
            (entry for entry in self.differences if not entry.relative <= self.tolerance), None
        )

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max((entry.relative for entry in self.differences), default=0.0)

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        if self.first is None:
            return (
                f"{len(self.differences)} outputs and gradients are equal to "
                f"{self.largest:.1e}, relative"
            )
        first = self.first
        return f"the {first.what} of {first.name} is the first that differs: {first.relative:.1e}"


def _apart(a: Any, b: Any) -> float:
    """Return the largest difference of two arrays' elements, divided by the largest element."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape:
        return float("inf")
    if 0 in a.shape:
        return 0.0
    return float(abs(a - b).max()) / max(float(abs(a).max()), 1e-3)
