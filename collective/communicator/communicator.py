"""The object a user holds: ranks that can call each other.

What it can do is a class a topic, each in a file of its own, on the path that all calls go
(:mod:`.calls`). In front of the methods that make calls are those in C, for what is plain.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import native
from collective.contract.copying import NotCopied
from collective.errors import InvalidArgumentError
from collective.memory.arrays import adapter_of
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NUMPY
from collective.request import Disagreement

from .allocating import Allocating
from .foreign_names import ForeignNames, explain_keyword, explained
from .generations import Generations
from .listener import CallEvent, Hook
from .object_calls import ObjectCalls
from .pieces import Leaf
from .plan import PREPARE, CallForms, Planned, PreparedCall, refuse_unfit
from .reductions import Reductions
from .rows import Rows, split_sizes

__all__ = ["Communicator"]

_PLANNED = (
    "all_reduce", "reduce", "reduce_scatter", "scan", "broadcast", "gather", "all_gather",
    "scatter", "all_to_all", "barrier",
)  # fmt: skip

#: Of those the calls whose result has a shape of its own from the beginning.
_KEEPING = {"all_reduce", "reduce", "reduce_scatter", "scan", "broadcast"}

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.contract.backend import Plan

    # What is in front of the methods is called as they are.
    from .signatures import Signatures as _Methods
else:
    _FUNCTIONS = (
        Reductions.all_reduce, Reductions.reduce, Reductions.scan, Reductions.reduce_scatter,
        ObjectCalls.broadcast, ObjectCalls.scatter, ObjectCalls.all_gather, ObjectCalls.gather,
        ObjectCalls.all_to_all, ObjectCalls.barrier, ObjectCalls.send, ObjectCalls.recv,
        ObjectCalls.sendrecv,
    )  # fmt: skip
    _Methods = native.methods(*_FUNCTIONS) or type(
        "Methods", (), {each.__name__: explained(each) for each in _FUNCTIONS}
    )


class Communicator(_Methods, NotCopied, Reductions, Allocating, Generations, ForeignNames):
    """Ranks 0 to ``size - 1``, connected by one transport.

    Collective calls are made by all ranks in one order. One thread uses a communicator at
    a time; calls with ``async_op=True`` go on in the background, in the order in which they
    were made. An array passed in is never changed unless it is ``out``.

    As a context manager it is closed at the end of the body. An exception in the body
    aborts the peers: their calls raise ``PeerFailedError`` with its traceback.

    A deep copy of an object that has a communicator has the same one. A communicator cannot be
    pickled.

    Attributes:
        rank, size: which of how many this is.
        local_rank, local_size: the same among the ranks of this host.
        host: the name of this host.
        timeout: seconds that a call may take, unless it says otherwise.
        capabilities: what the transport can do.
    """

    instead = (
        "Leave it out of what is pickled (of a model, save the state_dict()), and give what is "
        "loaded a communicator of the process that loads it."
    )

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"<Communicator rank {self.rank} of {self.size} over {self.backend} on {self.host} "
            f"(local rank {self.local_rank} of {self.local_size}){state}>"
        )

    @property
    def check(self) -> str:
        """Whether calls are compared before they are sent: "auto", "always" or "never"."""
        return self._check

    def hook(
        self,
        before: Callable[[CallEvent], object] | None = None,
        after: Callable[[CallEvent, BaseException | None], object] | None = None,
    ) -> Callable[[], None]:
        """Have functions called around every call that reaches the transport.

        For a program's own accounting: how many bytes, how long, how often. They run in the thread
        that makes the call, which is a lane's for what was started with ``async_op=True``, and
        must not make calls themselves. Groups that are made of this communicator have hooks of
        their own.

        An exception of theirs, of whatever class, is the call's on this rank, and breaks the
        communicator: the other ranks get ``PeerFailedError`` with its traceback, in the same call
        if ``before`` has raised it, else in that one or the next. If the call has failed, too, its
        error is the ``__context__`` of that of ``after``.

        Args:
            before: is given the call as it begins.
            after: is given the call and what it raised, or None; not called if ``before`` raised.

        Returns:
            A function that ends it.
        """
        hook = Hook(before, after)
        self.listen(hook)
        return lambda: self._forget(hook)

    def __copy__(self) -> Self:
        """Return another object of the same connections: the instance dict and the C members."""
        twin = self.__class__.__new__(self.__class__)
        vars(twin).update(vars(self))
        for name, each in vars(_Methods).items():
            if inspect.ismemberdescriptor(each):
                setattr(twin, name, getattr(self, name))
        return twin

    def __deepcopy__(self, memo: object) -> Self:
        """Return the communicator itself: a copy of what has one talks to the same ranks."""
        return self

    def plan(self, operation: str, *args: Any, **options: Any) -> PreparedCall:
        """Prepare a collective call, for loops that make the same one on the same arrays.

        ``step = comm.plan("all_reduce", x, out=y)`` sends nothing; ``step()`` makes the call, and
        spares what is found out about arrays and arguments anew in every
        ``comm.all_reduce(x, out=y)``. Other ranks may make the call either way. It goes by the
        memory that the arrays have when ``step()`` is called, and refuses arrays that no longer
        have the shape and dtype they had here.

        Args:
            operation: the method's name: ``"all_reduce"``, ``"reduce"``, ``"reduce_scatter"``,
                ``"scan"``, ``"broadcast"``, ``"gather"``, ``"all_gather"``, ``"scatter"``,
                ``"all_to_all"`` or ``"barrier"``.
            args, options: as the method takes them, but for ``async_op``, which is given when the
                call is made. Arrays are contiguous and on the CPU, no structures; what is cut or
                joined is so along the first axis.

        Raises:
            InvalidArgumentError: there is no such operation, or the arrays do not fit; and
                whatever else the method raises before it sends anything.
        """
        if operation not in _PLANNED:
            raise InvalidArgumentError(
                f"plan: operation {operation!r}; one of {', '.join(_PLANNED)} {self._who}."
            )
        if "async_op" in options:
            raise InvalidArgumentError("plan: async_op is given when the call is made.")
        x = args[0] if args else options.get("x")
        refuse_unfit(operation, x, options.get("out"), options.get("axis", 0))
        method = getattr(self, operation)

        def prepare(out: Any) -> CallForms:
            given = options if out is None else {**options, "out": out}
            make = method(*args, **given, async_op=PREPARE)
            # C remembers what it has found out, too, and needs nothing of Python. It has to be
            # given where the result goes, or it makes a new array in every call.
            whole = out is not None or operation == "barrier"
            in_c = whole and self._door is not None and given.get("timeout") is None
            return CallForms(make, functools.partial(method, *args, **given) if in_c else None)

        keeps = operation in _KEEPING and x is not None
        return PreparedCall(
            operation, prepare, {"x": x, "out": options.get("out")}, keeps, self._who
        )

    # -- in C ---------------------------------------------------------------------------

    @staticmethod
    def _explain(function: Callable[..., Any], error: TypeError) -> TypeError:
        """Return what a call ended in whose arguments may not be the function's."""
        return explain_keyword(function, error) if error.__traceback__ is None else error

    def _find_plan(
        self,
        what: str,
        x: Any,
        op: Any,
        order: str | None,
        root: int | None,
        counts: tuple[int, ...] | None,
    ) -> Planned | None:
        """Return the plan of a plain call, of which C has none yet; None for Python's way."""
        if what == "barrier":
            return self._plan_of_barrier()
        if what == "scan" and op == "avg":
            return None  # it is refused
        view = self._view(what, x)
        if what == "broadcast":
            assert root is not None
            return self._plan_of_broadcast(view.array, view.dtype, root)
        if what == "reduce_scatter":
            rows = Rows(what, view.array, 0)
            sizes = split_sizes(what, rows.length, self.size, None)
            return self._plan_of_pieces(view.array, view.dtype, op, order, rows, sizes, None)
        if op is not None:
            return self._plan_of(what, view.array, view.dtype, op, order, root)
        leaf = Leaf(what, view, 0)
        if what == "scatter":
            assert root is not None
            return self._plan_of_scatter(leaf, root, x)
        if what == "all_to_all":
            sizes = split_sizes(what, leaf.rows.length, self.size, None)
            return self._piece_plan(what, [leaf], 0, None, 0, None, [sizes])
        return self._plan_of_collection(what, view, root, 0, counts)

    @staticmethod
    def _run_plan(plan: Plan, x: Any, out: Any, seconds: float) -> None:
        """Run a plan that is not C's, on plain arrays."""
        dst = None if out is None else _buffer(out)
        work = plan(dst if x is out else None if x is None else _buffer(x), dst, seconds)
        if work is not None:
            work.wait()

    def _recover(
        self,
        what: str,
        x: Any,
        out: Any,
        root: int | None,
        counts: tuple[int, ...] | None,
        error: BaseException,
    ) -> Any:
        """Go on when a call that C has made has failed, as its method would, or raise."""
        self._note_failure(error)
        if not isinstance(error, Disagreement):
            try:
                raise error
            finally:
                del error  # or it would keep itself, and with its frames the arrays of the call
        # Ranks may differ in how much they have, or in having passed None: what then follows has
        # the time that is left.
        entry = self.recorder.entries(1)[0]
        left = max(1e-3, entry.began + self.timeout - time.monotonic())
        if what == "broadcast":
            assert root is not None
            return self._broadcast_one(x, x, root, out, left, False, error)
        if what == "scatter":
            assert root is not None
            mine = x if self.rank == root else None
            call = self._call_of_scatter(mine, root, None, 0, out, None)
            return self._scatter(call, left, False, error)
        if what == "all_to_all":
            return self._exchange(x, None, 0, out, left, False, error)
        if what in ("gather", "all_gather"):
            return self._collect(x, root, counts, 0, out, left, False, error)
        self._mismatch(error.headers)


def _buffer(x: Any) -> Buffer:
    """Return an array that C has found to be plain as a buffer."""
    if type(x) is np.ndarray:  # of one of NumPy's own types, or it would not be plain
        array, dtype = x, BY_NUMPY[x.dtype]
    else:
        array, dtype = adapter_of(x).view(x)
    return Buffer(array if array.ndim == 1 else array.reshape(-1), dtype)
