"""Reductions of gradients that send less: half the bits, the largest elements, low ranks.

Each is a ``reduce`` for :class:`collective.gradients.Gradients`, and so for the adapters built
on it. Those that leave something out keep it and add it to the next gradient (*error
feedback*), so that it comes in later instead of never. All work on arrays of any framework of
the array API, where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.contract.work import Work
from collective.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collective.communicator import Communicator

    from .gradients import Bucket

__all__ = ["Cast", "PowerSGD", "TopK"]


class _Then(Work[None]):
    """A reduction on its way, and what is to be done with what it brings."""

    def __init__(self, work: Work[Any], function: Callable[[], object]) -> None:
        super().__init__("compressed all_reduce")
        self._work = work
        self._function = function

    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)
        if not self._over:
            self._run(self._function)  # type: ignore[arg-type]  # what it returns is not used
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._over or self._work.done()


class Cast:
    """The average, sent and summed in another type of floats: half the bytes in 16 bits.

    Args:
        comm: connects the ranks.
        dtype: ``"float16"``, which is finer, or ``"bfloat16"``, which does not overflow.
    """

    def __init__(self, comm: Communicator, dtype: str = "bfloat16") -> None:
        if dtype not in ("float16", "bfloat16"):
            raise InvalidArgumentError(f"Cast: dtype {dtype!r}; 'float16' or 'bfloat16'.")
        self._comm = comm
        self._dtype = dtype

    def rebind(self, comm: Communicator) -> None:
        """Go on with another communicator."""
        self._comm = comm

    def __call__(self, bucket: Bucket) -> Work[Any]:
        array = bucket.array
        xp = _namespace(array)
        kind = getattr(xp, self._dtype, None)
        if kind is None:
            raise UnsupportedError(
                f"Cast: {xp.__name__} has no {self._dtype}. Use dtype='float16', or PyTorch."
            )
        # Divided before it is sent, or a sum of float16 might overflow.
        small = xp.astype(array / self._comm.size, kind)
        work = self._comm.all_reduce(small, out=small, async_op=True)

        def spread() -> None:
            array[...] = xp.astype(small, array.dtype)

        return _Then(work, spread)


class TopK:
    """The average of the elements of each bucket that are largest on each rank.

    Each rank sends its own choice, as values and places. What it leaves out it keeps for the
    next pass. Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.

    Args:
        comm: connects the ranks.
        share: of the elements that is sent, above 0, at most 1.
    """

    def __init__(self, comm: Communicator, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise InvalidArgumentError(f"TopK: share {share!r}; above 0, at most 1.")
        self._comm = comm
        self._share = share
        self._left: dict[tuple[int, ...], Any] = {}

    def rebind(self, comm: Communicator) -> None:
        """Go on with another communicator."""
        self._comm = comm

    def __call__(self, bucket: Bucket) -> Work[Any]:
        array, key = bucket.array, tuple(bucket.members)
        xp = _namespace(array)
        whole = array + self._left[key] if key in self._left else xp.asarray(array, copy=True)
        count = max(1, math.ceil(self._share * whole.shape[0]))
        places = _largest(xp, xp.abs(whole), count)
        values = xp.take(whole, places, axis=0)
        whole[places] = 0
        self._left[key] = whole
        size = self._comm.size
        works = [
            self._comm.all_gather(each, counts=[count] * size, async_op=True)
            for each in (values, places)
        ]

        def add() -> None:
            every_value, every_place = (work.wait() for work in works)
            array[...] = 0
            for rank in range(size):
                # A rank's own places are distinct: one addition each.
                part = slice(rank * count, (rank + 1) * count)
                array[every_place[part]] += every_value[part] / size

        return _Then(works[-1], add)


class PowerSGD:
    """The average of low-rank approximations of the gradients of matrices.

    A gradient of ``n × m`` is sent as ``(n + m) × rank`` elements, by one step of subspace
    iteration that starts from the last pass's result. Those that would not become smaller so,
    vectors among them, are averaged as they are. What the approximation leaves out is kept for
    the next pass. Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient
    compression for distributed optimization", NeurIPS 2019, algorithm 1.

    Args:
        comm: connects the ranks.
        rank: of the approximations.
        seed: of the first pass's random matrices, the same on all ranks.
    """

    def __init__(self, comm: Communicator, rank: int = 2, seed: int = 0) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidArgumentError(f"PowerSGD: rank {rank!r}; a positive integer.")
        self._comm = comm
        self._rank = rank
        self._seed = seed
        self._left: dict[int, Any] = {}
        # The factors that passes begin with. They need not be the same on all ranks, as they are
        # not where one has joined: the products are averaged, and the bases that come of them are.
        self._right: dict[int, Any] = {}

    def rebind(self, comm: Communicator) -> None:
        """Go on with another communicator."""
        self._comm = comm

    def __call__(self, bucket: Bucket) -> Work[Any]:
        xp = _namespace(bucket.array)
        matrices, others = {}, []
        for number, view in zip(bucket.members, bucket.views):
            rows = view.shape[0] if view.ndim > 1 else 1
            columns = math.prod(view.shape) // max(1, rows)
            if (rows + columns) * self._rank < rows * columns:
                matrices[number] = xp.reshape(view, (rows, columns))
            else:
                others.append(xp.reshape(view, (-1,)))
        for number, matrix in matrices.items():
            if number in self._left:
                matrix += self._left[number]
            if number not in self._right:
                self._right[number] = self._first(xp, matrix, number)
        left = [matrix @ self._right[number] for number, matrix in matrices.items()]
        packed = _packed(xp, [*left, *others], bucket.array)
        work = self._comm.all_reduce(packed, op="avg", out=packed, async_op=True)

        def decode() -> None:
            parts = _unpacked(packed, [*left, *others])
            for array, part in zip(others, parts[len(left) :]):
                array[...] = part
            self._decode(xp, matrices, parts[: len(left)], bucket.array)

        return _Then(work, decode)

    def _decode(self, xp: Any, matrices: dict[int, Any], left: list[Any], like: Any) -> None:
        """Find the second factors, all ranks together, and multiply."""
        if not matrices:
            return
        bases = [xp.linalg.qr(factor)[0] for factor in left]
        right = [matrix.T @ basis for matrix, basis in zip(matrices.values(), bases)]
        packed = _packed(xp, right, like)
        self._comm.all_reduce(packed, op="avg", out=packed)
        for (number, matrix), basis, part in zip(matrices.items(), bases, _unpacked(packed, right)):
            self._right[number] = xp.asarray(part, copy=True)
            found = basis @ part.T
            self._left[number] = matrix - found
            matrix[...] = found

    def _first(self, xp: Any, matrix: Any, number: int) -> Any:
        """Return a matrix to begin with, orthogonal, and the same on all ranks."""
        generator = np.random.default_rng((self._seed, number))
        drawn = np.linalg.qr(generator.standard_normal((matrix.shape[1], self._rank)))[0]
        made = xp.asarray(drawn, dtype=matrix.dtype)
        return made.to(matrix.device) if hasattr(made, "to") else made


def _largest(xp: Any, array: Any, count: int) -> Any:
    """Return the places of the ``count`` largest elements, in no order."""
    # Sorting takes some ten times as long, but is all that the array API has.
    if hasattr(xp, "topk"):  # PyTorch
        return xp.topk(array, count, sorted=False)[1]
    if hasattr(xp, "argpartition"):  # NumPy, CuPy
        return xp.argpartition(array, array.shape[0] - count)[array.shape[0] - count :]
    return xp.argsort(array, descending=True)[:count]


def _packed(xp: Any, arrays: list[Any], like: Any) -> Any:
    """Return arrays as one, of one dimension."""
    return xp.concat([xp.reshape(array, (-1,)) for array in arrays]) if arrays else like[:0]


def _unpacked(packed: Any, like: list[Any]) -> list[Any]:
    """Return the parts of an array that are of the shapes of others."""
    parts, start = [], 0
    for array in like:
        stop = start + math.prod(array.shape)
        parts.append(packed[start:stop].reshape(array.shape))
        start = stop
    return parts


def _namespace(array: Any) -> Any:
    """Return the functions of the array API for an array's framework."""
    try:
        import array_api_compat
    except ImportError as error:
        raise UnsupportedError(
            "compression: needs the package array-api-compat. pip install array-api-compat"
        ) from error
    return array_api_compat.array_namespace(array)
