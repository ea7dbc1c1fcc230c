"""State of a link that the passes of virtual shards change, made independent of the ranks.

A rank makes one forward and backward pass for each of its shards, with one copy of the link. What a
pass leaves behind would reach this rank's next shard, so that results would depend on which rank
computes which shard. A pass may leave the following behind:

- *Tracked values*: persistent values, and other attributes of links that are numbers or arrays,
  such as counts and statistics. Every pass begins with their values from before the step. After the
  step, floating-point values are the average over all shards, and integers the maximum.
- *Results*: all other attributes, such as a classifier's loss or a recurrent link's hidden state.
  Every pass begins with what the program has assigned, and not with what a pass has left.
- *Generators* of random numbers in attributes of links. As the global ones (see
  :class:`~collective.training.shard_passes.ShardPasses`), they get a seed before every pass that
  depends on the step and the shard alone, and continue afterwards as before the step.
- *All else*, such as a parameter that a forward pass writes, is refused by name, on all ranks.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import chainer
import numpy as np

from collective import InvalidArgumentError
from collective.inner import ShardPasses, StateEntry, refuse_differences
from collective.training.shard_passes import Generator, StateFold, of_numpy

from .state import distinct_parameters, sum_of_bits

_ABSENT: Any = object()
# Largest array, apart from parameters and persistent values, that is tracked. A longer one is data
# rather than state, and copies of it could cost more than the passes.
_TRACKED_BYTES = 16 << 20
# Attributes of Chainer's own classes, which are no state of a model.
_BUILT_IN = frozenset().union(
    *(vars(kind()) for kind in (chainer.Link, chainer.Chain, chainer.ChainList))
)

_Key = tuple[str, str]  # path of a link, and name of one of its attributes


def generators() -> list[Generator]:
    """Return CuPy's generator of this device, if there is one; NumPy's is always seeded."""
    if not chainer.backends.cuda.available:
        return []
    on_gpu = chainer.backends.cuda.cupy.random.get_random_state()

    def number() -> int:
        return int(on_gpu.randint(2**31 - 1, size=1)[0])

    # Its state cannot be read. It continues from a number that it draws before.
    return [Generator(number, on_gpu.seed, number, on_gpu.seed)]


def _generator_of(value: Any) -> Generator | None:
    """Return the functions of a generator in an attribute; None for another object."""
    if isinstance(value, random.Random):
        return Generator(int, value.seed, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return of_numpy(value)
    if not isinstance(value, np.random.Generator):
        return None
    bits: Any = value.bit_generator

    def restore(state: Any) -> None:
        bits.state = state

    return Generator(int, lambda n: restore(type(bits)(n).state), lambda: bits.state, restore)


class ShardState:
    """State of a link over the passes of each step.

    Args:
        link: target of the optimizer.
        passes: passes of the shards.
    """

    def __init__(self, link: Any, passes: ShardPasses) -> None:
        self._link = link
        self._passes = passes
        # Results that the last pass has left, and what the attributes were before it.
        self._left: dict[_Key, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Make the passes of a step in the body, each within :meth:`passing`, and fold the state.

        Collective: every rank enters it.

        Args:
            number: number of the step, from which the seeds of generators follow.

        Raises:
            InvalidArgumentError: a parameter is not initialised, or a pass has changed what cannot
                be folded; every rank raises it.
            MismatchError: parameters or persistent values differed between ranks before the step;
                every rank raises it.
        """
        self._begin()
        self._number = self._passes.step = number
        states = [generator.save() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states):
                generator.restore(state)
        self._end()

    def _begin(self) -> None:
        """Record the state from before the step."""
        self._links = dict(_distinct_links(self._link))
        for (path, name), (before, left) in self._left.items():
            attributes = vars(self._links[path]) if path in self._links else {}
            if attributes.get(name, _ABSENT) is left:  # the program has not assigned it since
                _assign(attributes, name, before)
        self._left = {}
        self._before = dict(self._attributes())
        self._persistent = [
            (path, name)
            for path, child in self._links.items()
            for name in sorted(child._persistent)
        ]
        self._tracked = {
            key: array.copy()
            for key, value in self._before.items()
            if (array := _as_array(value, key in self._persistent)) is not None
        }
        self._parameters = _parameters(self._link)
        missing = [name for name, p, *_ in self._parameters if not p.is_initialized]
        if missing:
            raise InvalidArgumentError(
                f"update: {missing[0]} is not initialised, with shards: a pass would draw its "
                "values, and its number of draws would depend on the rank. Give the link its input "
                "size, or make a forward pass on every rank before the first update."
            )
        own = map(_generator_of, self._before.values())
        self._generators = [generator for generator in own if generator is not None]
        self._after: list[dict[_Key, Any]] = []
        self._problems: list[str] = []

    def _attributes(self) -> Iterator[tuple[_Key, Any]]:
        """Yield the attributes of the links, without parameters and child links."""
        for path, child in self._links.items():
            for name, value in vars(child).items():
                if name not in _BUILT_IN and not isinstance(
                    value, (chainer.Link, chainer.Parameter)
                ):
                    yield (path, name), value

    @contextlib.contextmanager
    def passing(self, shard: int) -> Iterator[None]:
        """Make the pass of a shard in the body."""
        for key, _ in list(self._attributes()):
            if key not in self._before:
                _assign(vars(self._links[key[0]]), key[1], _ABSENT)
        for key, value in self._before.items():
            vars(self._links[key[0]])[key[1]] = value
            if isinstance(value, chainer.get_array_types()) and key in self._tracked:
                value[...] = self._tracked[key]
        for nth, generator in enumerate(self._generators):
            generator.seed(self._passes.shards.seed(shard, self._number, nth))
        with _Outsiders(self._links.values()) as outsiders:
            yield
        changes = [*self._collect(), *self._changed_parameters(), *outsiders.changes()]
        self._problems += [f"{change} in the pass of shard {shard}" for change in changes]

    def _collect(self) -> Iterator[str]:
        """Keep the tracked values that a pass has left; yield the changes that are refused."""
        after: dict[_Key, Any] = {}
        names = {(path, name) for path, c in self._links.items() for name in c._persistent}
        for key in sorted(names ^ set(self._persistent)):
            yield f"{_label(key)} was registered or deleted as a persistent value"
        for key, before in self._before.items():
            value = vars(self._links[key[0]]).get(key[1], _ABSENT)
            persistent, tracked = key in self._persistent, self._tracked.get(key)
            array = _as_array(value, persistent)
            if tracked is None:
                if persistent and not (value is before or _equal(value, before)):
                    yield f"{_label(key)} changed from {_kind(before)} to {_kind(value)}"
            elif array is None or (array.dtype, array.shape) != (tracked.dtype, tracked.shape):
                if persistent or (array is not None and not array.shape and not tracked.shape):
                    yield f"{_label(key)} changed from {_kind(before)} to {_kind(value)}"
            elif persistent or sum_of_bits(array) != sum_of_bits(tracked):
                after[key] = array.copy()
        self._after.append(after)

    def _changed_parameters(self) -> Iterator[str]:
        parameters = _parameters(self._link)
        if [(n, id(p)) for n, p, *_ in parameters] != [(n, id(p)) for n, p, *_ in self._parameters]:
            yield "the set of parameters changed"
            return
        for (name, _, *before), (_, _, *after) in zip(self._parameters, parameters):
            if before != after:
                yield f"the values of the parameter {name} changed"

    def _end(self) -> None:
        """Compare the ranks, and fold the tracked values. Collective."""
        changed = sorted(set().union(*self._after) - set(self._persistent))
        state = [[name, kind, bits] for name, _, kind, bits in self._parameters]
        for key in self._persistent:
            array = self._tracked.get(key)
            value = repr(self._before[key]) if array is None else sum_of_bits(array)
            state.append([_label(key), _kind(self._before[key]), value])
        digest = zlib.crc32(repr(state).encode())
        note = np.array([digest, -digest, bool(changed or self._problems)], np.int64)
        comm = self._passes.comm
        highest, lowest, more = comm.all_reduce(note, op="max").tolist()
        if highest != -lowest or more:
            every = comm.all_gather_object([state, self._problems[:1], list(map(list, changed))])
            changed = self._agreed(every)
        self._fold([*(key for key in self._persistent if key in self._tracked), *changed])

    def _agreed(self, every: Sequence[Any]) -> list[_Key]:
        """Return the attributes that a pass has changed on any rank.

        Raises:
            InvalidArgumentError, MismatchError: those of :meth:`step`.
        """
        comm = self._passes.comm
        remedy = (
            "Change parameters and persistent values on all ranks in the same way, or call "
            "broadcast() afterwards."
        )
        states = [state for state, *_ in every]
        refuse_differences("update", "parameters before this step", states, comm, remedy)
        for rank, (_, problems, _) in enumerate(every):
            if problems:
                _refuse(problems[0], rank, f"[rank {comm.rank} of {comm.size}]")
        keys = sorted({(path, name) for _, _, changed in every for path, name in changed})
        values = comm.all_gather_object([[_label(key), self._value(key)] for key in keys])
        remedy = "A pass changed them. Give the attributes the same values on all ranks."
        refuse_differences("update", "attributes before this step", values, comm, remedy)
        return keys

    def _value(self, key: _Key) -> str:
        """Return a short description of a tracked value from before the step."""
        array = self._tracked.get(key)
        if array is None:
            return "no number"
        return (
            f"{array.dtype}{list(array.shape)} {hex(sum_of_bits(array)) if array.shape else array}"
        )

    def _fold(self, keys: Sequence[_Key]) -> None:
        """Set tracked values to their fold over all shards. Collective."""
        xp = self._link.xp
        arrays = [xp.array(self._tracked[key]) for key in keys]
        fold = StateFold(self._passes, arrays, xp.stack)
        for after in self._after:
            for key, array in zip(keys, arrays):
                array[...] = xp.asarray(after.get(key, self._tracked[key]))
            fold.add()
        fold.reduce()
        for key, array in zip(keys, arrays):
            value = self._before[key]
            if isinstance(value, chainer.get_array_types()):
                value[...] = array
            else:
                value = type(value)(array.item())
            vars(self._links[key[0]])[key[1]] = value
        folded = set(keys)
        for key, value in self._attributes():
            before = self._before.get(key, _ABSENT)
            if key not in folded and value is not before:
                self._left[key] = before, value


class _Outsiders(chainer.LinkHook):  # type: ignore[misc, unused-ignore]
    """Links that a pass calls, and that are not in the target; their state cannot be folded."""

    def __init__(self, known: Any) -> None:
        self.name = f"collective {id(self)}"
        self._known = {id(link) for link in known}
        self._seen: list[tuple[Any, dict[str, Any]]] = []

    def forward_preprocess(self, args: Any) -> None:
        if id(args.link) in self._known:
            return
        for link in args.link.links():
            if id(link) not in self._known:
                self._known.add(id(link))
                self._seen.append((link, _bits_of_persistent(link)))

    def changes(self) -> Iterator[str]:
        for link, before in self._seen:
            after = _bits_of_persistent(link)
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    yield (
                        f"{name} of a {type(link).__name__} that is not in the optimizer's target "
                        "changed"
                    )


def _bits_of_persistent(link: Any) -> dict[str, Any]:
    values = {name: vars(link)[name] for name in link._persistent}
    arrays = {name: _as_array(value, True) for name, value in values.items()}
    return {
        name: id(values[name]) if array is None else (str(array.dtype), sum_of_bits(array))
        for name, array in arrays.items()
    }


def _parameters(link: Any) -> list[tuple[str, Any, str | None, int]]:
    """Return name, variable, dtype with shape, and bits of each parameter."""
    return [
        (name, p, kind, 0 if kind is None else sum_of_bits(p.array))
        for name, p in distinct_parameters(link)
        for _, kind, _ in [StateEntry(name, p.raw_array).layout]
    ]


def _distinct_links(link: Any) -> Iterator[tuple[str, Any]]:
    seen = set()
    for path, child in link.namedlinks():
        if id(child) not in seen:
            seen.add(id(child))
            yield path.rstrip("/"), child


def _assign(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def _as_array(value: Any, persistent: bool) -> Any:
    """Return a value that is tracked as an array; None for another value."""
    if isinstance(value, chainer.get_array_types()):
        if not persistent and (
            type(value) not in chainer.get_array_types()
            or value.nbytes > _TRACKED_BYTES
            or not getattr(value.flags, "writeable", True)
        ):
            return None
    elif isinstance(value, (bool, np.bool_)):
        value = np.array(value, np.int64)
    elif isinstance(value, (int, float, complex, np.number)):
        value = np.array(value)
    else:
        return None
    return value if value.dtype.kind in "biufc" else None


def _equal(value: Any, other: Any) -> bool:
    """Return whether two values that are no numbers and no arrays are equal."""
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:  # of a class of the program
        return False


def _kind(value: Any) -> str:
    if isinstance(value, chainer.get_array_types()):
        return f"{value.dtype}{list(value.shape)}"
    if value is _ABSENT:
        return "nothing"
    return str(value) if value is None else type(value).__name__


def _label(key: _Key) -> str:
    return "/".join(key)


def _refuse(change: str, rank: int, where: str) -> NoReturn:
    raise InvalidArgumentError(
        f"update: {change} on rank {rank}, with shards. The result would depend on which rank "
        f"computes the shard {where}. A pass may change persistent values of the target's links in "
        "place, and numbers; give them their type and shape before the first update. Write "
        "parameters in a hook of the optimizer."
    )
