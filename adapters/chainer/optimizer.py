"""Data-parallel training in several processes: an optimizer with the gradients of all ranks.

The reduction of a bucket of gradients starts in the middle of Chainer's backward pass, as soon as
the bucket is full. What is not Chainer's own is in :mod:`collective.gradients`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import chainer

from collective.contract.copying import NotCopied
from collective.errors import (
    CollectiveError,
    GradientError,
    InvalidArgumentError,
    MismatchError,
    UnsupportedError,
)
from collective.training.gradients import Bucket, Gradients, Parameter
from collective.training.rebinding import Rebindable

from .backward import watching
from .state import broadcast_state, distinct_parameters, follow_root

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.contract.work import Work

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer"]

_MIB = 1 << 20
# What is the wrapper's; all other attributes are those of the optimizer inside.
_OWN = frozenset(
    "actual_optimizer comm _inner _bucket_mib _reduce _parameters _gradients _agreed _syncing "
    "_reduced".split()
)


def create_multi_node_optimizer(
    actual_optimizer: Any,
    comm: Communicator,
    *,
    bucket_mib: float = 25.0,
    reduce: Callable[[Bucket], Work[Any] | None] | None = None,
) -> MultiNodeOptimizer:
    """Return an optimizer that steps with the average of all ranks' gradients.

    Collective: every rank calls it.

    Args:
        actual_optimizer: any of ``chainer.optimizers``, set up or not.
        comm: connects the ranks. The gradients take a communicator of their own (a ``dup()``),
            so that calls on this one, in links and loss functions, never mix with theirs.
        bucket_mib: MiB of gradients that are reduced together; the first bucket is of 1 MiB at
            most, so that it is on its way early, where a core is idle to reduce it.
        reduce: what to do with a full bucket, such as :class:`collective.compression.Cast`; by
            default the average over the ranks. Give it a communicator of its own.

    Raises:
        MismatchError: the ranks' models differ.
    """
    return MultiNodeOptimizer(actual_optimizer, comm, bucket_mib=bucket_mib, reduce=reduce)


class MultiNodeOptimizer(NotCopied):
    """An optimizer whose gradients are averaged over the ranks, beside the backward pass.

    It has all attributes of the optimizer inside, and its state: what :meth:`serialize` writes
    is the bare optimizer's. Hooks (weight decay, gradient clipping) see the averaged gradients.

    ``setup`` is collective: all ranks get rank 0's parameters and persistent values, and a
    parameter that is not initialised yet gets rank 0's in the moment in which it is. So the first
    step is a step; but a forward pass that initialises parameters has to do so on all ranks.
    Parameters that are loaded on rank 0 between ``setup`` and the first step go to all ranks with
    that step, if it is ``update(lossfun, …)``; without a loss function they are an error.

    Every initialised parameter takes part in every reduction. One that a rank has not used counts
    as zero there, as in ``GradientMethod.update``.

    Three ways to make a step, all with the same result:

    - ``update(lossfun, *args)``, as the updaters do: overlapped;
    - ``backward(loss)``, then ``update()``: overlapped, in a loop of one's own;
    - ``loss.backward()``, then ``update()``: reduced in ``update``, after the pass.

    Attributes:
        actual_optimizer, comm: as given.
    """

    instead = (
        "Copy its target and its actual_optimizer, and call create_multi_node_optimizer for the "
        "copies; or save it by chainer.serializers."
    )
    _gradients: Gradients | None

    def __init__(
        self,
        actual_optimizer: Any,
        comm: Communicator,
        *,
        bucket_mib: float = 25.0,
        reduce: Callable[[Bucket], Work[Any] | None] | None = None,
    ) -> None:
        if not bucket_mib > 0:
            raise InvalidArgumentError(
                f"create_multi_node_optimizer: bucket_mib {bucket_mib!r}; a positive number."
            )
        self.actual_optimizer = actual_optimizer
        self.comm = comm
        self._inner = comm.dup()
        self._bucket_mib = bucket_mib
        self._reduce = reduce
        self._forget()
        if actual_optimizer.target is not None:
            self._prepare()

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not there yet
            raise AttributeError(name)
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_optimizer, name, value)

    # -- the model ------------------------------------------------------------------------

    def setup(self, link: Any) -> MultiNodeOptimizer:
        """Set the target link, and give every rank rank 0's parameters and persistent values.

        Collective: every rank calls it, with the same link.

        Raises:
            MismatchError: the ranks' links differ.
        """
        self.actual_optimizer.setup(link)
        self._forget()
        self._prepare()
        return self

    def broadcast(self) -> None:
        """Give every rank rank 0's parameters and persistent values, once more.

        Collective: every rank calls it; after some of them have changed theirs.
        """
        broadcast_state(self.target, self.comm)

    def rebind(self, comm: Communicator) -> None:
        """Go on over another communicator, such as one of the ranks that are left after a loss.

        Parameters are not sent: they have to be the same on all ranks, as
        :class:`collective.elastic.State` makes them. ``SyncBatchNormalization`` in the target
        goes on over it, too.

        Collective: every rank of ``comm`` calls it.
        """
        self.comm = comm
        self._inner = comm.dup()
        self._gradients = None
        # A rank may have joined that has not made a step yet.
        self._syncing, self._reduced, self._agreed = True, False, False
        if isinstance(self._reduce, Rebindable):
            self._reduce.rebind(comm.dup())
        if self.target is None:
            return
        follow_root(self.target, comm)
        self.target.cleargrads()
        for link in self.target.links():
            if isinstance(link, Rebindable):
                link.rebind(comm)

    def _forget(self) -> None:
        # With their names, in the order of their buckets, which is the engine's.
        self._parameters: list[tuple[str, Any]] = []
        self._gradients = None
        self._agreed = False  # whether the ranks' parameters are known to be equal
        self._syncing = True
        self._reduced = False  # whether the gradients are those of all ranks

    def _prepare(self) -> None:
        broadcast_state(self.target, self.comm)
        follow_root(self.target, self.comm)

    def _compare(self) -> None:
        """Refuse parameters that were changed on some ranks since ``setup``."""
        found = 0
        for _, parameter in distinct_parameters(self.target):
            if parameter.is_initialized:
                array = chainer.get_device("@numpy").send(parameter.array)
                found = zlib.crc32(array.tobytes(), found)
        every = self.comm.all_gather_object(found)
        others = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
        if others:
            raise MismatchError(
                f"update: the parameters of rank(s) {others} are not rank 0's "
                f"[rank {self.comm.rank} of {self.comm.size}]. Load snapshots on every rank, or "
                "call broadcast() after loading."
            )
        self._agreed = True

    def _lay_out(self) -> Gradients:
        """Return the buckets, made anew if other parameters have been initialised."""
        found = [(n, p) for n, p in distinct_parameters(self.target) if p.is_initialized]
        # Gradients mostly arrive in the reverse of the order in which links were made.
        found.reverse()
        known = [id(p) for _, p in self._parameters]
        if self._gradients is not None and [id(p) for _, p in found] == known:
            return self._gradients
        if not found:
            raise InvalidArgumentError("update: the target has no initialised parameter.")
        devices = {str(parameter.device) for _, parameter in found}
        if len(devices) > 1:
            raise InvalidArgumentError(
                f"update: parameters on {', '.join(sorted(devices))}; all must be on one device. "
                "Move the target there, or give each part an optimizer of its own."
            )
        strange = [name for name, p in found if p.layout is not None or p.xp is chainer.chainerx]
        if strange:
            raise UnsupportedError(
                f"update: {', '.join(strange[:10])} of ChainerX or in a memory layout of cuDNN; "
                "supported are arrays of NumPy and CuPy in C order."
            )
        self._parameters = found
        self._gradients = Gradients(
            self._inner,
            [Parameter(name, tuple(p.shape), p.dtype.name) for name, p in found],
            like=found[0][1].array,
            bucket_bytes=max(1, int(self._bucket_mib * _MIB)),
            reduce=self._reduce,
        )
        return self._gradients

    # -- a step ---------------------------------------------------------------------------

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """Make a step with the gradients of all ranks.

        Collective: every rank calls it.

        Args:
            lossfun: computes the loss of ``args`` and ``kwds``, on this rank's samples. Without
                it the gradients must have been computed; they are reduced now, if they are not.

        Raises:
            InvalidArgumentError: within ``no_sync()``.
            CollectiveError: of the reduction; no step has been made.
        """
        if not self._syncing:
            raise InvalidArgumentError(
                "update: called within no_sync(), where each rank has gradients of its own. Leave "
                "it for the last backward pass of the step."
            )
        if lossfun is not None:
            if not self._agreed:
                # Not the statistics of each rank's batches, which a snapshot may have restored.
                broadcast_state(self.target, self.comm, persistent=False)
                self._agreed = True
            loss = lossfun(*args, **kwds)
            if getattr(self.actual_optimizer, "_use_cleargrads", True):
                self.target.cleargrads()
            else:
                self.target.zerograds()
            self.backward(loss)
            del loss
        elif not (self._reduced and self._untouched()):
            with self.reducing():
                pass
        self._reduced = False
        self.actual_optimizer.update(None, *args, **kwds)

    def backward(self, loss: Any) -> None:
        """Compute the gradients of ``loss`` and reduce them, with the optimizer's loss scale.

        Collective, but within :meth:`no_sync`.
        """
        with self.reducing():
            loss.backward(loss_scale=self.actual_optimizer._loss_scale)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of ``backward`` in the body add up on this rank alone.

        The next pass outside of it reduces the sum.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Reduce gradients while a backward pass in the body computes them.

        Collective: every rank enters it. At the end ``grad`` of each parameter is the average.
        One pass in the body; those before are for :meth:`no_sync`.

        Raises:
            GradientError: a second pass in the body has added to gradients that are reduced.
            MismatchError: the ranks' parameters differ.
        """
        if not self._syncing:
            yield
            return
        if not self._agreed:
            self._compare()
        gradients = self._lay_out()
        ready: set[int] = set()

        def complete(number: int, gradient: Any) -> Any:
            view = gradients.views[number]
            if number in ready:
                raise GradientError(
                    f"backward: the gradient of {gradients.parameters[number].name} is reduced "
                    "already, and a second pass adds to it. Use no_sync() around all but the last "
                    "backward pass of a step."
                )
            if gradient.shape != view.shape or gradient.dtype != view.dtype:
                return None  # Chainer has an error for it
            if gradient is not view:
                view[...] = gradient
            ready.add(number)
            gradients.ready(number)
            return view

        def target(number: int) -> Any:
            # A second pass is refused, but what the first has reduced shall stay until then.
            return None if number in ready else gradients.views[number]

        leaves = {p.node: number for number, (_, p) in enumerate(self._parameters)}
        try:
            with watching(leaves, complete, target):
                yield
            self._finish(gradients, ready)
        except BaseException:
            # What peers do not answer any more is their error; the one at hand is the cause.
            with contextlib.suppress(CollectiveError):
                gradients.drop()
            raise
        self._reduced = True

    def _finish(self, gradients: Gradients, ready: set[int]) -> None:
        """Reduce what is not on its way yet, wait, and give the parameters their gradients."""
        scale = self._scale(ready)
        for number, ((_, parameter), view) in enumerate(zip(self._parameters, gradients.views)):
            if number in ready:
                continue
            if parameter.grad is not view:
                view[...] = 0 if parameter.grad is None else parameter.grad
            gradients.ready(number)
        gradients.finish()
        for (_, parameter), view in zip(self._parameters, gradients.views):
            parameter.grad = view
            # By which the step divides, also where only other ranks have used the parameter.
            parameter._loss_scale = scale

    def _scale(self, ready: set[int]) -> float | None:
        """Return by what the loss was multiplied, of which only parameters in use know."""
        used = [self._parameters[number][1] for number in ready]
        used = used or [p for _, p in self._parameters if p.grad is not None]
        scale: float | None = (used[0] if used else self.actual_optimizer)._loss_scale
        return scale

    def _untouched(self) -> bool:
        """Tell whether all gradients are as :meth:`reducing` has left them."""
        gradients = self._gradients
        return gradients is not None and all(
            parameter.grad is view
            for (_, parameter), view in zip(self._parameters, gradients.views)
        )
