"""mpi4jax's functions over :mod:`collective.adapters.jax.functional`.

Two derivatives of mpi4jax differ from this package's. The transpose of its ``allreduce`` is the
identity, and it refuses forward mode for ``sendrecv``. :func:`_linear` expresses both.
"""

from __future__ import annotations

import atexit
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from mpi4py import MPI

from collective.adapters.jax import functional as F

_World = MPI.Intracomm
Array = Any
atexit.register(jax.effects_barrier)


def allreduce(x: Array, op: str, *, comm: _World = MPI.COMM_WORLD) -> Array:
    if op != MPI.SUM:
        return F.all_reduce(x, comm.inner, op)
    return _linear(x, lambda a: F.all_reduce(a, comm.inner), lambda g: g)


def allgather(x: Array, *, comm: _World = MPI.COMM_WORLD) -> Array:
    return F.all_gather(jnp.asarray(x)[None], comm.inner)


def alltoall(x: Array, *, comm: _World = MPI.COMM_WORLD) -> Array:
    _check_first_axis(x, comm, "Alltoall input must have shape (nproc, ...)")
    return F.all_to_all(x, comm.inner)


def barrier(*, comm: _World = MPI.COMM_WORLD) -> None:
    F.barrier(comm.inner)


def bcast(x: Array, root: int, *, comm: _World = MPI.COMM_WORLD) -> Array:
    return F.broadcast(x, comm.inner, root)


def gather(x: Array, root: int, *, comm: _World = MPI.COMM_WORLD) -> Array:
    result = F.gather(jnp.asarray(x)[None], comm.inner, root)
    return result if comm.rank == root else x + result


def reduce(x: Array, op: str, root: int, *, comm: _World = MPI.COMM_WORLD) -> Array:
    result = F.reduce(x, comm.inner, root, op)
    return result if comm.rank == root else x + result


def scan(x: Array, op: str, *, comm: _World = MPI.COMM_WORLD) -> Array:
    return F.scan(x, comm.inner, op)


def scatter(x: Array, root: int, *, comm: _World = MPI.COMM_WORLD) -> Array:
    if comm.rank == root:
        _check_first_axis(x, comm, "Scatter input must have shape (nproc, ...)")
        return F.scatter(x, comm.inner, root)[0]
    # mpi4jax takes a piece here, and this package an array of the root's shape.
    return F.scatter(jnp.broadcast_to(x, (comm.size, *jnp.shape(x))), comm.inner, root)[0]


def send(x: Array, dest: int, *, tag: int = 0, comm: _World = MPI.COMM_WORLD) -> None:
    F.send(x, dest, comm.inner, tag)


def recv(
    x: Array,
    source: int,
    *,
    tag: int = 0,
    comm: _World = MPI.COMM_WORLD,
    status: MPI.Status | None = None,
) -> Array:
    _record(status, source)
    return F.recv(comm.inner, source, tag, like=x)


def sendrecv(
    sendbuf: Array,
    recvbuf: Array,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    comm: _World = MPI.COMM_WORLD,
    status: MPI.Status | None = None,
) -> Array:
    _record(status, source)

    def there(x: Array) -> Array:
        return F.sendrecv(x, dest, source, comm.inner, sendtag)

    def back(g: Array) -> Array:
        return F.sendrecv(g, source, dest, comm.inner, sendtag)

    return _linear(sendbuf, there, back, tangent=_refuse)


def has_cuda_support() -> bool:
    return False


has_sycl_support = has_cuda_support


# -- helpers -----------------------------------------------------------------------------------


def _check_first_axis(x: Array, comm: _World, text: str) -> None:
    if jnp.shape(x)[:1] != (comm.size,):
        raise ValueError(text)


def _record(status: MPI.Status | None, source: int) -> None:
    if status is not None:
        status.source = source  # every call names its source


def _refuse(x: Array) -> NoReturn:
    raise RuntimeError("sendrecv cannot be used with forward-mode autodiff")


_primitive = Primitive("mpi4jax")


def _linear(x: Array, forward: Any, transpose: Any, tangent: Any = None) -> Array:
    """Return ``forward(x)``, with another transpose than JAX would derive."""
    x = jnp.asarray(x)
    return _primitive.bind(x, forward=forward, transpose=transpose, tangent=tangent or forward)


def _abstract(x: Any, **_: Any) -> Any:
    return x, jax.make_jaxpr(F.barrier)().effects


def _jvp(primals: Any, tangents: Any, *, forward: Any, transpose: Any, tangent: Any) -> Any:
    (x,), (t,) = primals, tangents
    return (
        _linear(x, forward, transpose, tangent),
        _linear(t, tangent, transpose, tangent),
    )


def _transpose(g: Any, x: Any, *, forward: Any, transpose: Any, tangent: Any) -> Any:
    return [_linear(ad.instantiate_zeros(g), transpose, forward)]


def _batch(args: Any, dims: Any, **rules: Any) -> Any:
    return _primitive.bind(*args, **rules), dims[0]


def _run(x: Any, *, forward: Any, **_: Any) -> Any:
    return forward(x)


_primitive.def_impl(_run)
_primitive.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=False))
