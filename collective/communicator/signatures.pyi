# Types of the calls on arrays, for type checkers. The methods themselves, with their docstrings,
# are in communicator.py. A call has one overload for each of these cases: a new result, a result in
# ``out``, both of these in the background, and an ``async_op`` that is not a literal. The programs
# in tests/typing check this file.
#
# fmt: off

from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex, TypeVar, overload

import numpy as np

from collective.contract.work import Work
from collective.memory.annotations import Arrays, Like, Nested
from collective.ops import Op, ReduceOp
from collective.shards import Shards

from . import communicator
from .calls.message import Status

T = TypeVar("T", bound=Arrays)
A = TypeVar("A", bound=Nested)
O = TypeVar("O", bound=Nested)
N = TypeVar("N", bool, int, float, complex)
V = TypeVar("V")
S = TypeVar("S", bound=np.generic)

class Communicator(communicator.Communicator):
    @overload  # type: ignore[override]
    def all_reduce(self, x: T, *, op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[False] = ...) -> T: ...
    @overload
    def all_reduce(self, x: Arrays, *, op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ..., out: O, timeout: float | None = ...,
            async_op: Literal[False] = ...) -> O: ...
    @overload
    def all_reduce(self, x: T, *, op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[True]) -> Work[T]: ...
    @overload
    def all_reduce(self, x: Arrays, *, op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ..., out: O, timeout: float | None = ...,
            async_op: Literal[True]) -> Work[O]: ...
    @overload
    def all_reduce(self, x: T, *, op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ...,
            out: T | None = ..., timeout: float | None = ..., async_op: bool) -> T | Work[T]: ...
    @overload  # type: ignore[override]
    def reduce(self, x: T, *, root: SupportsIndex = ..., op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ..., out: None = ...,
            timeout: float | None = ..., async_op: Literal[False] = ...) -> T | None: ...
    @overload
    def reduce(self, x: Arrays, *, root: SupportsIndex = ..., op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ..., out: O, timeout: float | None = ...,
            async_op: Literal[False] = ...) -> O | None: ...
    @overload
    def reduce(self, x: T, *, root: SupportsIndex = ..., op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ..., out: None = ...,
            timeout: float | None = ..., async_op: Literal[True]) -> Work[T | None]: ...
    @overload
    def reduce(self, x: Arrays, *, root: SupportsIndex = ..., op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ..., out: O, timeout: float | None = ...,
            async_op: Literal[True]) -> Work[O | None]: ...
    @overload
    def reduce(self, x: T, *, root: SupportsIndex = ..., op: Op | ReduceOp = ...,
            order: Literal["rank"] | Shards | None = ..., out: T | None = ...,
            timeout: float | None = ..., async_op: bool) -> T | Work[T | None] | None: ...
    @overload  # type: ignore[override]
    def scan(self, x: T, *, op: Op | ReduceOp = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> T: ...
    @overload
    def scan(self, x: Arrays, *, op: Op | ReduceOp = ..., out: O, timeout: float | None = ...,
            async_op: Literal[False] = ...) -> O: ...
    @overload
    def scan(self, x: T, *, op: Op | ReduceOp = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[T]: ...
    @overload
    def scan(self, x: Arrays, *, op: Op | ReduceOp = ..., out: O, timeout: float | None = ...,
            async_op: Literal[True]) -> Work[O]: ...
    @overload
    def scan(self, x: T, *, op: Op | ReduceOp = ..., out: T | None = ...,
            timeout: float | None = ..., async_op: bool) -> T | Work[T]: ...
    @overload  # type: ignore[override]
    def reduce_scatter(self, x: A, *, op: Op | ReduceOp = ..., counts: Sequence[int] | None = ...,
            axis: int = ...,
            order: Literal["rank"] | Shards | None = ..., out: None = ...,
            timeout: float | None = ..., async_op: Literal[False] = ...) -> A: ...
    @overload
    def reduce_scatter(self, x: Arrays, *, op: Op | ReduceOp = ...,
            counts: Sequence[int] | None = ..., axis: int = ...,
            order: Literal["rank"] | Shards | None = ..., out: O, timeout: float | None = ...,
            async_op: Literal[False] = ...) -> O: ...
    @overload
    def reduce_scatter(self, x: A, *, op: Op | ReduceOp = ..., counts: Sequence[int] | None = ...,
            axis: int = ...,
            order: Literal["rank"] | Shards | None = ..., out: None = ...,
            timeout: float | None = ..., async_op: Literal[True]) -> Work[A]: ...
    @overload
    def reduce_scatter(self, x: Arrays, *, op: Op | ReduceOp = ...,
            counts: Sequence[int] | None = ..., axis: int = ...,
            order: Literal["rank"] | Shards | None = ..., out: O, timeout: float | None = ...,
            async_op: Literal[True]) -> Work[O]: ...
    @overload
    def reduce_scatter(self, x: A, *, op: Op | ReduceOp = ..., counts: Sequence[int] | None = ...,
            axis: int = ...,
            order: Literal["rank"] | Shards | None = ..., out: A | None = ...,
            timeout: float | None = ..., async_op: bool) -> A | Work[A]: ...
    @overload  # type: ignore[override]
    def broadcast(self, x: None, *, root: SupportsIndex = ..., like: Like | None = ...,
            out: None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> Any: ...
    @overload
    def broadcast(self, x: T | None, *, root: SupportsIndex = ..., like: Like | None = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[False] = ...) -> T: ...
    @overload
    def broadcast(self, x: Arrays | None, *, root: SupportsIndex = ..., like: Like | None = ...,
            out: O, timeout: float | None = ..., async_op: Literal[False] = ...) -> O: ...
    @overload
    def broadcast(self, x: None, *, root: SupportsIndex = ..., like: Like | None = ...,
            out: None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[Any]: ...
    @overload
    def broadcast(self, x: T | None, *, root: SupportsIndex = ..., like: Like | None = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[True]) -> Work[T]: ...
    @overload
    def broadcast(self, x: Arrays | None, *, root: SupportsIndex = ..., like: Like | None = ...,
            out: O, timeout: float | None = ..., async_op: Literal[True]) -> Work[O]: ...
    @overload
    def broadcast(self, x: T | None, *, root: SupportsIndex = ..., like: Like | None = ...,
            out: T | None = ..., timeout: float | None = ..., async_op: bool) -> T | Work[T]: ...
    @overload  # type: ignore[override]
    def scatter(self, x: None, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., like: Like | None = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> Any: ...
    @overload
    def scatter(self, x: A | None, *, root: SupportsIndex = ...,
            counts: Sequence[int] | None = ..., axis: int = ..., like: Like | None = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[False] = ...) -> A: ...
    @overload
    def scatter(self, x: Arrays | None, *, root: SupportsIndex = ...,
            counts: Sequence[int] | None = ..., axis: int = ..., like: Like | None = ..., out: O,
            timeout: float | None = ..., async_op: Literal[False] = ...) -> O: ...
    @overload
    def scatter(self, x: None, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., like: Like | None = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[Any]: ...
    @overload
    def scatter(self, x: A | None, *, root: SupportsIndex = ...,
            counts: Sequence[int] | None = ..., axis: int = ..., like: Like | None = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[True]) -> Work[A]: ...
    @overload
    def scatter(self, x: Arrays | None, *, root: SupportsIndex = ...,
            counts: Sequence[int] | None = ..., axis: int = ..., like: Like | None = ..., out: O,
            timeout: float | None = ..., async_op: Literal[True]) -> Work[O]: ...
    @overload
    def scatter(self, x: A | None, *, root: SupportsIndex = ...,
            counts: Sequence[int] | None = ..., axis: int = ..., like: Like | None = ...,
            out: A | None = ..., timeout: float | None = ..., async_op: bool) -> A | Work[A]: ...
    @overload  # type: ignore[override]
    def all_gather(self, x: S, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> np.ndarray[tuple[int], np.dtype[S]]: ...
    @overload
    def all_gather(self, x: A, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[False] = ...) -> A: ...
    @overload
    def all_gather(self, x: N, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> list[N]: ...
    @overload
    def all_gather(self, x: Arrays, *, counts: Sequence[int] | None = ..., axis: int = ..., out: O,
            timeout: float | None = ..., async_op: Literal[False] = ...) -> O: ...
    @overload
    def all_gather(self, x: S, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[np.ndarray[tuple[int], np.dtype[S]]]: ...
    @overload
    def all_gather(self, x: A, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[True]) -> Work[A]: ...
    @overload
    def all_gather(self, x: N, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[list[N]]: ...
    @overload
    def all_gather(self, x: Arrays, *, counts: Sequence[int] | None = ..., axis: int = ..., out: O,
            timeout: float | None = ..., async_op: Literal[True]) -> Work[O]: ...
    @overload
    def all_gather(self, x: A, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: A | None = ..., timeout: float | None = ..., async_op: bool) -> A | Work[A]: ...
    @overload  # type: ignore[override]
    def gather(self, x: S, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> np.ndarray[tuple[int], np.dtype[S]] | None: ...
    @overload
    def gather(self, x: A, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> A | None: ...
    @overload
    def gather(self, x: N, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> list[N] | None: ...
    @overload
    def gather(self, x: Arrays, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: O, timeout: float | None = ...,
            async_op: Literal[False] = ...) -> O | None: ...
    @overload
    def gather(self, x: S, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[np.ndarray[tuple[int], np.dtype[S]] | None]: ...
    @overload
    def gather(self, x: A, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[A | None]: ...
    @overload
    def gather(self, x: N, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[list[N] | None]: ...
    @overload
    def gather(self, x: Arrays, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: O, timeout: float | None = ...,
            async_op: Literal[True]) -> Work[O | None]: ...
    @overload
    def gather(self, x: A, *, root: SupportsIndex = ..., counts: Sequence[int] | None = ...,
            axis: int = ..., out: A | None = ..., timeout: float | None = ...,
            async_op: bool) -> A | Work[A | None] | None: ...
    @overload  # type: ignore[override]
    def all_to_all(self, x: A, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[False] = ...) -> A: ...
    @overload
    def all_to_all(self, x: Arrays, *, counts: Sequence[int] | None = ..., axis: int = ..., out: O,
            timeout: float | None = ..., async_op: Literal[False] = ...) -> O: ...
    @overload
    def all_to_all(self, x: A, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: None = ..., timeout: float | None = ..., async_op: Literal[True]) -> Work[A]: ...
    @overload
    def all_to_all(self, x: Arrays, *, counts: Sequence[int] | None = ..., axis: int = ..., out: O,
            timeout: float | None = ..., async_op: Literal[True]) -> Work[O]: ...
    @overload
    def all_to_all(self, x: A, *, counts: Sequence[int] | None = ..., axis: int = ...,
            out: A | None = ..., timeout: float | None = ..., async_op: bool) -> A | Work[A]: ...
    @overload  # type: ignore[override]
    def barrier(self, *, timeout: float | None = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def barrier(self, *, timeout: float | None = ..., async_op: Literal[True]) -> Work[None]: ...
    @overload
    def barrier(self, *, timeout: float | None = ..., async_op: bool) -> Work[None] | None: ...
    @overload  # type: ignore[override]
    def send(self, x: Nested, dst: SupportsIndex, *, tag: int = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> None: ...
    @overload
    def send(self, x: Nested, dst: SupportsIndex, *, tag: int = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[None]: ...
    @overload
    def send(self, x: Nested, dst: SupportsIndex, *, tag: int = ..., timeout: float | None = ...,
            async_op: bool) -> Work[None] | None: ...
    @overload  # type: ignore[override]
    def recv(self, out: None, src: SupportsIndex, *, tag: int = ..., like: Like | None = ...,
            status: Status | None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> Any: ...
    @overload
    def recv(self, out: O, src: SupportsIndex, *, tag: int = ..., like: Like | None = ...,
            status: Status | None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> O: ...
    @overload
    def recv(self, out: None, src: SupportsIndex, *, tag: int = ..., like: Like | None = ...,
            status: Status | None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[Any]: ...
    @overload
    def recv(self, out: O, src: SupportsIndex, *, tag: int = ..., like: Like | None = ...,
            status: Status | None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[O]: ...
    @overload
    def recv(self, out: O | None, src: SupportsIndex, *, tag: int = ..., like: Like | None = ...,
            status: Status | None = ..., timeout: float | None = ...,
            async_op: bool) -> O | Work[O]: ...
    @overload  # type: ignore[override]
    def sendrecv(self, x: A, dst: SupportsIndex, src: SupportsIndex, *, out: None = ...,
            tag: int = ..., like: Like | None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> A: ...
    @overload
    def sendrecv(self, x: Nested, dst: SupportsIndex, src: SupportsIndex, *, out: O,
            tag: int = ..., like: Like | None = ..., timeout: float | None = ...,
            async_op: Literal[False] = ...) -> O: ...
    @overload
    def sendrecv(self, x: A, dst: SupportsIndex, src: SupportsIndex, *, out: None = ...,
            tag: int = ..., like: Like | None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[A]: ...
    @overload
    def sendrecv(self, x: Nested, dst: SupportsIndex, src: SupportsIndex, *, out: O,
            tag: int = ..., like: Like | None = ..., timeout: float | None = ...,
            async_op: Literal[True]) -> Work[O]: ...
    @overload
    def sendrecv(self, x: A, dst: SupportsIndex, src: SupportsIndex, *, out: A | None = ...,
            tag: int = ..., like: Like | None = ..., timeout: float | None = ...,
            async_op: bool) -> A | Work[A]: ...
    @overload
    def broadcast_object(self, obj: None, *, root: SupportsIndex = ..., pickle: bool = ...,
            timeout: float | None = ...) -> Any: ...
    @overload
    def broadcast_object(self, obj: V | None, *, root: SupportsIndex = ..., pickle: bool = ...,
            timeout: float | None = ...) -> V: ...
    @overload
    def scatter_object(self, objs: None, *, root: SupportsIndex = ..., pickle: bool = ...,
            timeout: float | None = ...) -> Any: ...
    @overload
    def scatter_object(self, objs: Sequence[V] | None, *, root: SupportsIndex = ...,
            pickle: bool = ..., timeout: float | None = ...) -> V: ...
    def gather_object(self, obj: V, *, root: SupportsIndex = ..., pickle: bool = ...,
            timeout: float | None = ...) -> list[V] | None: ...
    def all_gather_object(self, obj: V, *, pickle: bool = ...,
            timeout: float | None = ...) -> list[V]: ...
