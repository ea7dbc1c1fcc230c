"""What is kept for the backward pass, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer

from collective.memory import nested

__all__ = ["Kept", "bytes_kept"]


class Kept:
    """Counts what is kept by pieces that are computed again.

    Attributes:
        piece: the bytes of the piece that keeps most.
        held: arrays without a gradient that pieces are combined with, such as masks, by function.
    """

    def __init__(self) -> None:
        self.piece = 0
        self.held: list[tuple[str, Any]] = []

    def compute_piece(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Any]
    ) -> None:
        """Compute what otherwise is kept as ``arrays`` alone and computed again from them."""
        outer, self.piece = self.piece, 0
        # Variables of their own, or the walk would go on to what they were computed from.
        given = [chainer.Variable(each.array) for each in arrays]
        found = function(*given)
        inside = sum(bytes_kept(found, (), [each.array for each in given]).values())
        self.piece = max(outer, inside + self.piece)


def bytes_kept(
    result: Any, held: Sequence[tuple[str, Any]], there: Sequence[Any]
) -> dict[str, int]:
    """Return the bytes of the arrays that a graph holds, by function; each array once."""
    seen = {id(_owner(array)) for array in there}
    found: dict[str, int] = {}
    for label, array in (*held, *_held(result)):
        owner = _owner(array)
        if id(owner) not in seen:
            seen.add(id(owner))
            found[label] = found.get(label, 0) + int(owner.nbytes)
    return found


def _owner(array: Any) -> Any:
    """Return the array whose memory it is."""
    while getattr(array, "base", None) is not None and hasattr(array.base, "nbytes"):
        array = array.base
    return array


def _held(result: Any) -> Iterator[tuple[str, Any]]:
    """Walk a graph backwards over what its functions retain."""
    leaves = [x for x in nested.flatten(result) if isinstance(x, chainer.Variable)]
    todo = [x.node.creator_node for x in leaves if x.node.creator_node is not None]
    seen = set(map(id, todo))
    while todo:
        function = todo.pop()
        # Inputs that are retained, outputs that are, and what it keeps as its own (a mask).
        retained = (node.data for node in function.inputs if node.data is not None)
        outputs = function._retained_output_data or ()
        kinds = chainer.get_array_types()  # types like numpy.float32 have the attributes, too
        own = (each for each in vars(function).values() if isinstance(each, kinds))
        for array in (*retained, *outputs, *own):
            if array is not None:
                yield function.label, array
        for node in function.inputs:
            creator = node.creator_node
            if creator is not None and id(creator) not in seen:
                seen.add(id(creator))
                todo.append(creator)
