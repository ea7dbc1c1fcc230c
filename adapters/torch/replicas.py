"""Data parallelism in a single process: a replica of the module and a thread for each device."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from collective import DeviceError, InvalidArgumentError

from . import scattering
from .replicating import check_replicable, replicate


class DataParallel(nn.Module):
    """Wrapper that calls a module on several devices of this process, each with a part of a batch.

    Each forward pass has four steps, which are methods that a subclass may replace. It cuts the
    arguments along ``dim`` (:func:`~.scattering.scatter`), copies the module to the devices
    (:func:`~.replicating.replicate`), calls each copy in its own thread (:func:`parallel_apply`)
    and concatenates their results (:func:`~.scattering.gather`). The backward pass adds up the
    copies' gradients in the parameters of ``module``, so a training loop needs no changes.

    Changes that a copy makes to itself are lost after the pass, except for in-place changes of the
    buffers in the first copy. So running statistics are those of the first part of the batch. All
    Python threads share the interpreter's lock: where several processes are possible,
    ``DistributedDataParallel`` is faster.

    Checkpoints are those of the module, with ``module.`` before each name.

    Args:
        module: any module that is not compiled or scripted; its parameters and buffers are on the
            first device.
        devices: sequence of ``torch.device``, device names or numbers of GPUs; by default all GPUs,
            or the module's device if there is no GPU. A device may appear more than once, so
            ``["cpu", "cpu"]`` needs no GPU.
        output_device: device of the outputs; by default the first device.
        dim: dimension of the samples in arguments and outputs.

    Attributes:
        module: wrapped module.
        devices: list of devices.
        output_device: device of the outputs.
        dim: dimension of the samples.

    Raises:
        InvalidArgumentError: ``module`` is no module, or is not initialised yet.
        UnsupportedError: a part of the module is compiled or scripted.
        DeviceError: an entry of ``devices``, or ``output_device``, is no device.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(
                f"DataParallel: module is a {type(module).__name__} (expected a torch.nn.Module)."
            )
        if devices is None:
            devices = _all_devices(module)
        self.devices = scattering.as_devices(devices)
        self.output_device = scattering.as_device(
            self.devices[0] if output_device is None else output_device
        )
        self.dim = dim
        self.module = module
        if len(self.devices) > 1:
            check_replicable(module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's result for the whole batch, on ``output_device``.

        With one device, the call runs the module itself, and returns its result unchanged.

        Args:
            inputs: positional arguments; tensors in them are cut (:func:`~.scattering.scatter`).
            kwargs: keyword arguments; tensors in them are cut as well.

        Raises:
            DeviceError: the module is not on the first device.
            ShapeError, InvalidArgumentError: the arguments cannot be cut, or the outputs cannot be
                concatenated.
            Exception: error of the first replica that raised one, with a note of the replica's
                number and device.
        """
        self._check_place()
        args, keywords = self.scatter(inputs, kwargs, self.devices)
        if len(self.devices) == 1:
            return self.module(*args[0], **keywords[0])
        # A single part needs no copy: the module itself computes it, on its own device.
        replicas = [self.module]
        if len(args) > 1:
            replicas = self.replicate(self.module, self.devices[: len(args)])
        outputs = self.parallel_apply(replicas, args, keywords)
        return self.gather(outputs, self.output_device)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Sequence[torch.device]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the positional and the keyword arguments of each replica's call."""
        return scattering.scatter_kwargs(inputs, kwargs, devices, self.dim)

    def replicate(self, module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
        """Return a copy of the module for each device."""
        return replicate(module, devices, detach=not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Call the copies, and return their results."""
        return parallel_apply(replicas, inputs, kwargs, self.devices[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: torch.device) -> Any:
        """Concatenate the copies' outputs."""
        return scattering.gather(outputs, output_device, self.dim)

    def extra_repr(self) -> str:
        """Return the devices, for ``repr``."""
        names = ", ".join(str(device) for device in self.devices)
        return f"devices=[{names}], output_device={self.output_device}, dim={self.dim}"

    def _check_place(self) -> None:
        home = self.devices[0]
        for tensor in itertools.chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != home:
                raise DeviceError(
                    f"DataParallel: a parameter or buffer of the module is on {tensor.device} "
                    f"(expected {home}, the first device). Call "
                    f"module.to({str(home)!r}) before you make the optimizer."
                )


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Any] | None = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a module once on several devices, each with a part of the batch.

    Args:
        module: module to call.
        inputs: tuple of positional arguments, or a single argument.
        devices, output_device, dim: as in :class:`DataParallel`.
        module_kwargs: keyword arguments.

    Returns:
        The module's result for the whole batch, on ``output_device``.

    Raises:
        Exception: errors of :class:`DataParallel` and :meth:`DataParallel.forward`.
    """
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    return DataParallel(module, devices, output_device, dim)(*args, **(module_kwargs or {}))


def _all_devices(module: nn.Module) -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    tensors = itertools.chain(module.parameters(), module.buffers())
    return [next((tensor.device for tensor in tensors), torch.device("cpu"))]


# -- the threads -------------------------------------------------------------------------------


def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[Any] | None = None,
) -> list[Any]:
    """Call each module with its own arguments, all at the same time.

    The threads have the caller's grad mode, inference mode, autocast state, context variables and
    current streams. A single module is called in the caller's thread.

    Args:
        modules: modules, or other callables.
        inputs: for each module, a tuple or list of positional arguments, or a single argument.
        kwargs: for each module, the keyword arguments, or None.
        devices: for each module, the current device of its thread; by default the device of its
            first tensor.

    Returns:
        The results, in the modules' order.

    Raises:
        InvalidArgumentError: the lists have different lengths.
        Exception: error of the first replica that raised one, after all replicas have ended, with
            a note of the replica's number and device.
    """
    count = len(modules)
    for name, given in (("inputs", inputs), ("kwargs", kwargs), ("devices", devices)):
        if given is not None and len(given) != count:
            raise InvalidArgumentError(
                f"parallel_apply: got {len(given)} {name} for {count} modules (expected one for "
                "each module)."
            )
    arguments = [tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in inputs]
    keywords = [dict(given or {}) for given in kwargs or [{}] * count]
    places = [
        _device_of((args, named)) if device is None else scattering.as_device(device)
        for device, args, named in zip(devices or [None] * count, arguments, keywords)
    ]

    def call(index: int) -> Any:
        device = places[index]
        on_gpu = device is not None and device.type == "cuda"
        with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            return modules[index](*arguments[index], **keywords[index])

    if count == 1:
        return [call(0)]
    results: list[Any] = [None] * count
    errors: list[BaseException | None] = [None] * count
    ambience = _Ambience(places)

    def work(index: int) -> None:
        try:
            with ambience.entered(places[index]):
                results[index] = call(index)
        except BaseException as error:  # also SystemExit, which the caller's thread raises
            errors[index] = error

    threads = [
        threading.Thread(
            # Each thread needs its own copy: two threads cannot run in one context at a time.
            target=contextvars.copy_context().run,
            args=(work, index),
            name=f"replica-{index}",
        )
        for index in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _raise_first(errors, places)
    return results


def _device_of(tree: Any) -> torch.device | None:
    first = next(scattering.tensors_in(tree), None)
    return None if first is None else first.device


class _Ambience:
    """Copy of torch's thread-local state, taken in the thread that makes this object."""

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cached = torch.is_autocast_cache_enabled()
        kinds = {"cpu", "cuda"} | {device.type for device in devices if device is not None}
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in sorted(kinds - {"meta"})
            if torch.is_autocast_enabled(kind)
        }
        # A new thread starts on the default streams.
        self._streams = {
            device: torch.cuda.current_stream(device)
            for device in devices
            if device is not None and device.type == "cuda"
        }

    @contextlib.contextmanager
    def entered(self, device: torch.device | None) -> Any:
        """Apply the state to the current thread in the body."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cached))
            if device in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield


def _raise_first(
    errors: list[BaseException | None], devices: Sequence[torch.device | None]
) -> None:
    for index, error in enumerate(errors):
        if error is not None:
            on = "" if devices[index] is None else f" on {devices[index]}"
            note = f"replica {index} of {len(errors)}{on}"
            if note not in getattr(error, "__notes__", ()):  # a module may raise one object again
                error.add_note(note)
            try:
                raise error
            finally:
                # Break the cycle exception → traceback → frame → exception, which would keep the
                # replicas' memory.
                errors.clear()
                del error
