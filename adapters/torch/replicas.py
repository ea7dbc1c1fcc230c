"""One process, several devices: a replica of the module on each, and a thread each."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from collective.errors import DeviceError, InvalidArgumentError

from . import scattering
from .replicating import check_replicable, replicate

__all__ = ["DataParallel", "data_parallel", "imbalance", "parallel_apply"]

# Below this share of the largest device, the smallest one holds the others up.
_BALANCED = 0.75


class DataParallel(nn.Module):
    """Call a module on several devices of this process, each with a part of the batch.

    Each forward pass cuts the arguments along ``dim`` (:func:`~.scattering.scatter`), copies
    the module to the devices (:func:`~.replicating.replicate`), calls the copies in a thread
    each (:func:`parallel_apply`) and concatenates what they return
    (:func:`~.scattering.gather`). The backward pass adds up the copies' gradients in the
    parameters of ``module``, so that a training loop stays as it is. The four steps are methods
    that a subclass may replace.

    What a copy changes in itself is gone after the pass, but for in-place changes of the buffers
    in the first copy: running statistics are those of the first part of the batch. Every thread
    of Python waits for the interpreter's lock: where several processes can be had,
    ``DistributedDataParallel`` is faster.

    Checkpoints are those of the module with ``module.`` before each name.

    Args:
        module: any module but compiled and scripted ones; its parameters and buffers are on
            the first device.
        devices: ``torch.device``, texts or numbers of GPUs; by default all GPUs, or the
            module's device where there are none. A device may come more than once, and with
            ``["cpu", "cpu"]`` no GPU is needed.
        output_device: where the outputs are collected; by default on the first device.
        dim: the dimension of the samples in arguments and outputs.

    Attributes:
        module: the module.
        devices: the devices.
        output_device: where the outputs are.
        dim: the dimension of the samples.

    Raises:
        InvalidArgumentError: ``module`` is none, or not initialized yet.
        UnsupportedError: a part of the module is compiled or scripted.
        DeviceError: a device is none.
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
                f"DataParallel: a {type(module).__name__}; allowed is a torch.nn.Module."
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
            _warn_of_imbalance(self.devices)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns for the whole batch, on ``output_device``.

        With one device the module itself is called, and what it returns stays as it is.

        Args:
            inputs: positional arguments; tensors in them are cut (:func:`~.scattering.scatter`).
            kwargs: arguments by keyword, likewise.

        Raises:
            DeviceError: the module is not on the first device.
            ShapeError, InvalidArgumentError: the arguments cannot be cut, or the outputs not
                be concatenated.
            Exception: the first replica's that raised one, with its number and device.
        """
        self._check_place()
        args, keywords = self.scatter(inputs, kwargs, self.devices)
        if len(self.devices) == 1:
            return self.module(*args[0], **keywords[0])
        # The module itself does for one part, on the device where it is.
        replicas = [self.module]
        if len(args) > 1:
            replicas = self.replicate(self.module, self.devices[: len(args)])
        outputs = self.parallel_apply(replicas, args, keywords)
        return self.gather(outputs, self.output_device)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Sequence[torch.device]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the arguments of each replica's call, positional and by keyword."""
        return scattering.scatter_kwargs(inputs, kwargs, devices, self.dim)

    def replicate(self, module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
        """Return a copy of the module for each device."""
        return replicate(module, devices, detach=not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Return what each copy returns."""
        return parallel_apply(replicas, inputs, kwargs, self.devices[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: torch.device) -> Any:
        """Return the copies' outputs as one."""
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
                    f"DataParallel: a parameter or buffer of the module is on {tensor.device}; "
                    f"allowed is {home}, the first of the devices. Call "
                    f"module.to({str(home)!r}) before making the optimizer."
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
        module: the module.
        inputs: a tuple of positional arguments, or the only one.
        devices, output_device, dim: as in :class:`DataParallel`.
        module_kwargs: arguments by keyword.

    Returns:
        What the module returns for the whole batch, on ``output_device``.

    Raises:
        Exception: as :meth:`DataParallel.forward` does.
    """
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    return DataParallel(module, devices, output_device, dim)(*args, **(module_kwargs or {}))


def imbalance(devices: Sequence[Any], properties: Sequence[Any]) -> str | None:
    """Tell of GPUs so unequal that the smallest one holds the others up.

    Args:
        devices: the GPUs.
        properties: for each, an object with ``total_memory`` in bytes and
            ``multi_processor_count``, as of ``torch.cuda.get_device_properties``.

    Returns:
        What to warn of: that one has less than 75 % of another's memory or cores, and which;
        None if all have more.
    """
    for name, what in (("total_memory", "memory"), ("multi_processor_count", "cores")):
        values = [getattr(item, name) for item in properties]
        if not values or min(values) >= _BALANCED * max(values):
            continue
        small, large = (devices[values.index(pick(values))] for pick in (min, max))
        return (
            f"DataParallel: {small} has {min(values) / max(values):.0%} of the {what} of {large}, "
            f"and every pass waits for it; balanced are {_BALANCED:.0%} and more. Leave it out "
            "of devices=, or with CUDA_VISIBLE_DEVICES."
        )
    return None


def _warn_of_imbalance(devices: Sequence[torch.device]) -> None:
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    message = imbalance(gpus, [torch.cuda.get_device_properties(gpu) for gpu in gpus])
    if message:
        warnings.warn(message, stacklevel=3)


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

    The threads have the caller's grad mode, inference mode, autocast state, context variables
    and current streams. One module alone is called in the caller's thread.

    Args:
        modules: modules, or other callables.
        inputs: for each, a tuple or list of positional arguments, or the only one.
        kwargs: for each, the arguments by keyword, or None.
        devices: for each, the device that is current in its thread; by default that of its
            first tensor.

    Returns:
        The results, in the modules' order.

    Raises:
        InvalidArgumentError: the lists have different lengths.
        Exception: the first replica's that raised one, of its type and with its traceback,
            after all have ended; its text begins with the replica's number and device.
    """
    count = len(modules)
    for name, given in (("inputs", inputs), ("kwargs", kwargs), ("devices", devices)):
        if given is not None and len(given) != count:
            raise InvalidArgumentError(
                f"parallel_apply: {len(given)} {name} for {count} modules; allowed is one each."
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
        except BaseException as error:  # also SystemExit: it is the caller's to end
            errors[index] = error

    threads = [
        threading.Thread(
            # A context each: one cannot be entered twice at a time.
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
    """What torch keeps by thread, as it is where this is made."""

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
        """Make it this thread's as well."""
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
            located = _located(error, f"replica {index} of {len(errors)}{on}")
            try:
                raise located.with_traceback(error.__traceback__)
            finally:
                # An exception holds this frame: held by it, it would keep the replicas' memory.
                errors.clear()
                del error, located


def _located(error: BaseException, where: str) -> BaseException:
    """Return an exception of the same type, and with the same attributes, that says where.

    Only a plain text is changed, in a copy: modules may raise one object again and again, and
    programs read the other arguments, as the number of an OSError.
    """
    args = error.args
    if isinstance(error, Exception) and (not args or (len(args) == 1 and type(args[0]) is str)):
        text = f"{where}: {args[0]}" if args else where
        try:
            located = type(error).__new__(type(error), text)
            located.__dict__.update(error.__dict__)
            located.args = (text,)
            fits = where in str(located)
        except Exception:  # a type with rules of its own
            fits = False
        if fits:
            located.__cause__ = error.__cause__
            located.__context__ = error.__context__
            located.__suppress_context__ = error.__suppress_context__
            return located
    # What Python 3.11 shows below the message; earlier ones keep it.
    error.__dict__.setdefault("__notes__", []).append(where)
    return error
