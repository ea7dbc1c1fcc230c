"""Count of the bytes that are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer

from collective.memory import nested

__all__ = ["Kept", "bytes_kept"]


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
