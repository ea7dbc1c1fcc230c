"""Random calls whose inputs and outputs share memory, each compared with NumPy on copies.

Each call of each rank has a *pool* of bytes, in which ``x`` and ``out`` are views. The views are
separate, equal, shifted, interleaved, reversed, of another dtype, or without elements. All ranks
draw the same case from the seed, and know the pools of all ranks. So every rank computes with NumPy
its expected result, and the expected content of its whole pool after the call.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.communicator import NULL, Communicator
from collective.testing import samples

__all__ = ["soak"]

Array = np.ndarray[Any, Any]

# Numbers of elements, around the lengths in bytes at which transports change their algorithm (as
# in calls.py), and the weights of these numbers.
_COUNTS = (0, 1, 2, 3, 7, 30, 31, 200, 1000, 4100, 9000, 40_000)
_LIKELY = (4, 3, 4, 4, 6, 6, 4, 4, 4, 3, 2, 1)
_DTYPES = ("uint8", "int16", "int32", "int64")
_OPS = ("sum", "max", "min", "bxor", "prod")
_LAYOUTS = ("apart", "same", "view", "start", "shifted", "piece", "reversed", "woven", "end")
_IN_FLIGHT = 4
_TAGS = 3


@dataclass
class _Case:
    """Parameters of a call; all ranks draw the same ones.

    Attributes:
        operation: name of the method.
        dtypes: dtype of each leaf; one dtype if ``x`` is an array.
        nested: true if ``x`` is a list of arrays.
        counts: number of elements of each leaf.
        uneven: true if ranks have different numbers of elements, where the call allows it.
        layouts: for each rank, the position of ``out`` relative to ``x``.
        shifts: for each rank, a number that some layouts use.
        how: "now" or "later" (async_op).
        tensors: true if ``x`` and ``out`` are PyTorch tensors, where their strides allow it.
        root: rank of the root.
        op: operator of a reduction.
        step: distance between the ranks of ``sendrecv``.
        tag: tag of a message.
        messages: number of messages with this tag in the background during the call.
        in_flight: number of calls that may still be in the background after this call.
        seed: seed of the pools' contents.
    """

    operation: str
    dtypes: list[str]
    nested: bool
    counts: list[int]
    uneven: bool
    layouts: list[str]
    shifts: list[int]
    how: str
    tensors: bool
    root: int
    op: str
    step: int
    tag: int
    messages: int
    in_flight: int
    seed: int


def soak(comm: Communicator, seed: int, cases: int) -> dict[str, int]:
    """Make random calls; return the number of correct calls for each operation and layout.

    Args:
        comm: communicator of all ranks.
        seed: seed of all random choices.
        cases: number of calls.

    Raises:
        AssertionError: A result, or memory beside it, is wrong. The text contains the case.
    """
    return _Soak(comm, seed).run(cases)


class _Soak:
    def __init__(self, comm: Communicator, seed: int) -> None:
        self._comm = comm
        self._random = np.random.default_rng(seed)
        self._pending: deque[tuple[_Case, Callable[[], None]]] = deque()
        self._done: Counter[str] = Counter()

    def run(self, cases: int) -> dict[str, int]:
        for number in range(cases):
            case = self._draw()
            try:
                self._make(case)
            except Exception as error:
                raise AssertionError(f"case {number}: {case}: {error!r}") from error
            self._settle(case.in_flight)
            self._done[case.operation] += 1
            self._done[case.layouts[self._comm.rank]] += 1
        self._settle(0)
        return dict(self._done)

    def _settle(self, left: int) -> None:
        """Wait for calls in the background, oldest first, until ``left`` of them remain."""
        while len(self._pending) > left:
            case, settle = self._pending.popleft()
            try:
                settle()
            except Exception as error:
                raise AssertionError(f"in the background: {case}: {error!r}") from error

    def _draw(self) -> _Case:
        random, size = self._random, self._comm.size
        operation = str(random.choice(list(_OPERATIONS)))
        nested = bool(random.random() < 0.3) and operation not in _SINGLE
        leaves = int(random.integers(2, 4)) if nested else 1
        likely = np.array(_LIKELY) / sum(_LIKELY)
        layouts = [str(each) for each in random.choice(_LAYOUTS, size)]
        if random.random() < 0.5:
            layouts = layouts[:1] * size
        return _Case(
            operation=operation,
            dtypes=[str(each) for each in random.choice(_DTYPES, leaves)],
            nested=nested,
            counts=[int(each) for each in random.choice(_COUNTS, leaves, p=likely)],
            uneven=bool(random.random() < 0.4),
            layouts=layouts,
            shifts=[int(each) for each in random.integers(0, 40, size)],
            how=str(random.choice(["now", "later"])),
            tensors=bool(random.random() < 0.3),
            root=int(random.integers(size)),
            op=str(random.choice(_OPS)),
            step=int(random.integers(size + 1)),
            tag=int(random.integers(_TAGS)),
            messages=int(random.integers(3)) if random.random() < 0.3 else 0,
            in_flight=int(random.integers(_IN_FLIGHT)),
            seed=int(random.integers(2**31)),
        )

    def _make(self, case: _Case) -> None:
        comm = self._comm
        pools = [_Pool(case, rank, comm.size) for rank in range(comm.size)]
        mine = pools[comm.rank]
        wanted = mine.expected([pool.inputs() for pool in pools])
        if case.operation == "sendrecv" and 0 < case.step < comm.size:
            for number in range(case.messages):
                self._pending.append((case, self._message(case, number)))
        call, out = mine.call(comm)
        finish = _start(comm, case, call)

        def settle() -> None:
            result = finish()
            if wanted is None:
                assert result is None, f"got {result!r}, not None"
            else:
                if out is not None:
                    assert result is out or case.nested, "the call did not return out"
                leaves = result if case.nested else [result]
                assert len(leaves) == len(wanted), f"{len(leaves)} leaves, not {len(wanted)}"
                for leaf, right in zip(leaves, wanted):
                    samples.assert_same(np.asarray(leaf), right, "the result")
            samples.assert_same(mine.memory, mine.after(wanted), "the memory around it")

        if case.how == "later":
            self._pending.append((case, settle))
        else:
            settle()

    def _message(self, case: _Case, number: int) -> Callable[[], None]:
        """Exchange a message in the background, in the same direction as the call's message."""
        comm = self._comm
        to, source = _ends(case, comm)
        x = np.full(case.counts[0], number + 5 * comm.rank)
        work = comm.sendrecv(x, to, source, tag=case.tag, out=x, async_op=True)

        def settle() -> None:
            wanted = np.full(case.counts[0], number + 5 * source)
            samples.assert_same(work.wait(), wanted, f"message {number} in the background")

        return settle


def _ends(case: _Case, comm: Communicator) -> tuple[int, int]:
    """Return the destination and the source of a message.

    The ranks form a ring; for the largest step they form a line, whose ends have no neighbour.
    """
    if case.step == comm.size:
        after, before = comm.rank + 1, comm.rank - 1
        return after if after < comm.size else NULL, before if before >= 0 else NULL
    return (comm.rank + case.step) % comm.size, (comm.rank - case.step) % comm.size


def _start(comm: Communicator, case: _Case, call: tuple[Any, ...]) -> Callable[[], Any]:
    """Make a call; return a function that waits for the result and returns it."""
    name, x, options = call
    method = getattr(comm, name)
    positional = (x, *options.pop("to"), options.pop("source")) if name == "sendrecv" else (x,)
    if case.how == "later":
        work = method(*positional, **options, async_op=True)
        return lambda: work.wait()
    result = method(*positional, **options)
    return lambda: result


class _Pool:
    """Memory of one rank's call, in which its inputs and outputs are views.

    Attributes:
        memory: the whole memory, as bytes.
    """

    def __init__(self, case: _Case, rank: int, size: int) -> None:
        self._case = case
        self._rank = rank
        self._size = size
        operation = case.operation
        self._gets = operation not in ("reduce", "gather") or rank == case.root
        self._layout = case.layouts[rank]
        lengths = [self._input_length(count, rank) for count in case.counts]
        results = [self._output_length(k) for k in range(len(case.counts))]
        dtypes = [np.dtype(name) for name in case.dtypes]
        room = 64 + 2 * sum(
            (2 * max(n, m) + 48) * d.itemsize for n, m, d in zip(lengths, results, dtypes)
        )
        random = np.random.default_rng([case.seed, rank])
        self.memory = random.integers(0, 256, room // 8 * 8 + 64, np.uint8)
        self.memory = self.memory[-self.memory.ctypes.data % 8 :]
        self._before = self.memory.copy()
        self.xs: list[Any] = []
        self.outs: list[Any] = []
        at = 0
        for k, (n, m, dtype) in enumerate(zip(lengths, results, dtypes)):
            x, out, at = self._place(k, n, m, dtype, at)
            self.xs.append(x)
            self.outs.append(out)
        if case.nested and self._layout == "shifted" and len(self.xs) > 1:
            self._cross(results, dtypes)
        self._inputs = [x.copy() for x in self.xs]

    def _input_length(self, count: int, rank: int) -> int:
        by_rank = self._case.operation in ("gather", "all_gather", "all_to_all", "sendrecv")
        return count + (rank if self._case.uneven and by_rank else 0)

    def _cuts(self, length: int) -> list[slice]:
        return [
            slice(part[0], part[-1] + 1) if len(part) else slice(0, 0)
            for part in np.array_split(np.arange(length), self._size)
        ]

    def _output_length(self, k: int) -> int:
        """Return the number of elements of leaf ``k``'s result on this rank."""
        case, count = self._case, self._case.counts[k]
        mine = len(np.array_split(np.arange(count), self._size)[self._rank])
        every = [self._input_length(count, rank) for rank in range(self._size)]
        if case.operation in ("reduce_scatter", "scatter"):
            return mine
        if case.operation in ("gather", "all_gather"):
            return sum(every)
        if case.operation == "all_to_all":
            return sum(len(np.array_split(np.arange(n), self._size)[self._rank]) for n in every)
        if case.operation == "sendrecv":
            source = self._source()
            return count if source == NULL else every[source]
        return count

    def _source(self) -> int:
        case = self._case
        if case.step == self._size:
            return self._rank - 1 if self._rank else NULL
        return (self._rank - case.step) % self._size

    def _place(
        self, k: int, n: int, m: int, dtype: np.dtype[Any], at: int
    ) -> tuple[Array, Any, int]:
        """Return views for ``x`` (``n`` elements) and ``out`` (``m`` elements), and their end."""
        span = 2 * max(n, m) + 44
        pool = self.memory[at : at + span * dtype.itemsize].view(dtype)
        end = at + -(-span * dtype.itemsize // 8) * 8
        layout, shift = self._layout, self._case.shifts[self._rank]
        x = pool[2 : 2 + n]
        out: Any = None
        if layout in ("same", "view") and n == m:
            out = x if layout == "same" else x[:]
        elif layout in ("start", "same", "view"):
            # Slice one array twice, because NumPy's empty slices begin where their array begins.
            both = pool[2 : 2 + max(n, m)]
            x, out = both[:n], both[:m]
        elif layout == "end":
            out = pool[2 + n : 2 + n + m]
        elif layout == "shifted":
            begin = 2 + shift % (n + 1)
            out = pool[begin : begin + m]
        elif layout == "piece":
            x, out = self._as_piece(k, pool, n, m)
        elif layout == "reversed":
            out = pool[2 : 2 + m][::-1]
        elif layout == "woven":
            x, out = pool[2 : 2 + 2 * n : 2], pool[3 : 3 + 2 * m : 2]
        elif shift % 3:
            out = pool[2 + n : 2 + n + m]
        return x, out, end

    def _as_piece(self, k: int, pool: Array, n: int, m: int) -> tuple[Array, Array]:
        """Return views where ``x`` is this rank's piece of ``out``, or ``out`` a piece of ``x``."""
        if m >= n:
            count = self._case.counts[k]
            before = sum(self._input_length(count, rank) for rank in range(self._rank))
            begin = 2 + min(before, m - n)
            return pool[begin : begin + n], pool[2 : 2 + m]
        begin = 2 + self._cuts(n)[self._rank].start
        return pool[2 : 2 + n], pool[begin : begin + m]

    def _cross(self, results: Sequence[int], dtypes: Sequence[np.dtype[Any]]) -> None:
        """Move the outputs into the memory of other leaves' inputs, which may have other dtypes."""
        starts = [x.ctypes.data - self.memory.ctypes.data for x in self.xs]
        starts = starts[1:] + starts[:1]
        occupied: list[tuple[int, int]] = []
        for k, (m, dtype) in enumerate(zip(results, dtypes)):
            start, nbytes = starts[k] // 8 * 8, m * dtype.itemsize
            clear = all(start >= high or start + nbytes <= low for low, high in occupied)
            own = self.outs[k].ctypes.data - self.memory.ctypes.data
            if not clear or start + nbytes > self.memory.size:
                start = own
            occupied.append((start, start + nbytes))
            self.outs[k] = self.memory[start : start + nbytes].view(dtype)
        spans = sorted(occupied)
        if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
            self.outs = [None] * len(self.outs)

    def inputs(self) -> list[Array]:
        """Return copies of the leaves of ``x`` as they are before the call."""
        return self._inputs

    def expected(self, every: list[list[Array]]) -> list[Array] | None:
        """Return the leaves of this rank's result, or None if the rank gets no result.

        Args:
            every: inputs of each rank.
        """
        case = self._case
        if not self._gets:
            return None
        if case.operation == "sendrecv" and self._source() == NULL:
            return None if self.outs[0] is None else [self.outs[0].copy()]
        return [
            self._result([leaves[k] for leaves in every], self._inputs[k].dtype)
            for k in range(len(case.counts))
        ]

    def _result(self, inputs: list[Array], dtype: np.dtype[Any]) -> Array:
        case, rank = self._case, self._rank
        if case.operation in ("all_reduce", "reduce", "scan", "reduce_scatter"):
            last = rank + 1 if case.operation == "scan" else self._size
            total = np.asarray(samples.expected(case.op, inputs[:last])).astype(dtype, copy=False)
            return total[self._cuts(total.size)[rank]] if "scatter" in case.operation else total
        if case.operation == "broadcast":
            return inputs[case.root]
        if case.operation == "scatter":
            return inputs[case.root][self._cuts(inputs[case.root].size)[rank]]
        if case.operation == "all_to_all":
            return np.concatenate([x[self._cuts(x.size)[rank]] for x in inputs])
        if case.operation == "sendrecv":
            return inputs[self._source()]
        return np.concatenate(inputs)

    def call(self, comm: Communicator) -> tuple[tuple[str, Any, dict[str, Any]], Any]:
        """Return name, ``x`` and options of this rank's call, and its ``out``."""
        case = self._case
        xs, outs = self.xs, self.outs
        if case.tensors:
            tensors = {id(each): _tensor(each) for each in (*xs, *outs) if each is not None}
            xs, outs = ([tensors.get(id(each)) for each in leaves] for leaves in (xs, outs))
        x: Any = xs if case.nested else xs[0]
        out: Any = None
        if self._gets and all(each is not None for each in outs):
            out = outs if case.nested else outs[0]
            if case.nested and all(a is b for a, b in zip(xs, outs)):
                out = x
        self._out = out
        options: dict[str, Any] = {"out": out}
        if case.operation in ("all_reduce", "reduce", "scan", "reduce_scatter"):
            options["op"] = case.op
        if case.operation in ("reduce", "broadcast", "scatter", "gather"):
            options["root"] = case.root
        if case.operation == "scatter" and comm.rank != case.root:
            x = None
        if case.operation == "sendrecv":
            to, source = _ends(case, comm)
            options.update(to=(to,), source=source, tag=case.tag)
        return (case.operation, x, options), out

    def after(self, wanted: list[Array] | None) -> Array:
        """Return the expected content of the memory after the call."""
        memory = self._before
        if wanted is not None and self._out is not None:
            start = self.memory.ctypes.data
            for out, right in zip(self.outs, wanted):
                view = np.ndarray(
                    out.shape, out.dtype, memory, out.ctypes.data - start, out.strides
                )
                view[...] = right
        return memory


def _tensor(array: Array) -> Any:
    """Return a tensor over an array's memory, or the array if PyTorch lacks its strides."""
    import torch

    return array if min(array.strides) < 0 else torch.from_numpy(array)


_OPERATIONS = (
    "all_reduce", "reduce", "scan", "reduce_scatter", "broadcast", "scatter", "gather",
    "all_gather", "all_to_all", "sendrecv",
)  # fmt: skip
# Calls that take only single arrays here: sendrecv receives a structure as a copy.
_SINGLE = ("sendrecv",)
