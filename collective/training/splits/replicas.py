"""Comparison of the model on all ranks.

A split over ranks joins results that each rank computes with its own weights. If the weights
differ, the result belongs to no model, and nothing in the computation detects that. Data-parallel
training with ``check=True`` compares the ranks' replicas by the same functions, after each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, MismatchError
from collective.request import name_ranks
from collective.training.elastic_copies import digest_of

__all__ = ["StateEntry", "check_initialised", "check_layout", "check_settings", "check_values"]


class StateEntry(NamedTuple):
    """Parameter, buffer or input of this rank.

    Attributes:
        name: name in the model.
        value: array or plain data; None if it is not initialised.
        trained: whether its gradient is needed.
        piece: identifier of this rank's piece, as plain data; None: the whole. Ranks with the same
            piece have the same values.
    """

    name: str
    value: Any
    trained: bool = False
    piece: tuple[Any, ...] | None = None

    @property
    def layout(self) -> list[Any]:
        """Name, shape, dtype and whether it is trained; for plain data only the name."""
        if not hasattr(self.value, "dtype"):
            return [self.name, None, "", self.trained]
        dtype = str(self.value.dtype).rpartition(".")[2]
        return [self.name, list(self.value.shape), dtype, self.trained]


def check_settings(comm: Communicator, settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings.

    Collective: every rank of ``comm`` calls it.

    Raises:
        MismatchError: the settings differ; every rank raises it.
    """
    every = comm.all_gather_object({name: repr(value) for name, value in settings.items()})
    for name in settings:
        values = [theirs[name] for theirs in every]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise MismatchError(
                f"Split: the ranks' settings differ: {name}={values[others[0]]} on "
                f"{name_ranks(others[:1])}, {name}={values[0]} on rank 0 {_place(comm)}. Pass the "
                "same settings on every rank."
            )


def check_initialised(entries: Sequence[StateEntry]) -> None:
    """Check that a model's parameters have values.

    Raises:
        InvalidArgumentError: a parameter has none.
    """
    missing = next((entry.name for entry in entries if entry.trained and entry.value is None), None)
    if missing is not None:
        raise InvalidArgumentError(
            f"Split: {missing} has no values yet. Call the Split once before: that initialises it."
        )


def check_layout(comm: Communicator, entries: Sequence[StateEntry], root_fills: bool) -> None:
    """Check that all ranks have a model with the same parameters and buffers.

    Collective: every rank of ``comm`` calls it.

    Args:
        comm: ranks that take part.
        entries: state of the model.
        root_fills: whether other ranks may lack values that rank 0 has.

    Raises:
        MismatchError: names, shapes, dtypes or frozen parameters differ; every rank raises it.
    """
    every: list[list[list[Any]]] = comm.all_gather_object([entry.layout for entry in entries])
    root = every[0]
    for at in range(max(map(len, every))):
        expected = root[at] if at < len(root) else None
        layouts = [theirs[at] if at < len(theirs) else None for theirs in every]
        others = [
            rank for rank, layout in enumerate(layouts) if not _fits(layout, expected, root_fills)
        ]
        if others:
            raise MismatchError(
                f"Split: the ranks' models differ: {_described(layouts[others[0]])} on "
                f"{name_ranks(others)}, {_described(expected)} on rank 0 {_place(comm)}. Make the "
                "same model on every rank, with the same parameters frozen."
            )


def check_values(
    comm: Communicator, entries: Sequence[StateEntry], remedy: str, call: str = "Split"
) -> None:
    """Check that entries which ranks have in common have the same values, bit by bit.

    The ranks exchange one digest of all values. If these differ, they exchange a digest of each
    value.

    Collective: every rank of ``comm`` calls it.

    Args:
        comm: ranks that take part.
        entries: values of this rank.
        remedy: sentence that ends the error text.
        call: beginning of the error text.

    Raises:
        MismatchError: values differ; every rank raises it. The text names the first of them.
    """
    lines = [[entry.piece, *entry.layout, digest_of(entry.value)] for entry in entries]
    pieces = list(dict.fromkeys(entry.piece for entry in entries))
    mine = {piece: digest_of([line for line in lines if line[0] == piece]) for piece in pieces}
    every: list[list[list[Any]]] = comm.all_gather_object([[*pair] for pair in mine.items()])
    digests: dict[Any, set[bytes]] = {}
    for theirs in every:
        for piece, digest in theirs:
            digests.setdefault(piece, set()).add(digest)
    if all(len(different) == 1 for different in digests.values()):
        return
    details: list[list[list[Any]]] = comm.all_gather_object(lines)
    for at in range(max(map(len, details))):
        column = [theirs[at] if at < len(theirs) else [None, "nothing"] for theirs in details]
        for rank, line in enumerate(column):
            others = [
                other
                for other, theirs in enumerate(column)
                if theirs[0] == line[0] and theirs != line
            ]
            if others:
                raise MismatchError(
                    f"{call}: the values of {line[1]} on {name_ranks(others)} differ from those on "
                    f"rank {rank} {_place(comm)}. {remedy}"
                )


def _fits(layout: list[Any] | None, expected: list[Any] | None, root_fills: bool) -> bool:
    if layout == expected:
        return True
    if not root_fills or layout is None or expected is None:
        return False
    # The entry has the expected name and is not initialised, so it will take rank 0's values.
    return bool(layout[1] is None and layout[0] == expected[0] and layout[3] == expected[3])


def _described(layout: list[Any] | None) -> str:
    if layout is None:
        return "no further parameter or buffer"
    name, shape, dtype, trained = layout
    what = "without values" if shape is None else f"{dtype}{shape}"
    return f"{name} {what}{', trained' if trained else ''}"


def _place(comm: Communicator) -> str:
    return f"[rank {comm.rank} of {comm.size}]"
