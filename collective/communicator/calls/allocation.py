"""Calls that make memory which a transport reduces without copies: ``empty`` and ``adopt``."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective.deadline import Deadline
from collective.errors import DtypeError, ShapeError, UnsupportedError
from collective.memory import dtypes
from collective.memory.arrays import adapter_of
from collective.request import Request

from ..path import Path
from .call import Call, Planned
from .views import adapter_for


class Empty(Call):
    """See :meth:`Communicator.empty`."""

    operation = "empty"

    def __init__(self, path: Path, shape: Any, dtype: Any, like: Any) -> None:
        self.path = path
        self._dtype = self._element_type(dtype)
        self._shape = self._dimensions(shape)
        self._on_gpu = self._wants_gpu(like)
        if self._on_gpu and not path.enqueues:
            raise UnsupportedError(
                f"empty: GPU memory was requested; backend {path.backend.name!r} has none that "
                f"ranks share {path.who}. Make the array with its framework: calls accept it, too."
            )
        self._adapter = adapter_for(like, self._on_gpu)

    def _element_type(self, dtype: Any) -> dtypes.DType:
        name = str(dtype).rpartition(".")[2] if not isinstance(dtype, type) else dtype.__name__
        known = dtypes.BY_NAME.get(name)
        if known is not None:
            return known
        try:
            return dtypes.from_numpy(np.dtype(dtype))
        except TypeError:
            raise DtypeError(f"empty: unknown dtype {dtype!r} {self.path.who}.") from None

    def _dimensions(self, shape: Any) -> tuple[int, ...]:
        try:
            lengths = shape if isinstance(shape, Sequence) else (shape,)
            dimensions = tuple(operator.index(length) for length in lengths)
        except TypeError:
            dimensions = (-1,)
        if min(dimensions, default=0) < 0:
            raise ShapeError(
                f"empty: shape {shape!r}; expected one or more integers, none of them negative "
                f"{self.path.who}."
            )
        return dimensions

    def _wants_gpu(self, like: Any) -> bool:
        """Return whether the caller requests GPU memory; all ranks must request the same kind."""
        if not self.path.on_device:
            return False
        if like is None or isinstance(like, str):
            return not self.path.on_host or like in ("cuda", "cupy")
        array, _ = adapter_of(like).view(like)
        return not isinstance(array, np.ndarray)

    def run(self, deadline: Deadline) -> Any:
        path, dtype = self.path, self._dtype
        nbytes = math.prod(self._shape) * dtype.itemsize
        device = "cuda" if self._on_gpu else None
        request = Request(self.operation, dtype, self._shape, device=device)
        memory: list[Any] = []

        def allocate(src: None, dst: None, deadline: Deadline) -> None:
            method = path.backend.empty_device if self._on_gpu else path.backend.empty
            memory.append(method(nbytes, request, deadline))

        path.carry(Planned(request, allocate, fixed=True), None, None, deadline)
        return self._adapter.wrap(memory[0].view(dtype.storage).reshape(self._shape), dtype)


class Adopt(Call):
    """See :meth:`Communicator.adopt`."""

    operation = "adopt"

    def __init__(self, path: Path, nbytes: int, move: Callable[[], int]) -> None:
        self.path = path
        self._nbytes = nbytes
        self._move = move

    def run(self, deadline: Deadline) -> Any:
        path = self.path
        request = Request(self.operation, None, (self._nbytes,))
        memory: list[Any] = []

        def share(src: None, dst: None, deadline: Deadline) -> None:
            memory.append(path.backend.adopt(self._nbytes, self._move, request, deadline))

        path.carry(Planned(request, share, fixed=True), None, None, deadline)
        return memory[0]
