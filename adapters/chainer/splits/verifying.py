"""Comparison of a split link with the whole one: results, gradients, and memory for backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from collective.memory import nested
from collective.training.splits.cuts import ModelCopy
from collective.training.splits.filters import whole_gradients
from collective.training.splits.report import Computation, MemoryReport, Verification

from .cut import Cut
from .kept import Kept, bytes_kept

__all__ = ["memory_report", "verify"]


# -- results ---------------------------------------------------------------------------------


class _Outputs(chainer.LinkHook):  # type: ignore[misc, unused-ignore]
    """Hook that records the outputs of each link that contains no other links."""

    name = "collective-split-outputs"

    def __init__(self, link: chainer.Link) -> None:
        super().__init__()
        self._paths = {id(child): path for path, child in link.namedlinks()}
        self.found: list[tuple[str, Any]] = []

    def forward_postprocess(self, args: Any) -> None:
        path = self._paths.get(id(args.link))
        if path is None or isinstance(args.link, (chainer.Chain, chainer.ChainList)):
            return
        for leaf in nested.flatten(args.out):
            if isinstance(leaf, chainer.Variable):
                array = leaf.session.whole(leaf).array if isinstance(leaf, Cut) else leaf.array
                self.found.append((f"{path} ({type(args.link).__name__})", array.copy()))


def verify(
    copies: Iterable[ModelCopy], x: Any, args: Sequence[Any], tolerance: float
) -> Verification:
    """Run the comparison that :meth:`Split.verify` describes."""
    state = np.random.get_state()
    outcomes = []
    for link, filters, compute in copies:
        np.random.set_state(state)
        _double(link)
        inputs = chainer.Variable(chainer.as_variable(x).array.astype(np.float64))
        rest = [value.astype(np.float64) if _is_real(value) else value for value in args]
        with _Outputs(link) as outputs:
            result, joined = compute(inputs, rest, {})
        _scalar(result).backward()
        gradients = {"input": inputs.grad, **whole_gradients(link.namedparams(), filters)}
        outcomes.append(Computation(outputs.found, gradients, joined))
    np.random.set_state(state)
    whole, parts = outcomes
    return Verification.of(whole, parts, tolerance)


def _is_real(x: Any) -> bool:
    return getattr(getattr(x, "dtype", None), "kind", "") == "f"


def _double(link: chainer.Link) -> None:
    """Make a link compute in double precision."""
    link.cleargrads()
    for parameter in link.params():
        if parameter.array is not None:
            parameter.array = parameter.array.astype(np.float64)
            parameter.cleargrad()
    for _, child in link.namedlinks():
        for name in child._persistent:
            if _is_real(getattr(child, name)):
                setattr(child, name, getattr(child, name).astype(np.float64))
        if hasattr(child, "_highprec_dtype"):
            child._highprec_dtype = np.dtype(np.float64)


def _scalar(result: Any) -> Any:
    """Return a loss to which all elements contribute differently."""
    total: Any = 0.0
    for leaf in nested.flatten(result):
        if isinstance(leaf, chainer.Variable) and leaf.dtype.kind == "f":
            weights = leaf.xp.linspace(-1, 1, leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
            total = total + F.sum(leaf * weights)
    return total


# -- memory ----------------------------------------------------------------------------------


def memory_report(
    copies: Iterable[ModelCopy], x: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> MemoryReport:
    """Count the bytes that :meth:`Split.memory_report` describes."""
    state = np.random.get_state()
    x = chainer.as_variable(x)
    counts, weights = [], []
    for link, _, compute in copies:
        np.random.set_state(state)
        kept = Kept()
        result, joined = compute(x, args, kwargs, kept)
        parameters = [p.array for p in link.params() if p.array is not None]
        weights.append(sum(int(array.nbytes) for array in parameters))
        counts.append(bytes_kept(result, kept.held, [x.array, *parameters]))
    np.random.set_state(state)
    whole, pieces = counts
    return MemoryReport(whole, pieces, kept.piece, joined, (weights[0], weights[1]))
