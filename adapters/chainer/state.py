"""Replication of a link over ranks: parameters, persistent values, initial values."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from collective import MismatchError
from collective.inner import StateEntry, call_in_place, comm_or_current, refuse_differences

if TYPE_CHECKING:
    from collective import Communicator

#: Length of the array that :func:`marks_of` returns.
MARKS = 16


def distinct_parameters(link: Any) -> list[tuple[str, Any]]:
    """Return a link's parameters with their paths; each parameter once, even if links share it."""
    by_identity: dict[int, tuple[str, Any]] = {}
    for name, parameter in link.namedparams():
        by_identity.setdefault(id(parameter), (name, parameter))
    return list(by_identity.values())


def sum_of_bits(array: Any) -> int:
    """Return the sum of an array's bytes, read as integers: it changes if one element does.

    It takes as long as reading the memory once, and no copy of the array is needed.
    """
    flat = array.ravel()
    word = "u8" if flat.size and flat.nbytes % 8 == 0 else f"u{min(flat.itemsize, 8)}"
    return int(flat.view(word).sum(dtype="u8"))


def same_on_all(number: int, comm: Communicator) -> bool:
    """Return whether all ranks have passed the same number, below 2**63. Collective."""
    highest, lowest = comm.all_reduce(np.array([number, -number]), op="max").tolist()
    return bool(highest == -lowest)


def broadcast_state(
    link: Any, comm: Communicator | None = None, root: int = 0, *, persistent: bool = True
) -> None:
    """Give every rank the parameters of ``root``, and its persistent values if ``persistent``.

    Afterwards all parameters that ``root`` has initialised are initialised on all ranks.

    Collective: every rank calls it, with the same link.

    Args:
        comm: ranks that take part; None: those of the current communicator.

    Raises:
        MismatchError: the ranks' links have different parameters, or another rank has initialised
            a parameter that ``root`` has not.
    """
    comm = comm_or_current(comm, "broadcast_state")
    parameters = distinct_parameters(link)
    mine = [StateEntry(name, parameter.raw_array).layout for name, parameter in parameters]
    remedy = f"Make the same link on every rank, and load it on rank {root} or on all ranks."
    every = comm.all_gather_object(mine)
    refuse_differences("broadcast_state", "parameters", every, comm, remedy, root, fills=True)
    known: list[Any] = comm.broadcast_object(
        [list(p.shape) if p.is_initialized else None for _, p in parameters], root=root
    )
    arrays = []
    for (_, parameter), shape in zip(parameters, known):
        if shape is None:
            continue
        if not parameter.is_initialized:
            bare = getattr(parameter.initializer, "bare", None)
            if bare is not None:  # root has its values already, so no rank must wait for it
                parameter.initializer = bare
            parameter.initialize(tuple(shape))
        arrays.append(parameter.array)
    if arrays:
        call_in_place(partial(comm.broadcast, arrays, root=root), arrays)
    if persistent:
        _broadcast_persistent(link, comm, root)


def sampled(named: list[tuple[str, Any]], step: int) -> bytes:
    """Return bytes that are the same on all ranks while their parameters and weights are.

    They depend on which parameters are frozen, and on one element of each parameter on the CPU,
    another one in each step. So this costs some microseconds, and shows that a rank has loaded or
    copied values, or has made a step of its own.
    """
    numbers = [float(step)]
    for _, parameter in named:
        rule, array = parameter.update_rule, parameter.raw_array
        numbers.append(rule is not None and rule.enabled)
        if type(array) is np.ndarray and array.size and array.dtype.kind in "biuf":
            value = array.item(step * 7919 % array.size)
            # The bits of a NaN may differ between ranks.
            numbers.append(value if value == value else 0.0)
    return struct.pack(f"{len(numbers)}d", *numbers)


def compare_parameters(
    what: str,
    named: list[tuple[str, Any]],
    comm: Communicator,
    known: Sequence[bool] = (),
    *,
    values: bool = True,
) -> None:
    """Check that the ranks have the same parameters, with equal values.

    Collective: every rank calls it.

    Args:
        what: operation, for the error.
        named: parameters with their paths.
        known: for each of them, whether it is the object of the last step; empty: unknown.
        values: whether frozen parameters and values have to be equal, too.

    Raises:
        MismatchError: the parameters differ; every rank raises it, and names the first one.
    """
    mine = []
    for (name, p), old in zip(named, known or [True] * len(named)):
        array = p.raw_array
        _, kind, _ = StateEntry(name, array).layout
        kind = kind and f"{kind} on {p.device}"
        enabled = p.update_rule is not None and p.update_rule.enabled
        frozen = "trained" if enabled else "not trained (disable_update, or no update rule)"
        origin = "the object of the last step" if old else "another object than in the last step"
        bits = 0 if array is None else sum_of_bits(array)
        mine.append([name, kind, *([frozen, origin, bits] if values else [])])
    remedy = (
        "Change parameters on all ranks in the same way, load snapshots on every rank, or call "
        "broadcast() after loading."
    )
    refuse_differences(what, "parameters", comm.all_gather_object(mine), comm, remedy)


def marks_of(number: int) -> list[float]:
    """Return numbers whose average over the ranks shows whether all have the same ``number``.

    These are the 8 digits in base 16 of a number of 32 bits, as fractions, and their squares, all
    of which are exact in float16, too. The average of the squares is the square of the average only
    if all digits are equal. So all ranks come to the same result, from the average alone.
    """
    digits = [(number >> shift & 15) / 16 for shift in range(0, 32, 4)]
    return digits + [digit * digit for digit in digits]


def agree(average: Any) -> bool:
    """Return whether all ranks had the same number, given the average of their marks."""
    values = average.tolist()
    # Bound of the rounding in the average's dtype. It is below the variance of any two digits on
    # some 500 ranks. In float16 it is not, and a difference may be seen only in a later step, whose
    # marks are others.
    rounding = 2.0**-7 if average.dtype.itemsize == 2 else 2.0**-17
    return all(
        abs(square - digit * digit) < rounding
        for digit, square in zip(values[: MARKS // 2], values[MARKS // 2 :])
    )


def persistent_values(link: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the path, the link and the attribute's name of each persistent value."""
    for path, child in link.namedlinks():
        for name in sorted(child._persistent):
            yield f"{path}/{name}", child, name


def _broadcast_persistent(link: Any, comm: Communicator, root: int) -> None:
    """Give every rank the persistent values of ``root``: statistics and counts, which are small."""
    host = chainer.get_device("@numpy")
    mine = {}
    for path, child, name in persistent_values(link):
        value = child.__dict__[name]
        mine[path] = host.send(value) if isinstance(value, chainer.get_array_types()) else value
    theirs = comm.broadcast_object(mine if comm.rank == root else None, root=root)
    if comm.rank == root:
        return
    for path, child, name in persistent_values(link):
        if path not in theirs:
            continue
        value, here = theirs[path], child.__dict__[name]
        if isinstance(value, np.ndarray):
            value = child.device.send(value)
            if isinstance(here, chainer.get_array_types()) and here.shape == value.shape:
                here[...] = value
                continue
        child.__dict__[name] = value


class _FromRoot:
    """Initializer that gives all ranks the values that rank 0 has drawn.

    Collective: all ranks call it, for the parameters in the same order.

    Attributes:
        bare: the parameter's original initializer, which replaces this one after the call.
    """

    def __init__(self, name: str, parameter: Any, comm: Communicator) -> None:
        self.bare = parameter.initializer
        self._name = name
        self._parameter = parameter
        self._comm = comm

    def __call__(self, array: Any) -> None:
        self.bare(array)
        try:
            self._comm.broadcast(array, out=array)
        except MismatchError as error:
            error.add_note(
                f"This rank [{self._comm.rank} of {self._comm.size}] has initialised the parameter "
                f"{self._name}. All ranks have to do so in the same forward pass."
            )
            raise
        self._parameter.initializer = self.bare

    def __getattr__(self, name: str) -> Any:  # for dtype, which not all initializers have
        if name in ("bare", "_name", "_parameter", "_comm") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.bare, name)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.bare  # a copy of the link is not replicated

    def __reduce__(self) -> Any:
        return _itself, (self.bare,)


def _itself(initializer: Any) -> Any:
    return initializer


def follow_root(link: Any, comm: Communicator) -> None:
    """Make parameters that are not initialised yet take rank 0's values at initialisation.

    Collective: every rank calls it, and later initialises the parameters in the same order.
    """
    for name, parameter in distinct_parameters(link):
        if parameter.is_initialized:
            continue
        if isinstance(parameter.initializer, _FromRoot):  # of an earlier communicator
            parameter.initializer = parameter.initializer.bare
        parameter.initializer = _FromRoot(name, parameter, comm)
