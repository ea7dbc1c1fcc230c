"""Comparison of what the ranks have in common: parameters, options, inputs, iterators.

A rank describes its things in rows, and all ranks get all rows. :func:`refuse_differences` finds
the first difference, so that every rank raises the same error. A split over ranks joins results
that each rank computes with its own weights, and a data-parallel step adds the ranks' gradients. If
the weights differ, the result belongs to no model, and nothing in the computation detects that.
:func:`check_values` compares weights by digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, MismatchError
from collective.request import name_ranks

from .elastic_copies import digest_of


def refuse_differences(
    call: str, things: str, every: Sequence[Any], comm: Communicator, remedy: str, root: int = 0,
    *, fills: bool = False,
) -> None:  # fmt: skip
    """Check that all ranks have described the same things. Each rank passes the same arguments.

    Args:
        call: operation, for the error.
        things: what the ranks have described, such as ``"parameters"``.
        every: for each rank a row for each thing: its name, and facts about it. A fact is a text;
            or an integer, which is a digest of values; or None, if a thing has no values yet.
        comm: ranks that take part, for the error.
        remedy: sentence that ends the error text.
        root: rank that the others are compared with.
        fills: whether facts that are None on another rank count as equal.

    Raises:
        MismatchError: the things differ. The text names the first difference.
    """
    found = {
        rank: _first_difference(rows, every[root], rank, root, fills)
        for rank, rows in enumerate(every)
        if rows != every[root]
    }
    others = [rank for rank, difference in found.items() if difference]
    if others:
        raise MismatchError(
            f"{call}: the {things} of {name_ranks(others)} are not those of rank {root}: "
            f"{found[others[0]]} {_place(comm)}. {remedy}"
        )


def _first_difference(
    rows: Sequence[Any], expected: Sequence[Any], rank: int, root: int, fills: bool
) -> str:
    here, there = ([name for name, *_ in entries] for entries in (rows, expected))
    for own, other in zip_longest(rows, expected):
        for row, names, owner in ((own, there, rank), (other, here, root)):
            if row is not None and row[0] not in names:
                return f"only rank {owner} has {row[0]}"
        if own is None or other is None or own[0] != other[0]:
            first, second = own and own[0], other and other[0]
            return f"in their order {first} of rank {rank} stands beside {second} of rank {root}"
        for fact, wanted in zip(own[1:], other[1:]):
            if fact == wanted or (fills and fact is None):
                continue
            if isinstance(fact, int) and isinstance(wanted, int):
                return f"the values of {own[0]} differ on rank {rank}"
            a, b = ("without values" if each is None else each for each in (fact, wanted))
            return f"{own[0]} is {a} on rank {rank}, but {b} on rank {root}"
    return ""


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
        """Name, dtype and shape, and whether it is trained; for plain data no dtype and shape."""
        kind = None
        if hasattr(self.value, "dtype"):
            kind = f"{str(self.value.dtype).rpartition('.')[2]}{list(self.value.shape)}"
        return [self.name, kind, "trained" if self.trained else "not trained"]


def check_settings(comm: Communicator, settings: Mapping[str, Any], call: str = "Split") -> None:
    """Check that all ranks have the same settings.

    Collective: every rank of ``comm`` calls it.

    Raises:
        MismatchError: the settings differ; every rank raises it.
    """
    every = comm.all_gather_object([[name, repr(value)] for name, value in settings.items()])
    refuse_differences(call, "options", every, comm, "Pass the same options on every rank.")


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
    every = comm.all_gather_object([entry.layout for entry in entries])
    remedy = "Make the same model on every rank, with the same parameters frozen."
    refuse_differences("Split", "parameters and buffers", every, comm, remedy, fills=root_fills)


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


def few(names: Sequence[str]) -> str:
    """Return the first ten of some names for the text of an error, and the number of the others."""
    return ", ".join(names[:10]) + f" and {len(names) - 10} more" * (len(names) > 10)


def _place(comm: Communicator) -> str:
    return f"[rank {comm.rank} of {comm.size}]"
