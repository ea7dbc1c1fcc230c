"""What every call of a communicator goes through, whatever it does."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from collective import call as call_module
from collective.arrays import Adapter, adapter_like, adapter_of
from collective.backend import Backend, Failure
from collective.buffer import Buffer
from collective.call import Call, Disagreement, differing
from collective.dtypes import DType
from collective.errors import (
    CollectiveError,
    DtypeError,
    InvalidArgumentError,
    MismatchError,
    RankError,
    ShapeError,
)
from collective.recorder import Recorder
from collective.work import Lane, Work

__all__ = ["Calls", "Output"]

Array = np.ndarray[Any, Any]
T = TypeVar("T")

# Distinct calls (operation, dtype, shape, options) that are remembered. A program makes
# some dozens; one whose shapes keep changing must not grow for ever.
_REMEMBERED = 1024


class Output:
    """Where a result goes: an array of the user's or a new one.

    Attributes:
        flat: contiguous, of the result's length; what the transport writes to.
    """

    __slots__ = ("_adapter", "_array", "_dtype", "_given", "flat")

    def __init__(
        self,
        what: str,
        out: Any,
        adapter: Adapter,
        shape: tuple[int, ...],
        dtype: DType,
    ) -> None:
        self._given = out
        self._dtype = dtype
        self._adapter = adapter
        if out is None:
            self._array = np.empty(shape, dtype.storage)
            self.flat = self._array.ravel()
            return
        array, found = adapter_of(out).output(out)
        if found is not dtype:
            raise DtypeError(f"{what}: out has dtype {found}; the result has {dtype}.")
        if array.shape != shape:
            raise ShapeError(f"{what}: out has shape {array.shape}; the result has {shape}.")
        self._array = array
        if array.flags.carray:
            self.flat = array.ravel()
            return
        if array.size > 1 and 0 in array.strides:
            raise InvalidArgumentError(
                f"{what}: out is an expanded view, several of whose elements are one; pass "
                "an array of its own memory."
            )
        self.flat = np.empty(array.size, dtype.storage)

    def finish(self) -> Any:
        """Return the result as the caller wants it."""
        if self._given is None:
            return self._adapter.wrap(self._array, self._dtype)
        if self.flat.base is not self._array and not np.may_share_memory(self.flat, self._array):
            self._array[...] = self.flat.reshape(self._array.shape)
        return self._given


class _Kept(NamedTuple):
    """A call on views that has been made before: what it took to make it."""

    x: Callable[[], Any]
    x_dtype: np.dtype[Any]
    x_shape: tuple[int, ...]
    out: Callable[[], Any]
    out_dtype: np.dtype[Any]
    out_shape: tuple[int, ...]
    prepared: Prepared


#: Input, output and what else the transport's method takes, up to the timeout.
Prepared = tuple[Buffer, Buffer, tuple[Any, ...]]


class Calls:
    """State of a communicator and the path of a call through it."""

    rank: int
    size: int
    timeout: float

    def __init__(self, backend: Backend, timeout: float, check: str = "auto") -> None:
        self.rank = backend.rank
        self.size = backend.size
        self.timeout = timeout
        self.capabilities = backend.capabilities
        self._backend = backend
        self._check = check
        # Whether fixed-size calls need a round of their own to be compared.
        self._agree_first = check == "always" and not backend.capabilities.checks_calls
        # Whether calls whose sizes may differ do: always, where the transport compares nothing.
        self._agree_sizes = not backend.capabilities.checks_calls
        # Whether a broadcast tells what it brings in a message before it.
        self._heads = self._agree_sizes and not self._agree_first
        self._plans: dict[Any, Any] = {}
        self._repeated: dict[Any, _Kept] = {}
        self._owned: dict[Any, tuple[DType, tuple[Any, ...]]] = {}
        self._lane = Lane(f"collective-{backend.name}-{backend.rank}")
        self._lanes: dict[Any, Lane] = {}
        self.recorder = Recorder(f"rank {self.rank} of {self.size} over {backend.name}")
        backend.observe(self.recorder)

    # -- running ------------------------------------------------------------------------

    def _go(self, what: str, run: Callable[[], T], async_op: bool) -> T | Work[T]:
        """Run a prepared collective now, or in its turn."""
        if async_op or not self._lane.idle:
            work = self._lane.submit(what, _with_site(run))
            return work if async_op else work.wait()
        return run()

    def _transport(self, method: Callable[..., Work[Any] | None], *args: Any) -> None:
        """Call the transport."""
        try:
            work = method(*args)
            if work is not None:
                work.wait()
        except (CollectiveError, Disagreement):
            raise
        except BaseException:
            self._half_done()
            raise

    def _half_done(self) -> None:
        """Break the communicator: nobody can tell what the peers still expect of this rank."""
        self._backend.abort(Failure("failed", self.rank, traceback.format_exc()))

    def _collective(self, method: Callable[..., Work[Any] | None], call: Call, *args: Any) -> None:
        """Call the transport for something on which all ranks have to agree entirely."""
        # _recorded and _transport once more, not called: small messages all come this way.
        recorder = self.recorder
        try:
            if self._agree_first:
                self._agree(call, args[-1])
            recorder.begin(call)
            work = method(*args)
            if work is not None:
                work.wait()
            recorder.end()
        except Disagreement as difference:
            recorder.end()
            self._mismatch(difference.headers)
        except CollectiveError:
            raise
        except BaseException:
            self._half_done()
            raise

    def _recorded(self, method: Callable[..., Work[Any] | None], *args: Any) -> None:
        """Call the transport for a collective whose last arguments are its call and timeout."""
        self.recorder.begin(args[-2], method == self._backend.agree)
        try:
            self._transport(method, *args)
        except Disagreement:
            self.recorder.end()
            raise
        self.recorder.end()

    def _agree(self, call: Call, timeout: float) -> None:
        """Compare ``call`` on all ranks."""
        self._recorded(self._backend.agree, call, timeout)

    def _sizes(self, call: Call, timeout: float) -> list[dict[str, Any]] | None:
        """Compare ``call`` on all ranks; return their headers if they differ."""
        try:
            self._agree(call, timeout)
        except Disagreement as difference:
            return difference.headers
        return None

    def _about(self, call: Call | None, what: str, root: int | None) -> Call:
        """Return the call of a head: like ``call``, and the same on ranks that know less of it."""
        key = "about", what, call, root
        about: Call | None = self._plans.get(key)
        if about is None:
            known = Call(what, root=root) if call is None else call
            about = self._remember(key, known.comparing(root=root))
        return about

    # -- errors ---------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return f"[rank {self.rank} of {self.size}]"

    def _mismatch(self, headers: Sequence[dict[str, Any]]) -> NoReturn:
        name = headers[self.rank]["operation"]
        raise MismatchError(
            f"{name}: the ranks made different calls {self._who}:\n"
            + differing(dict(enumerate(headers)))
            + "\nEvery rank must make the same collective calls in the same order."
        ) from None

    def _rank(self, what: str, name: str, rank: Any) -> int:
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise RankError(f"{what}: {name} {rank!r} is not an integer {self._who}.")
        if not 0 <= rank < self.size:
            raise RankError(
                f"{what}: {name} {rank}; this communicator has ranks 0 to {self.size - 1} "
                f"{self._who}."
            )
        return int(rank)

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise InvalidArgumentError(f"timeout: {timeout!r}; a positive number of seconds.")
        return float(timeout)

    def _remember(self, key: Any, plan: T) -> T:
        if len(self._plans) >= _REMEMBERED:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    # -- repeated calls -------------------------------------------------------------------
    # A training step makes the same calls again and again, and what is found out about one
    # holds for the next. Where both arrays are contiguous views (of symmetric memory, say), the
    # buffers are kept too, for as long as the arrays live: such a view can be neither moved nor
    # resized. An array that owns its memory could, and a buffer over it would keep it alive.

    def _kept(self, key: Any, x: Any, out: Any) -> Prepared | None:
        """Return what was kept for this call, if the arrays are such.

        Args:
            key: the call without its arrays.
        """
        if type(x) is not np.ndarray or type(out) is not np.ndarray:
            return None
        if x.base is None and out.base is None:
            return self._alike(key, x, out)
        kept = self._repeated.get((key, id(x), id(out)))
        if kept is None or kept.x() is not x or kept.out() is not out:
            return None
        if x.dtype is not kept.x_dtype or x.shape != kept.x_shape or not out.flags.writeable:
            return None
        if out is not x and (out.dtype is not kept.out_dtype or out.shape != kept.out_shape):
            return None
        return kept.prepared

    def _alike(self, key: Any, x: Array, out: Array) -> Prepared | None:
        """Return what was kept for a call on other arrays that own their memory, like these."""
        if out is x:
            found = self._owned.get((key, x.dtype, x.shape))
            if found is None or not x.flags.carray:
                return None
            dtype, rest = found
            src = Buffer(x if x.ndim == 1 else x.reshape(-1), dtype)
            return src, src, rest
        found = self._owned.get((key, x.dtype, x.shape, out.dtype, out.shape))
        if found is None or not (_is_own(x) and _is_own(out)):
            return None
        dtype, rest = found
        src = Buffer(x if x.ndim == 1 else x.reshape(-1), dtype)
        # Each in memory of its own, they do not overlap.
        return src, Buffer(out if out.ndim == 1 else out.reshape(-1), dtype), rest

    def _keep(self, key: Any, x: Any, out: Any, src: Buffer, dst: Buffer, *rest: Any) -> None:
        """Keep ``rest`` for the next such call, if both arrays are as :meth:`_kept` wants."""
        if type(x) is not np.ndarray or type(out) is not np.ndarray:
            return
        if x.base is None and out.base is None:
            if _is_own(x) and _is_own(out) and _is_all_of(src, x) and _is_all_of(dst, out):
                if len(self._owned) >= _REMEMBERED:
                    self._owned.clear()
                likeness: tuple[Any, ...] = (key, x.dtype, x.shape)
                if out is not x:
                    likeness += (out.dtype, out.shape)
                self._owned[likeness] = src.dtype, rest
            return
        for array, buffer in ((x, src), (out, dst)):
            if not array.flags.carray:
                return
            base = buffer.array.base
            if base is None or base is x or base is out or base is not array.base:
                return
        if len(self._repeated) >= _REMEMBERED:
            self._repeated.clear()
        src.memo, dst.memo = {}, {}
        name = key, id(x), id(out)

        def forget(_: object) -> None:
            self._repeated.pop(name, None)

        self._repeated[name] = _Kept(
            weakref.ref(x, forget), x.dtype, x.shape,
            weakref.ref(out, forget), out.dtype, out.shape, (src, dst, rest),
        )  # fmt: skip

    # -- arrays ---------------------------------------------------------------------------

    def _adapter(self, like: Any) -> Adapter:
        return adapter_like("numpy" if like is None else like)

    @staticmethod
    def _input(array: Array, dtype: DType, output: Output | None, given: Any, x: Any) -> Buffer:
        """Return ``array`` as a buffer that overlaps the output not at all, or entirely."""
        flat = array.ravel()
        if output is not None and given is not None:
            if given is x:
                # In place: one buffer, unless the strides made it two.
                if np.may_share_memory(flat, output.flat):
                    return Buffer(output.flat, dtype)
            elif np.may_share_memory(flat, output.flat):
                flat = flat.copy()
        return Buffer(flat, dtype)


def _is_own(array: Array) -> bool:
    flags = array.flags
    return bool(flags.carray and flags.owndata)


def _is_all_of(buffer: Buffer, array: Array) -> bool:
    """Whether a buffer is what :meth:`Calls._alike` would make of the array."""
    mine = buffer.array is array or buffer.array.base is array
    return mine and buffer.count == array.size and buffer.dtype.storage is array.dtype


def _with_site(run: Callable[[], T]) -> Callable[[], T]:
    """Carry the caller's place in the program into the thread that runs the call."""
    site = call_module.call_site()

    def told() -> T:
        call_module.in_thread.site = site
        return run()

    return told
