"""Data-parallel training in one process: a replica of the model on each of several devices."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import chainer
from chainer.dataset import convert

from collective import InvalidArgumentError
from collective.inner import NotCopied

from .state import persistent_values

_Updater: Any = chainer.training.updaters.StandardUpdater


class Replicas(NotCopied):
    """Link and copies of it, one for each device, that compute gradients at the same time.

    In your own loop, use it with an optimizer that is set up with the link::

        replicas = Replicas(model, ["@numpy", "@numpy"])
        for batch in iterator:
            replicas.backward([concat_examples(part) for part in replicas.split(batch)])
            optimizer.update()
            replicas.copy_params()

    The link itself computes in the calling thread. Each copy computes in a thread of its own, with
    the caller's ``chainer.config`` and reporter. So the order of numbers drawn from global
    generators (dropout) is not deterministic. Function hooks of the caller's thread do not apply to
    the copies.

    Args:
        link: first replica. It is moved to the first device.
        devices: devices, one for each replica; a device may come several times.
        op: ``"avg"``: the gradients are those of the mean loss over all samples, as on one device;
            ``"sum"``: the gradients are those of the sum of the parts' losses, as in Chainer's
            ``ParallelUpdater``.

    Attributes:
        links: replicas; the first one is the link.
        devices: devices of the replicas.
    """

    instead = "Copy its first link, and make Replicas of the copy."

    def __init__(self, link: Any, devices: Sequence[Any], *, op: str = "avg") -> None:
        if op not in ("avg", "sum"):
            raise InvalidArgumentError(f"Replicas: op is {op!r} (expected 'avg' or 'sum').")
        if not devices:
            raise InvalidArgumentError("Replicas: no devices (expected at least one).")
        self.devices = [chainer.get_device(device) for device in devices]
        self.links = [link, *(copy.deepcopy(link) for _ in devices[1:])]
        self._op = op
        for replica, device in zip(self.links, self.devices):
            replica.to_device(device)
        self._threads = ThreadPoolExecutor(max(1, len(devices) - 1), "replica")

    def split(self, batch: Sequence[Any]) -> list[list[Any]]:
        """Return the samples of each replica: replica r of n gets every n-th sample, from r on."""
        return [list(batch[index :: len(self.links)]) for index in range(len(self.links))]

    def backward(
        self,
        batches: Sequence[Any],
        *,
        counts: Sequence[int] | None = None,
        loss_func: Callable[..., Any] | None = None,
        loss_scale: float | None = None,
    ) -> list[Any]:
        """Compute the losses of batches, and the link's gradients.

        Args:
            batches: one batch for each replica, on its device: a tuple or a dictionary of
                arguments, or the only argument. None for a replica without samples.
            counts: number of samples of each batch, by which ``"avg"`` weights it; by default the
                length of its first array.
            loss_func: function that is called with a replica's arguments, in place of the replica.
            loss_scale: that of ``Variable.backward``.

        Returns:
            The loss of each batch, on its device, or None for a replica without samples.

        Raises:
            InvalidArgumentError: the number of batches is not the number of replicas, or the first
                replica has no samples; or the link's parameters are no longer those of the copies.
        """
        if len(batches) != len(self.links):
            raise InvalidArgumentError(
                f"backward: {len(batches)} batches for {len(self.links)} replicas (expected one "
                "batch for each). Pass None for a replica without samples."
            )
        if counts is None:
            counts = [0 if batch is None else _length(batch) for batch in batches]
        total = sum(counts)
        if batches[0] is None or not total:
            raise InvalidArgumentError(
                "backward: no samples for the first replica (expected at least one)."
            )
        shares = [count / total if self._op == "avg" else 1.0 for count in counts]

        def loss_of(index: int) -> Any:
            with chainer.force_backprop_mode():
                return call_with(loss_func or self.links[index], batches[index])

        def run(index: int, loss: Any = None) -> Any:
            link, device = self.links[index], self.devices[index]
            with chainer.using_device(device):
                if loss is None:
                    loss = loss_of(index)
                link.cleargrads()  # including parameters that have just been initialised
                # This gradient replaces the one that a backward pass starts with by default.
                loss.grad = device.xp.full_like(loss.array, shares[index] * (loss_scale or 1.0))
                loss.backward(loss_scale=loss_scale)
            loss.unchain()
            return loss

        self._refuse_changes()
        first = None
        if any(not parameter.is_initialized for parameter in self.links[0].params()):
            # The copies have to start from the values that the link draws.
            with chainer.using_device(self.devices[0]):
                first = loss_of(0)
            self.copy_params()
        for link in self.links:
            link.cleargrads()
        losses = self._run(run, [n for n, batch in enumerate(batches) if batch is not None], first)
        for index in range(1, len(self.links)):
            if losses[index] is not None:
                self.links[0].addgrads(self.links[index])
        return losses

    def _run(self, run: Callable[..., Any], indices: Sequence[int], first: Any) -> list[Any]:
        """Call ``run`` for each index, for the first one in this thread; return all results."""
        ambience = _Ambience()
        futures: dict[int, Future[Any]] = {
            index: self._threads.submit(ambience.call, run, index) for index in indices[1:]
        }
        results: list[Any] = [None] * len(self.links)
        try:
            results[indices[0]] = run(indices[0], first)
        finally:
            wait(futures.values())  # no thread computes any more when an error is raised
        for index, future in futures.items():
            results[index] = future.result()
        ambience.report()
        return results

    def _refuse_changes(self) -> None:
        """Refuse a link whose parameters are others than those of its copies."""
        main, *copies = (dict(_kinds(link)) for link in self.links)
        for kinds in copies:
            for name in [*main, *kinds]:
                here, there = (k.get(name, "absent") for k in (main, kinds))
                # A copy may be initialised later, by copy_params().
                if here != there and "" not in (here, there):
                    raise InvalidArgumentError(
                        f"backward: {name} is {here} in the link, but {there} in a copy of it. "
                        "Make the Replicas, or the updater, anew after such a change of the link."
                    )

    def copy_params(self) -> None:
        """Give the copies the link's parameters and persistent values, after its update."""
        for replica in self.links[1:]:
            replica.copyparams(self.links[0])

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()


class _Ambience:
    """Chainer's thread-local state, recorded in the thread that makes the object."""

    def __init__(self) -> None:
        self._config = dict(vars(chainer.config._local))
        reporters = chainer.reporter._get_reporters()
        self._reporter = reporters[-1] if reporters else None
        self._observations: dict[int, dict[str, Any]] = {}

    def call(self, function: Callable[[int], Any], index: int) -> Any:
        """Call ``function`` in another thread, with the recorded state."""
        with contextlib.ExitStack() as stack:
            for name, value in self._config.items():
                stack.enter_context(chainer.using_config(name, value))
            if self._reporter is not None:
                own = chainer.Reporter()
                own._observer_names = self._reporter._observer_names
                observation = self._observations[index] = {}
                stack.enter_context(own.scope(observation))
            return function(index)

    def report(self) -> None:
        """Report the threads' observations, in the order of the threads."""
        for _, observation in sorted(self._observations.items()):
            assert self._reporter is not None
            self._reporter.observation.update(observation)


def _kinds(link: Any) -> Iterator[tuple[str, str]]:
    """Yield names, dtypes and shapes of parameters, and names of persistent values."""
    for name, p in link.namedparams():
        yield name, "" if p.array is None else f"{p.array.dtype}{list(p.array.shape)}"
    for path, _, _ in persistent_values(link):
        yield path, "a persistent value"


def call_with(function: Callable[..., Any], arguments: Any) -> Any:
    """Call ``function`` with a converted batch: a tuple, a dictionary, or the only argument."""
    if isinstance(arguments, tuple):
        return function(*arguments)
    if isinstance(arguments, Mapping):
        return function(**arguments)
    return function(arguments)


def _length(batch: Any) -> int:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    return len(batch[0] if isinstance(batch, tuple) else batch)


class ParallelUpdater(_Updater):  # type: ignore[misc, unused-ignore]
    """Updater that divides each batch among devices of this process.

    It replaces ``chainer.training.updaters.ParallelUpdater``. Its replicas compute at the same
    time, on CPU devices too. By default their gradients are those of the mean over the batch, as on
    one device. Chainer's gradients are the sum of the parts' means.

    Args:
        iterator, optimizer, options: those of ``StandardUpdater``, without ``device``.
        devices: devices, one for each replica. In a dictionary, ``"main"`` is the device of the
            optimizer's target, and replicas report under their names. In a sequence, the first one
            is the device of the target.
        op: ``"avg"``, or ``"sum"`` as in Chainer.

    Attributes:
        replicas: replicas, as :class:`Replicas`.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        devices: Sequence[Any] | Mapping[str, Any],
        converter: Any = convert.concat_examples,
        *,
        op: str = "avg",
        **options: Any,
    ) -> None:
        super().__init__(iterator, optimizer, converter, **options)
        if not isinstance(devices, Mapping):
            devices = {str(n) if n else "main": device for n, device in enumerate(devices)}
        if "main" not in devices:
            raise InvalidArgumentError(
                f"ParallelUpdater: devices are {', '.join(devices)}, but one must be 'main': the "
                "device of the optimizer's target."
            )
        self._names = ["main", *(name for name in devices if name != "main")]
        target = self.get_optimizer("main").target
        self.replicas = Replicas(target, [devices[name] for name in self._names], op=op)

    def connect_trainer(self, trainer: Any) -> None:
        """Register the replicas as observers under their names."""
        for name, link in zip(self._names[1:], self.replicas.links[1:]):
            trainer.reporter.add_observer(name, link)
            trainer.reporter.add_observers(name, link.namedlinks(skipself=True))

    def update_core(self) -> None:
        """Make a step."""
        iterator, optimizer = self.get_iterator("main"), self.get_optimizer("main")
        parts = self.replicas.split(iterator.next())
        batches = [
            convert._call_converter(self.converter, part, device) if part else None
            for part, device in zip(parts, self.replicas.devices)
        ]
        self.replicas.backward(
            batches,
            counts=[len(part) for part in parts],
            loss_func=self.loss_func,
            loss_scale=optimizer._loss_scale,
        )
        optimizer.update()
        self.replicas.copy_params()
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def finalize(self) -> None:
        """Finalize the iterators and stop the threads."""
        super().finalize()
        self.replicas.close()
