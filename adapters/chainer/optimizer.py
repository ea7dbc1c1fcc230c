"""Data-parallel training in several processes: an optimizer with the gradients of all ranks.

The reduction of a bucket of gradients starts in the middle of Chainer's backward pass, as soon as
the bucket and all earlier ones are full. The last bucket is reduced at the end of the pass. The
parts that do not depend on Chainer are in :mod:`collective.gradients`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from collective import CollectiveError, GradientError, InvalidArgumentError, UnsupportedError
from collective.inner import (
    Bucket,
    Gradients,
    NotCopied,
    Parameter,
    ShardPasses,
    StateEntry,
    check_values,
    comm_or_current,
    refuses,
    shares,
)
from collective.training.shard_passes import refuse_joined, seeded

from .backward import watching
from .batch_normalization import SyncBatchNormalization
from .shard_state import ShardState, generators
from .state import (
    MARKS,
    agree,
    broadcast_state,
    compare_parameters,
    distinct_parameters,
    follow_root,
    marks_of,
    persistent_values,
    same_on_all,
    sampled,
)

if TYPE_CHECKING:
    from collective import Communicator, Shards, Work

_MIB = 1 << 20
#: Arguments of ChainerMN's function, and what to write instead.
_CHAINERMNS = {
    "communicator": "use comm=",
    "double_buffering": "leave it out: a step always uses the gradients of its own pass",
    "zero_fill": "leave it out: a missing gradient always counts as zero",
}
# Attributes of the wrapper; all other attributes belong to the optimizer inside.
_OWN = frozenset(
    "actual_optimizer comm _inner _bucket_mib _reduce _parameters _gradients _agreed _syncing "
    "_reduced _passes _layout _held _shard_state _check".split()
)
# A parameter's name, its identity, and its shape, dtype and device.
_Layout = list[tuple[str, int, Any, Any, Any]]


@refuses(_CHAINERMNS)
def create_multi_node_optimizer(
    actual_optimizer: Any,
    comm: Communicator | None = None,
    *,
    bucket_mib: float = 25.0,
    reduce: Callable[[Bucket], Work[Any] | None] | None = None,
    shards: int | None = None,
    check: bool = False,
) -> MultiNodeOptimizer:
    """Return an optimizer that steps with the average of all ranks' gradients.

    Collective: every rank calls it.

    Args:
        actual_optimizer: any optimizer of ``chainer.optimizers``, set up or not.
        comm: communicator that connects the ranks; None: the current one. The gradients use a
            duplicate of it (a ``dup()``), so that calls on this communicator, in links and loss
            functions, never mix with their reductions.
        bucket_mib: MiB of gradients that are reduced together. If a core is idle to reduce it
            meanwhile, the first bucket has at most 1 MiB, so that its reduction starts early.
        reduce: function that reduces a full bucket, such as :class:`collective.compression.Cast`;
            by default the average over the ranks. Give it a communicator of its own.
        shards: number of virtual shards (:class:`collective.Shards`); ``update(lossfun, *args)``
            then calls ``lossfun(shard, *args)`` once for each shard of this rank, and averages the
            gradients over all shards. They have the same bits on any number of ranks.
        check: if true, the ranks compare a digest of all weights and of the optimizer's state after
            each step, with ``shards`` also of persistent values, and raise an error that names the
            first difference. Without it, each step compares one element of each parameter.

    Raises:
        MismatchError: the ranks' models differ.
        UnsupportedError: ``shards`` with ``reduce``, or with a ``SyncBatchNormalization`` or a
            ``Split`` in the target.
    """
    return MultiNodeOptimizer(
        actual_optimizer, comm, bucket_mib=bucket_mib, reduce=reduce, shards=shards, check=check
    )


class MultiNodeOptimizer(NotCopied):
    """Optimizer whose gradients are averaged over the ranks during the backward pass.

    It has all attributes of the optimizer inside, and its state: :meth:`serialize` writes the state
    of the plain optimizer. Hooks (weight decay, gradient clipping) see the averaged gradients.

    ``setup`` is collective: all ranks get rank 0's parameters and persistent values. A parameter
    that is not initialised yet gets rank 0's value at the moment of its initialisation. So the
    first step is a full step, but a forward pass that initialises parameters has to do so on all
    ranks. Parameters may be loaded on rank 0 between ``setup`` and the first step. If this step is
    ``update(lossfun, …)``, it sends them to all ranks. A step without a loss function raises an
    error in this case.

    Every initialised parameter takes part in every reduction. A parameter that a rank has not used
    counts as zero there, as in ``GradientMethod.update``.

    Parameters may be added, deleted, replaced, frozen or converted later, if all ranks do so before
    the same step. In each step the ranks compare the parameters, and one element of each.

    There are three ways to make a step, all with the same result:

    - ``update(lossfun, *args)``, as the updaters do: the reduction overlaps with the pass;
    - ``backward(loss)``, then ``update()``, in your own loop: it overlaps as well;
    - ``loss.backward()``, then ``update()``: the reduction runs in ``update``, after the pass.

    Attributes:
        actual_optimizer, comm: arguments of the constructor.
    """

    instead = (
        "Copy its target and its actual_optimizer, and call create_multi_node_optimizer for the "
        "copies; or save it by chainer.serializers."
    )
    _gradients: Gradients | None

    def __init__(
        self,
        actual_optimizer: Any,
        comm: Communicator | None = None,
        *,
        bucket_mib: float = 25.0,
        reduce: Callable[[Bucket], Work[Any] | None] | None = None,
        shards: int | None = None,
        check: bool = False,
    ) -> None:
        if reduce is not None and shards is not None:
            raise UnsupportedError(
                "create_multi_node_optimizer: reduce with shards. Leave one of them out: the "
                "average of shards is that over the shards."
            )
        if not bucket_mib > 0:
            raise InvalidArgumentError(
                f"create_multi_node_optimizer: bucket_mib is {bucket_mib!r} (expected a positive "
                "number)."
            )
        self.actual_optimizer = actual_optimizer
        self.comm = comm_or_current(comm, "create_multi_node_optimizer")
        self._inner = self.comm.dup()
        self._bucket_mib = bucket_mib
        self._passes = None if shards is None else ShardPasses(shards, self._inner, generators())
        self._reduce = reduce or self._passes
        self._check = check
        self._forget()
        if actual_optimizer.target is not None:
            self._prepare()

    @property
    def shards(self) -> Shards | None:
        """Division of the virtual shards among the ranks; None without ``shards=``."""
        return None if self._passes is None else self._passes.shards

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # the wrapper's attribute is not set yet
            raise AttributeError(name)
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_optimizer, name, value)

    # -- the model ------------------------------------------------------------------------

    def setup(self, link: Any) -> MultiNodeOptimizer:
        """Set the target link, and give every rank the parameters and persistent values of rank 0.

        Collective: every rank calls it, with the same link.

        Raises:
            MismatchError: the ranks' links differ.
        """
        self.actual_optimizer.setup(link)
        self._forget()
        self._prepare()
        return self

    def broadcast(self) -> None:
        """Give every rank the parameters and persistent values of rank 0 once more.

        Collective: every rank calls it, after some ranks have changed theirs.
        """
        broadcast_state(self.target, self.comm)

    def rebind(self, comm: Communicator) -> None:
        """Continue over another communicator, such as that of the surviving ranks after a loss.

        Parameters are not sent. They have to be the same on all ranks already, as
        :class:`collective.elastic.State` makes them. A ``SyncBatchNormalization`` in the target
        continues over the new communicator, too.

        Collective: every rank of ``comm`` calls it.
        """
        self.comm = comm
        self._inner = comm.dup()
        self._gradients = None
        # A rank may have joined that has not made a step yet, so the next step sends or compares
        # the parameters again.
        self._syncing, self._reduced, self._agreed = True, False, False
        if isinstance(self._reduce, shares.Rebindable):
            self._reduce.rebind(comm.dup())
        if self.target is None:
            return
        follow_root(self.target, self._inner)
        self.target.cleargrads()
        for link in self.target.links():
            if isinstance(link, shares.Rebindable):
                link.rebind(comm)

    def _forget(self) -> None:
        # Names and parameters, in the order in which the engine puts them into buckets.
        self._parameters: list[tuple[str, Any]] = []
        self._held: list[tuple[str, Any]] = []
        self._layout: _Layout = []
        self._gradients = None
        self._shard_state: Any = None  # ShardState of the target, from the first step with shards
        self._agreed = False  # whether the ranks' parameters are verified to be equal
        self._syncing = True
        self._reduced = False  # whether the gradients are averaged over all ranks

    def _prepare(self) -> None:
        if self._passes is not None:
            # Imported here, so that programs without shards run no code of it.
            from .splits.split import Split

            parts = self.target.namedlinks()
            refuse_joined("create_multi_node_optimizer", parts, SyncBatchNormalization, Split)
        broadcast_state(self.target, self.comm)
        # Over the optimizer's own communicator, a rank that initialises a parameter alone meets
        # the others in a reduction, and all of them raise an error at once.
        follow_root(self.target, self._inner)

    # -- the parameters -------------------------------------------------------------------

    def _describe(self, named: list[tuple[str, Any]]) -> _Layout:
        """Return what the layout of the buckets depends on, and what no rank may change alone."""
        return [
            (name, id(p), array.shape, array.dtype, p.device)
            if (array := p.raw_array) is not None
            else (name, id(p), None, None, None)
            for name, p in named
        ]

    def _note(self, named: list[tuple[str, Any]], changed: _Layout | None) -> int:
        """Return a number that is the same on all ranks while their parameters are.

        Args:
            named: parameters of the target.
            changed: their layout, if it is no longer that of the buckets.
        """
        start = 0
        if changed is not None:
            plain = [(name, *map(str, rest)) for name, _, *rest in changed]
            start = zlib.crc32(repr(plain).encode())
        return zlib.crc32(sampled(named, self.actual_optimizer.t), start)

    def _agree_now(self) -> None:
        """Compare the ranks' parameters by a message, and follow changes that all ranks made."""
        named = distinct_parameters(self.target)
        layout = self._describe(named)
        changed = self._gradients is not None and layout != self._layout
        note = self._note(named, layout if changed else None)
        if not same_on_all(note, self._inner) or changed:
            self._compare(named)
        if self._gradients is None or changed:
            self._lay_out(named, layout)

    def _compare(self, named: list[tuple[str, Any]]) -> None:
        """Refuse parameters that some ranks have changed since ``setup``."""
        known = {identity for _, identity, *_ in self._layout}
        compare_parameters("update", named, self._inner, [id(p) in known for _, p in named])
        self._agreed = True

    def _lay_out(self, named: list[tuple[str, Any]], layout: _Layout) -> Gradients:
        """Return new buckets for the gradients of the parameters that are initialised."""
        initialised = [(n, p) for n, p in named if p.is_initialized]
        # Gradients mostly arrive in the reverse of the order in which links were made.
        initialised.reverse()
        if not initialised:
            raise InvalidArgumentError(
                "update: the target has no initialised parameter. Make a forward pass first."
            )
        devices = {str(parameter.device) for _, parameter in initialised}
        if len(devices) > 1:
            raise InvalidArgumentError(
                f"update: the parameters are on {', '.join(sorted(devices))} (expected one "
                "device). Move the target to one device, or give each part its own optimizer."
            )
        strange = [
            name for name, p in initialised if p.layout is not None or p.xp is chainer.chainerx
        ]
        if strange:
            raise UnsupportedError(
                f"update: {', '.join(strange[:10])} have arrays of ChainerX or a memory layout of "
                "cuDNN (supported are arrays of NumPy and CuPy in C order). Convert them first."
            )
        described = [Parameter(name, tuple(p.shape), p.dtype.name) for name, p in initialised]
        if self._reduce is None:
            # The ranks' notes travel with the last gradients, and cost no message.
            described.append(Parameter("(notes of the ranks)", (MARKS,), described[-1].dtype))
        self._gradients = Gradients(
            self._inner,
            described,
            like=initialised[0][1].array,
            bucket_bytes=max(1, int(self._bucket_mib * _MIB)),
            reduce=self._reduce,
        )
        # The list also keeps the parameters, so that no other one gets their identity.
        self._parameters, self._layout, self._held = initialised, layout, named
        return self._gradients

    # -- a step ---------------------------------------------------------------------------

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """Make a step with the gradients of all ranks.

        Collective: every rank calls it.

        Args:
            lossfun: function that computes the loss of ``args`` and ``kwds``, on this rank's
                samples. With ``shards`` its first argument is the number of a shard. Without it
                the gradients must have been computed already. They are reduced now, if they are
                not reduced yet.

        Raises:
            InvalidArgumentError: the call is within ``no_sync()``, or has no loss function with
                ``shards``. Or a pass of a shard has changed state that cannot be folded; every
                rank raises this.
            MismatchError: the ranks' parameters differ; every rank raises it.
            CollectiveError: the reduction failed; no step has been made.
        """
        if not self._syncing:
            raise InvalidArgumentError(
                "update: called within no_sync(), where each rank has its own gradients. Leave "
                "no_sync() before the last backward pass of the step."
            )
        if lossfun is not None:
            if not self._agreed:
                # Without shards persistent values stay: statistics of a rank's own batches may be
                # restored from a snapshot.
                broadcast_state(self.target, self.comm, persistent=self._passes is not None)
                self._agreed = True
            if self._passes is None:
                self._compute(lossfun, *args, **kwds)
            else:
                self._compute_shards(self._passes, lossfun, *args, **kwds)
        elif self._passes is not None:
            raise InvalidArgumentError(
                "update: called without a loss function, with shards. Pass a function of a shard: "
                "update(lossfun, *args) calls lossfun(shard, *args) for each shard of this rank. "
                "A Pipeline, which makes its own passes, cannot be combined with shards."
            )
        elif not (self._reduced and self._untouched()):
            with self.reducing():
                pass
        self._reduced = False
        if self._draws():
            number = np.random.randint(2**31) if self.comm.rank == 0 else None
            with seeded(self._inner.broadcast_object(number), generators()):
                self.actual_optimizer.update(None, *args, **kwds)
        else:
            self.actual_optimizer.update(None, *args, **kwds)
        if self._check:
            remedy = "Change weights and the optimizer on all ranks in the same way."
            check_values(self._inner, list(self._entries()), remedy, "update(check=True)")

    def _entries(self) -> Iterator[StateEntry]:
        """Yield all values that have to be the same on all ranks after a step."""
        for name, parameter in distinct_parameters(self.target):
            # The state is the cause of the weights, so it is compared first.
            rule = parameter.update_rule
            if rule is not None:
                state = {"t": rule.t, **rule.hyperparam.get_dict(), **(rule.state or {})}
                for key, value in sorted(state.items()):
                    yield StateEntry(f"{key} of {name} in the optimizer", _plain(value))
            yield StateEntry(name, parameter.array, rule is not None and rule.enabled)
        if self._passes is not None:
            for name, link, attribute in persistent_values(self.target):
                yield StateEntry(name, _plain(vars(link)[attribute]))

    def _draws(self) -> bool:
        """Return whether the step may draw random numbers, which must be the same on all ranks."""
        if self._passes is None and self.comm.size == 1:
            return False
        rules = {p.update_rule for _, p in self._parameters} - {None}
        kinds = set(map(type, rules))
        for owner in (self.actual_optimizer, *rules):
            for hooks in (owner._hookable._pre_update_hooks, owner._hookable._post_update_hooks):
                kinds.update(map(type, hooks.values()))
        return any(
            kind.__name__ == "GradientNoise" or not kind.__module__.startswith("chainer.")
            for kind in kinds
        )

    def _compute(self, lossfun: Callable[..., Any], *args: Any, **kwds: Any) -> None:
        """Compute a loss and its gradients, and reduce them."""
        loss = lossfun(*args, **kwds)
        if getattr(self.actual_optimizer, "_use_cleargrads", True):
            self.target.cleargrads()
        else:
            self.target.zerograds()
        self.backward(loss)

    def _compute_shards(
        self, passes: ShardPasses, lossfun: Callable[..., Any], *args: Any, **kwds: Any
    ) -> None:
        """Compute the gradients of this rank's shards, and their average over all shards."""
        self._agree_now()
        if self._shard_state is None:
            self._shard_state = ShardState(self.target, passes)
        with self._shard_state.step(self.actual_optimizer.t):
            for shard in passes:
                with self._shard_state.passing(shard):
                    self._compute(lossfun, shard, *args, **kwds)
            if not passes.shards.mine:
                assert self._gradients is not None
                self._gradients.shadow()
                self._take(self._gradients, self.actual_optimizer._loss_scale)

    def backward(self, loss: Any) -> None:
        """Compute the gradients of ``loss`` and reduce them, with the optimizer's loss scale.

        Collective, except within :meth:`no_sync`.
        """
        with self.reducing():
            loss.backward(loss_scale=self.actual_optimizer._loss_scale)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of ``backward`` in the body, on this rank only.

        The next pass outside of the body reduces the sum.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Reduce gradients while a backward pass in the body computes them.

        Collective: every rank enters it. At the end, ``grad`` of each parameter is the average. The
        body may make one backward pass; make earlier passes within :meth:`no_sync`.

        Raises:
            GradientError: a second pass in the body has added to gradients that are already
                reduced. Or the optimizer has shards, whose passes are those of :meth:`update`.
            MismatchError: the ranks' parameters differ.
        """
        if not self._syncing:
            yield
            return
        if self._passes is not None and not self._passes.running:
            raise GradientError(
                "backward: a pass outside of update(lossfun), with shards "
                f"[rank {self.comm.rank} of {self.comm.size}]. update(lossfun, *args) calls "
                "lossfun(shard, *args), and makes the backward pass, for each shard of this rank."
            )
        named = distinct_parameters(self.target)
        if not self._agreed:
            self._compare(named)
        if self._passes is None and self._reduce is not None:
            self._agree_now()
        layout = self._describe(named)
        if self._gradients is not None and self._passes is None and layout != self._layout:
            yield
            self._follow(self._gradients, named, layout)
            self._reduced = True
            return
        gradients = self._gradients or self._lay_out(named, layout)
        ready: set[int] = set()

        def complete(number: int, gradient: Any) -> Any:
            view = gradients.views[number]
            if number in ready:
                raise GradientError(
                    f"backward: the gradient of {gradients.parameters[number].name} is already "
                    "reduced, and a second pass adds to it. Use no_sync() around all backward "
                    "passes of a step but the last."
                )
            if gradient.shape != view.shape or gradient.dtype != view.dtype:
                return None  # Chainer raises an error for this gradient
            if gradient is not view:
                view[...] = gradient
            ready.add(number)
            gradients.ready(number)
            return view

        def target(number: int) -> Any:
            # A second pass will be refused. Until then it must not overwrite reduced gradients.
            return None if number in ready else gradients.views[number]

        leaves = {p.node: number for number, (_, p) in enumerate(self._parameters)}
        try:
            with watching(leaves, complete, target):
                yield
            self._finish(gradients, ready)
        except BaseException:
            # Peers may fail because this rank stops here; the error that is raised is the cause.
            with contextlib.suppress(CollectiveError):
                gradients.drop()
            raise
        self._reduced = True

    def _finish(self, gradients: Gradients, ready: set[int]) -> None:
        """Reduce the remaining gradients, wait, and give the parameters their gradients."""
        scale = self._scale(ready)
        for number, ((_, parameter), view) in enumerate(zip(self._parameters, gradients.views)):
            if number in ready:
                continue
            if parameter.grad is not view:
                view[...] = 0 if parameter.grad is None else parameter.grad
            gradients.ready(number)
        if self._reduce is None:
            self._exchange_notes(gradients, self._held, None)
        else:
            gradients.finish(partial=self._passes is not None and not self._passes.is_last)
        self._take(gradients, scale)

    def _exchange_notes(
        self, gradients: Gradients, named: list[tuple[str, Any]], changed: _Layout | None
    ) -> None:
        """Finish a reduction, and compare the notes that came with it.

        Raises:
            MismatchError: the ranks' parameters differ; every rank raises it.
        """
        number = len(self._parameters)
        marks = marks_of(self._note(named, changed))
        view = gradients.views[number]
        view[...] = self.target.xp.array(marks, view.dtype)
        gradients.ready(number)
        gradients.finish()
        # The buckets may have been laid out again.
        if changed is not None or not agree(gradients.views[number]):
            self._compare(named)

    def _follow(self, gradients: Gradients, named: list[tuple[str, Any]], layout: _Layout) -> None:
        """Reduce the gradients of a pass whose parameters are not those of the buckets.

        Ranks whose parameters are unchanged reduce the old buckets meanwhile. So this rank reduces
        them first, with zeros, and its note tells the others about the change. If all ranks have
        made the same change, they reduce the gradients in new buckets.
        """
        old = {id(view) for view in gradients.views}
        for _, parameter in named:
            if id(parameter.grad) in old:
                parameter.grad = parameter.grad.copy()
        for number in range(len(self._parameters)):
            gradients.views[number][...] = 0
            gradients.ready(number)
        self._exchange_notes(gradients, named, layout)
        self._finish(self._lay_out(named, layout), set())

    def _take(self, gradients: Gradients, scale: float | None) -> None:
        """Give the parameters their reduced gradients."""
        for (_, parameter), view in zip(self._parameters, gradients.views):
            parameter.grad = view
            # The step divides by the scale, also for a parameter that only other ranks have used.
            parameter._loss_scale = scale

    def _scale(self, ready: set[int]) -> float | None:
        """Return the factor of the loss, which only the parameters in use have recorded."""
        used = [self._parameters[number][1] for number in ready]
        used = used or [p for _, p in self._parameters if p.grad is not None]
        scale: float | None = (used[0] if used else self.actual_optimizer)._loss_scale
        return scale

    def _untouched(self) -> bool:
        """Return whether all gradients are unchanged since the end of :meth:`reducing`."""
        gradients = self._gradients
        return gradients is not None and all(
            parameter.grad is view
            for (_, parameter), view in zip(self._parameters, gradients.views)
        )


def _plain(value: Any) -> Any:
    """Return a value that has a digest: an array or a number, and a text for other objects."""
    arrays = chainer.get_array_types()
    return value if isinstance(value, (*arrays, bool, int, float, str)) else repr(value)
