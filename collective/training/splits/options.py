"""What may be asked of a split, in any framework."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, MismatchError, ShapeError

__all__ = ["ENDS", "FILTERS", "HALOS", "check_axes", "check_options", "check_same"]

#: Whether rows travel before each layer, or once for a chain of them.
HALOS = "layer", "chain"
#: Whether an input or a result is whole on each rank, or in pieces.
ENDS = "whole", "pieces"
#: Whether each rank keeps the filters of all channels, or those of its own.
FILTERS = "all", "own"


def check_options(
    batch: int,
    channels: int,
    data: Sequence[int],
    comm: Communicator | None,
    halo: str,
    inputs: str,
    outputs: str,
    filters: str,
) -> None:
    """Refuse what cannot be asked for.

    Raises:
        InvalidArgumentError: a number of pieces is no positive integer, an option is none of its
            values or needs ranks, channels are cut in a chain, or filters without channels.
    """
    for name, parts in (("batch", [batch]), ("channels", [channels]), ("data", list(data))):
        if not parts or not all(isinstance(each, int) and each >= 1 for each in parts):
            given = data if name == "data" else parts[0]
            raise InvalidArgumentError(f"Split: {name}={given!r}; positive integers.")
    chosen = (
        *(("halo", halo, HALOS), ("inputs", inputs, ENDS), ("outputs", outputs, ENDS)),
        ("filters", filters, FILTERS),
    )
    for name, value, known in chosen:
        if value not in known:
            raise InvalidArgumentError(f"Split: {name}={value!r}; one of {', '.join(known)}.")
        if comm is None and value != known[0]:
            raise InvalidArgumentError(
                f"Split: {name}={value!r} without comm; it says what ranks do. Pass comm=."
            )
    if halo == "chain" and channels > 1:
        raise InvalidArgumentError(
            f"Split: channels={channels} with halo='chain'; channels are mixed by layers, which a "
            "chain has many of. Use halo='layer'."
        )
    if filters == "own" and channels == 1:
        raise InvalidArgumentError(
            "Split: filters='own' with channels=1; a rank's own filters are those of its channels. "
            "Pass channels=."
        )


def check_axes(data: Sequence[int], axes: int) -> None:
    """Refuse to cut axes that an array does not have.

    Raises:
        ShapeError: there are fewer than ``data`` cuts.
    """
    if axes < len(data) and any(parts > 1 for parts in data[axes:]):
        raise ShapeError(f"Split: data={tuple(data)} of an input with {axes} data axes.")


def check_same(comm: Communicator, array: Any) -> None:
    """Compare the ranks' whole inputs, of which each uses a part.

    Collective: every rank of ``comm``.

    Raises:
        MismatchError: they differ; on all ranks.
    """
    known = np.ascontiguousarray(array)
    digest = hashlib.sha256(repr((known.shape, known.dtype.str)).encode())
    digest.update(known.view(np.uint8).data if known.size else b"")
    found = comm.all_gather_object(digest.hexdigest())
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise MismatchError(
            f"Split: the inputs of ranks 0 and {other} differ; every rank passes the same whole "
            f"input [rank {comm.rank} of {comm.size}]. For a part on each, inputs='pieces'."
        )
