"""Comparison of a split link with the whole one: results, gradients, and memory for backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from collective.inner import Filters, nested, whole_gradients
from collective.training.splits import cuts, report

from .cut import Cut


@contextlib.contextmanager
def _same_numbers() -> Iterator[None]:
    """Restore the state of NumPy's random number generator after the body."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


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


def computation(
    link: chainer.Link, filters: Filters | None, compute: cuts.Compute, x: Any, args: Sequence[Any]
) -> report.Computation:
    """Compute a link in float64, for the comparison that :meth:`Split.verify` describes."""
    _double(link)
    inputs = chainer.Variable(chainer.as_variable(x).array.astype(np.float64))
    rest = [value.astype(np.float64) if _is_real(value) else value for value in args]
    with _same_numbers():
        with _Outputs(link) as outputs:
            result, joined = compute(inputs, rest, {})
        _scalar(result).backward()
    gradients = {"input": inputs.grad, **whole_gradients(link.namedparams(), filters)}
    return report.Computation(outputs.found, gradients, joined)


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


def memory(
    link: chainer.Link, compute: cuts.Compute, x: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[dict[str, int], int, tuple[str, ...], int]:
    """Count the bytes that :meth:`Split.memory_report` describes, of a link that may change."""
    x, kept = chainer.as_variable(x), Kept()
    with _same_numbers():
        result, joined = compute(x, args, kwargs, kept)
    parameters = [p.array for p in link.params() if p.array is not None]
    weights = sum(int(array.nbytes) for array in parameters)
    return bytes_kept(result, kept.held, [x.array, *parameters]), kept.piece, joined, weights


class Kept:
    """Counter of the bytes that recomputed pieces keep.

    Attributes:
        piece: number of bytes of the piece that keeps most.
        held: arrays without a gradient with which pieces are combined, such as masks, with the
            names of the functions.
    """

    def __init__(self) -> None:
        self.piece = 0
        self.held: list[tuple[str, Any]] = []

    def compute_piece(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Any]
    ) -> None:
        """Compute a piece that keeps only ``arrays``, and count the bytes of its recomputation."""
        outer, self.piece = self.piece, 0
        # New variables end the walk over the graph at the piece's inputs.
        inputs = [chainer.Variable(each.array) for each in arrays]
        result = function(*inputs)
        inside = sum(bytes_kept(result, (), [each.array for each in inputs]).values())
        self.piece = max(outer, inside + self.piece)


def bytes_kept(
    result: Any, held: Sequence[tuple[str, Any]], there: Sequence[Any]
) -> dict[str, int]:
    """Return the bytes of the arrays that a graph holds, by function; each array counts once."""
    seen = {id(_owner(array)) for array in there}
    sizes: dict[str, int] = {}
    for label, array in (*held, *_held(result)):
        owner = _owner(array)
        if id(owner) not in seen:
            seen.add(id(owner))
            sizes[label] = sizes.get(label, 0) + int(owner.nbytes)
    return sizes


def _owner(array: Any) -> Any:
    """Return the array that owns the memory of ``array``."""
    while getattr(array, "base", None) is not None and hasattr(array.base, "nbytes"):
        array = array.base
    return array


def _held(result: Any) -> Iterator[tuple[str, Any]]:
    """Walk a graph backwards, and yield the arrays that its functions retain."""
    leaves = [x for x in nested.flatten(result) if isinstance(x, chainer.Variable)]
    todo = [x.node.creator_node for x in leaves if x.node.creator_node is not None]
    seen = set(map(id, todo))
    while todo:
        function = todo.pop()
        # Retained inputs, retained outputs, and arrays in the function's own attributes (a mask).
        retained = (node.data for node in function.inputs if node.data is not None)
        outputs = function._retained_output_data or ()
        kinds = chainer.get_array_types()  # types like numpy.float32 have an nbytes, too
        own = (value for value in vars(function).values() if isinstance(value, kinds))
        for array in (*retained, *outputs, *own):
            if array is not None:
                yield function.label, array
        for node in function.inputs:
            creator = node.creator_node
            if creator is not None and id(creator) not in seen:
                seen.add(id(creator))
                todo.append(creator)
