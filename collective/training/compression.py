"""Reductions of gradients that send less: half the bits, the largest elements, low ranks.

Each class is a ``reduce`` for :class:`collective.gradients.Gradients`, and so for the adapters
built on it. Some classes leave a part of a gradient out. They keep this part and add it to the next
gradient (*error feedback*), so that it arrives later instead of never. All classes work on
arrays of any framework of the array API, on the device where the arrays are.

An element may overflow or underflow on one rank only. So it causes neither an error nor a warning
of NumPy, as in a reduction without compression.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.contract.work import Work
from collective.errors import InvalidArgumentError, UnsupportedError
from collective.start.session import comm_or_current

if TYPE_CHECKING:
    from collective.communicator import Communicator

    from .gradients import Bucket


class _Then(Work[None]):
    """Reduction in flight, and the function that processes its result."""

    def __init__(self, work: Work[Any], function: Callable[[], object]) -> None:
        super().__init__("compressed all_reduce")
        self._work = work
        self._function = function

    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)
        if not self._over:
            with np.errstate(all="ignore"):
                self._run(self._function)  # type: ignore[arg-type]  # the return value is not used
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._over or self._work.done()


class Cast:
    """Average that is sent and summed in a smaller float type: 16 bits halve the bytes.

    Args:
        comm: communicator that connects the ranks; None: the current one.
        dtype: ``"float16"``, which is more precise, or ``"bfloat16"``, which does not overflow.
    """

    def __init__(self, comm: Communicator | None = None, dtype: str = "bfloat16") -> None:
        if dtype not in ("float16", "bfloat16"):
            raise InvalidArgumentError(
                f"Cast: dtype is {dtype!r} (expected 'float16' or 'bfloat16')."
            )
        self._comm = comm_or_current(comm, "Cast")
        self._dtype = dtype

    def rebind(self, comm: Communicator) -> None:
        """Continue with another communicator."""
        self._comm = comm

    @np.errstate(all="ignore")
    def __call__(self, bucket: Bucket) -> Work[Any]:
        array = bucket.array
        xp = _namespace(array)
        kind = getattr(xp, self._dtype, None)
        if kind is None:
            raise UnsupportedError(
                f"Cast: {xp.__name__} has no {self._dtype}. Use dtype='float16', or PyTorch."
            )
        # The division comes before the sum, because a sum of float16 might overflow.
        small = xp.astype(array / self._comm.size, kind)
        work = self._comm.all_reduce(small, out=small, async_op=True)

        def spread() -> None:
            array[...] = xp.astype(small, array.dtype)

        return _Then(work, spread)


class TopK:
    """Average of the elements of each bucket that are largest on each rank.

    Each rank selects its own elements and sends their values and positions. The rank keeps the
    other elements for the next pass. Stich, Cordonnier, Jaggi, "Sparsified SGD with memory",
    NeurIPS 2018.

    Args:
        comm: communicator that connects the ranks; None: the current one.
        share: share of the elements that is sent, above 0 and at most 1.
    """

    def __init__(self, comm: Communicator | None = None, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise InvalidArgumentError(
                f"TopK: share is {share!r} (expected a number above 0 and at most 1)."
            )
        self._comm = comm_or_current(comm, "TopK")
        self._share = share
        # By the gradients' numbers, because the buckets are laid out again after the first pass.
        self._left: dict[int, Any] = {}

    def rebind(self, comm: Communicator) -> None:
        """Continue with another communicator."""
        self._comm = comm

    @np.errstate(all="ignore")
    def __call__(self, bucket: Bucket) -> Work[Any]:
        array = bucket.array
        xp = _namespace(array)
        for number, view in zip(bucket.members, bucket.views):
            if number in self._left:
                view += self._left[number]
        count = max(1, math.ceil(self._share * array.shape[0]))
        places = _largest(xp, xp.abs(array), count)
        values = xp.take(array, places, axis=0)
        array[places] = 0
        for number, view in zip(bucket.members, bucket.views):
            self._left[number] = xp.asarray(view, copy=True)
        size = self._comm.size
        works = [
            self._comm.all_gather(payload, counts=[count] * size, async_op=True)
            for payload in (values, places)
        ]

        def add() -> None:
            every_value, every_place = (work.wait() for work in works)
            array[...] = 0
            for rank in range(size):
                # The positions from one rank are distinct, so each element is added once.
                part = slice(rank * count, (rank + 1) * count)
                array[every_place[part]] += every_value[part] / size

        return _Then(works[-1], add)


class PowerSGD:
    """Average of low-rank approximations of the gradients of matrices.

    A gradient of ``n × m`` is sent as ``(n + m) × rank`` elements. One step of subspace iteration
    computes them, starting from the last pass's result. Gradients that would not become smaller
    this way, vectors among them, are averaged without compression. The class keeps the error of
    the approximation for the next pass. Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank
    gradient compression for distributed optimization", NeurIPS 2019, algorithm 1.

    Args:
        comm: communicator that connects the ranks; None: the current one.
        rank: rank of the approximations.
        seed: seed of the first pass's random matrices, the same on all ranks.
    """

    def __init__(self, comm: Communicator | None = None, rank: int = 2, seed: int = 0) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidArgumentError(f"PowerSGD: rank is {rank!r} (expected a positive integer).")
        self._comm = comm_or_current(comm, "PowerSGD")
        self._rank = rank
        self._seed = seed
        self._left: dict[int, Any] = {}
        # The factors that each pass starts from. They may differ between ranks, as they do after
        # a rank has joined. The products are averaged, and so every rank computes the same bases.
        self._right: dict[int, Any] = {}

    def rebind(self, comm: Communicator) -> None:
        """Continue with another communicator."""
        self._comm = comm

    @np.errstate(all="ignore")
    def __call__(self, bucket: Bucket) -> Work[Any]:
        xp = _namespace(bucket.array)
        # A matrix may be a copy: the memory of a gradient need not be in C order.
        matrices, others, targets = {}, [], []
        for number, view in zip(bucket.members, bucket.views):
            rows = view.shape[0] if view.ndim > 1 else 1
            columns = math.prod(view.shape) // max(1, rows)
            if (rows + columns) * self._rank < rows * columns:
                matrices[number] = xp.reshape(view, (rows, columns))
                targets.append(view)
            else:
                others.append(view)
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
            self._decode(xp, matrices, parts[: len(left)], targets, bucket.array)

        return _Then(work, decode)

    def _decode(
        self, xp: Any, matrices: dict[int, Any], left: list[Any], targets: list[Any], like: Any
    ) -> None:
        """Compute the second factors together with all ranks, and multiply both factors."""
        if not matrices:
            return
        bases = [xp.linalg.qr(factor)[0] for factor in left]
        right = [matrix.T @ basis for matrix, basis in zip(matrices.values(), bases)]
        packed = _packed(xp, right, like)
        self._comm.all_reduce(packed, op="avg", out=packed)
        parts = _unpacked(packed, right)
        for (number, matrix), basis, part, view in zip(matrices.items(), bases, parts, targets):
            self._right[number] = xp.asarray(part, copy=True)
            approximation = basis @ part.T
            self._left[number] = matrix - approximation
            view[...] = xp.reshape(approximation, view.shape)

    def _first(self, xp: Any, matrix: Any, number: int) -> Any:
        """Return an orthogonal matrix to start from, the same on all ranks."""
        generator = np.random.default_rng((self._seed, number))
        drawn = np.linalg.qr(generator.standard_normal((matrix.shape[1], self._rank)))[0]
        factor = xp.asarray(drawn, dtype=matrix.dtype)
        return factor.to(matrix.device) if hasattr(factor, "to") else factor


def _largest(xp: Any, array: Any, count: int) -> Any:
    """Return the positions of the ``count`` largest elements, in no particular order."""
    # Sorting takes about ten times as long, but the array API has no other function for this.
    if hasattr(xp, "topk"):  # PyTorch
        return xp.topk(array, count, sorted=False)[1]
    if hasattr(xp, "argpartition"):  # NumPy, CuPy
        return xp.argpartition(array, array.shape[0] - count)[array.shape[0] - count :]
    return xp.argsort(array, descending=True)[:count]


def _packed(xp: Any, arrays: list[Any], like: Any) -> Any:
    """Return arrays joined into one array of one dimension."""
    return xp.concat([xp.reshape(array, (-1,)) for array in arrays]) if arrays else like[:0]


def _unpacked(packed: Any, like: list[Any]) -> list[Any]:
    """Split an array into parts with the shapes of the arrays in ``like``."""
    parts, start = [], 0
    for array in like:
        stop = start + math.prod(array.shape)
        parts.append(packed[start:stop].reshape(array.shape))
        start = stop
    return parts


def _namespace(array: Any) -> Any:
    """Return the array API's functions for an array's framework."""
    try:
        import array_api_compat
    except ImportError as error:
        raise UnsupportedError(
            "compression: the package array-api-compat is missing. Install it: "
            "pip install array-api-compat"
        ) from error
    return array_api_compat.array_namespace(array)
