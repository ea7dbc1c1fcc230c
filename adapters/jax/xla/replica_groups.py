"""Groups of devices in the text of a compiled XLA program, which exchange data in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from collective import UnsupportedError

Groups = list[list[int]]

_COLLECTIVES = (
    "all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all "
    "reduce-scatter"
).split()
# An instruction such as `%x = f32[8] all-reduce-start(%y), channel_id=1, replica_groups=…`.
_INSTRUCTION = re.compile(rf"=.*?\s({'|'.join(_COLLECTIVES)})(?:-start)?\((.*)$", re.MULTILINE)
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
# Numbers of an array 0, 1, 2, … of some shape, whose axes may be permuted: `[2,3]T(1,0)`.
_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
_AXES = re.compile(
    rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(({_IOTA}|[\d,\s]*)\))? \{{([^}}]*)\}}"
)
_ARANGED = re.compile(rf"replica_groups=\[([\d,]+)\]<=({_IOTA})")


def device_groups(text: str, assignment: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Groups:
    """Return the groups of devices that exchange data in a program, each in XLA's order, once.

    If the text leaves open which of two groups an instruction uses, both are in the result.

    Args:
        text: the optimised program in XLA's text format.
        assignment: device of each replica (row) and partition (column).

    Raises:
        UnsupportedError: an instruction names its groups in an unknown format.
    """
    found: dict[tuple[int, ...], None] = {}
    for match in _INSTRUCTION.finditer(text):
        for group in _of_instruction(match[1], match[2], assignment):
            found.setdefault(tuple(group))
    return [list(group) for group in found]


def _of_instruction(
    operation: str, attributes: str, assignment: np.ndarray[tuple[int, int], np.dtype[np.int64]]
) -> Iterator[list[int]]:
    replicas, partitions = assignment.shape
    everything = [int(device) for device in assignment.ravel()]
    crosses = "channel_id=" in attributes  # between partitions, and not only between replicas
    groups = [] if operation == "collective-permute" else _numbers(operation, attributes)
    if "use_global_device_ids=true" in attributes:
        groups = groups or [list(range(replicas * partitions))]
        for group in groups:
            yield [everything[number] for number in group]
    elif crosses:
        # The numbers are partitions in some operations, and replicas in others. An interpretation
        # that fits both is possible only for small numbers, so give both.
        whole = groups or [list(range(partitions))]
        if all(number < partitions for group in whole for number in group):
            for row in assignment:
                yield from ([int(row[number]) for number in group] for group in whole)
        whole = groups or [list(range(replicas))]
        if all(number < replicas for group in whole for number in group):
            for group in whole:
                yield [int(device) for number in group for device in assignment[number]]
    else:
        for column in assignment.T:
            for group in groups or [list(range(replicas))]:
                yield [int(column[number]) for number in group]


def _numbers(operation: str, attributes: str) -> Groups:
    """Return the numbers in the groups of an instruction; empty if one group has everything."""
    if (listed := _LISTED.search(attributes)) is not None:
        return [
            [int(number) for number in group.split(",")]
            for group in re.findall(r"\{([\d,\s]+)\}", listed[1])
        ]
    if (aranged := _ARANGED.search(attributes)) is not None:
        numbers = _iota(aranged[2]).reshape(_integers(aranged[1]))
        return [list(map(int, group)) for group in numbers]
    if (axes := _AXES.search(attributes)) is not None:
        return _of_axes(axes[1], axes[2], axes[3])
    if "replica_groups=" not in attributes:
        return []
    raise UnsupportedError(
        f"jax: the compiled program has an {operation} whose groups of devices are in an unknown "
        f"format: {attributes[attributes.index('replica_groups=') :][:120]!r}. This version of JAX "
        "is newer than this library: please report its version."
    )


def _of_axes(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """Return the groups along some axes of a mesh.

    An axis may be a part of the mesh's axis, such as ``a:(2)3``: its length is 3, and the product
    of the lengths of the parts before it is 2.

    Args:
        mesh: names and lengths of the mesh's axes, such as ``'a'=6,'b'=2``.
        device_ids: numbers of the mesh's places, listed or as in ``_IOTA``; None for 0, 1, 2, ….
        axes: the axes of the groups, the slowest first.
    """
    lengths = {name: int(n) for name, n in re.findall(r"([^,=]+)=(\d+)", mesh)}
    wanted: list[tuple[str, int, int]] = []  # axis, first and last product of lengths
    for axis in filter(None, axes.split(",")):
        name, _, part = axis.partition(":")
        before, length = (1, lengths[name])
        if part:
            before, length = map(int, re.findall(r"\d+", part))
        wanted.append((name, before, before * length))
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}  # dimension that begins at a product of an axis
    for name, length in lengths.items():
        cuts = {1, length, *(cut for axis, *ends in wanted if axis == name for cut in ends)}
        ordered = sorted(cuts)
        for begin, end in pairwise(ordered):
            place[name, begin] = len(shape)
            shape.append(end // begin)
    inner = [
        place[name, begin]
        for name, first, last in wanted
        for begin in sorted(b for axis, b in place if axis == name and first <= b < last)
    ]
    outer = [dimension for dimension in range(len(shape)) if dimension not in inner]
    if device_ids is None:
        numbers = np.arange(int(np.prod([*lengths.values()])))
    elif device_ids.startswith("["):
        numbers = _iota(device_ids)
    else:
        numbers = np.array(_integers(device_ids))
    within = int(np.prod([shape[dimension] for dimension in inner]))
    arranged = numbers.reshape(shape).transpose([*outer, *inner]).reshape(-1, within)
    return [list(map(int, group)) for group in arranged]


def _iota(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the numbers of a text as in ``_IOTA``, in an array of the permuted shape."""
    shape, _, axes = text.partition("T")
    dimensions = _integers(shape.strip("[]"))
    numbers = np.arange(np.prod(dimensions)).reshape(dimensions)
    return numbers.transpose(_integers(axes.strip("()"))) if axes else numbers


def _integers(text: str) -> Sequence[int]:
    return [int(number) for number in text.split(",")]
