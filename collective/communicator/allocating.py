"""Memory that a transport reduces without copies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np

from collective.errors import DtypeError, ShapeError, UnsupportedError
from collective.memory import dtypes
from collective.memory.annotations import Array, Framework, Like, NumpyArray
from collective.memory.arrays import adapter_of
from collective.request import Request

from .calls import Calls
from .foreign_names import explained
from .plan import Planned

__all__ = ["Allocating"]

L = TypeVar("L", bound=Array)


class Allocating(Calls):
    """The part of a communicator that makes memory."""

    @overload
    def empty(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        like: Literal["numpy"] | None = None,
    ) -> NumpyArray: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: object = "float32", *, like: L) -> L: ...

    @overload
    def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, like: Framework
    ) -> Any: ...

    @explained
    def empty(
        self, shape: int | Sequence[int], dtype: Any = "float32", like: Like | None = None
    ) -> Any:
        """Return an uninitialised array in memory that the transport reduces without copies.

        On ``shm`` every rank sees the others' parts: collectives on such arrays, and on
        contiguous views of them, move each byte once. On ``nccl`` it is memory of the GPU that
        NCCL has registered, where its version can. Elsewhere it is ordinary memory. It is freed
        when the last rank has dropped its array.

        Collective: every rank calls it, with one shape and dtype.

        Args:
            shape: the array's shape.
            dtype: a name (``"bfloat16"``), or a NumPy or PyTorch dtype.
            like: the framework, as its name or an array; NumPy by default. On a transport that
                takes arrays of the CPU and of GPUs, an array on a GPU or ``"cuda"`` asks for
                the GPU's memory.

        Raises:
            AllocationError: there is not enough; on every rank.
            UnsupportedError: it is to be on a GPU, and the transport has no such memory to share.
            MismatchError: shapes or dtypes differ.

        See Also:
            MPI_Win_allocate_shared, ncclMemAlloc.
        """
        name = str(dtype).rpartition(".")[2] if not isinstance(dtype, type) else dtype.__name__
        kind = dtypes.BY_NAME.get(name)
        if kind is None:
            try:
                kind = dtypes.from_numpy(np.dtype(dtype))
            except TypeError:
                raise DtypeError(f"empty: dtype {dtype!r} {self._who}.") from None
        try:
            given = shape if isinstance(shape, Sequence) else (shape,)
            dimensions = tuple(operator.index(length) for length in given)
        except TypeError:
            dimensions = (-1,)
        if min(dimensions, default=0) < 0:
            raise ShapeError(
                f"empty: shape {shape!r}; an integer or some, none of them negative {self._who}."
            )
        on_gpu = self._wants_gpu(like)
        if on_gpu and not self._enqueues:
            raise UnsupportedError(
                f"empty: memory of a GPU; backend {self._backend.name!r} has none that ranks share "
                f"{self._who}. Make the array with its framework: calls take it as it is."
            )
        adapter = self._adapter(like, on_gpu)
        count = int(np.prod(dimensions, dtype=np.int64))
        nbytes = count * kind.itemsize
        request = Request("empty", kind, dimensions, device="cuda" if on_gpu else None)
        made: list[Any] = []

        def run() -> Any:
            def allocate(src: None, dst: None, seconds: float) -> None:
                method = self._backend.empty_device if on_gpu else self._backend.empty
                made.append(method(nbytes, request, seconds))

            self._carry(Planned(request, allocate), None, None, self.timeout)
            return adapter.wrap(made[0].view(kind.storage).reshape(dimensions), kind)

        return self._go("empty", run, False)

    @explained
    def adopt(
        self, nbytes: int, move: Callable[[], int]
    ) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Make memory that a framework allocated symmetric, as if it came from :meth:`empty`.

        Collective: every rank calls it, with one length.

        Args:
            nbytes: the length of the memory on the host.
            move: puts the memory into POSIX shared memory and returns a descriptor that is open
                until this returns. Called once all ranks are here and there is room for it.

        Returns:
            The memory's bytes, mapped once more: collectives on views of this array move each
            byte once. None on every rank where the transport has no symmetric memory, or if
            one of the ranks could not: then the memory can be used as before.

        Raises:
            MismatchError: lengths differ.
        """
        request = Request("adopt", None, (nbytes,))
        made: list[Any] = []

        def run() -> Any:
            def share(src: None, dst: None, seconds: float) -> None:
                made.append(self._backend.adopt(nbytes, move, request, seconds))

            self._carry(Planned(request, share), None, None, self.timeout)
            return made[0]

        adopted: np.ndarray[Any, np.dtype[np.uint8]] | None
        adopted = self._go("adopt", run, False)  # type: ignore[assignment]
        return adopted

    def _wants_gpu(self, like: Any) -> bool:
        """Whether :meth:`empty` is for the GPU: all ranks have to mean the same."""
        if not self._on_device:
            return False
        if like is None or isinstance(like, str):
            return not self._on_host or like in ("cuda", "cupy")
        array, _ = adapter_of(like).view(like)
        return not isinstance(array, np.ndarray)
