"""Modules called in parallel, a thread each."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collective.errors import InvalidArgumentError

from .scattering import as_device, tensors_in

__all__ = ["parallel_apply"]


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
    calls = _ModuleCalls(modules, inputs, kwargs, devices)
    if len(modules) == 1:
        return [calls.run(0)]
    results: list[Any] = [None] * len(modules)
    errors: list[BaseException | None] = [None] * len(modules)
    ambience = _Ambience(calls.devices)

    def work(index: int) -> None:
        try:
            with ambience.entered(calls.devices[index]):
                results[index] = calls.run(index)
        except BaseException as error:  # also SystemExit: it is the caller's to end
            errors[index] = error

    threads = [
        threading.Thread(
            # A context each: one cannot be entered twice at a time.
            target=contextvars.copy_context().run,
            args=(work, index),
            name=f"replica-{index}",
        )
        for index in range(len(modules))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _raise_first(errors, calls.devices)
    return results


class _ModuleCalls:
    """What is to be called: modules, arguments and devices."""

    def __init__(
        self,
        modules: Sequence[Any],
        inputs: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any] | None] | None,
        devices: Sequence[Any] | None,
    ) -> None:
        count = len(modules)
        for name, given in (("inputs", inputs), ("kwargs", kwargs), ("devices", devices)):
            if given is not None and len(given) != count:
                raise InvalidArgumentError(
                    f"parallel_apply: {len(given)} {name} for {count} modules; allowed is one each."
                )
        self.modules = modules
        self.arguments = [
            tuple(given) if isinstance(given, (tuple, list)) else (given,) for given in inputs
        ]
        self.keywords = [dict(given or {}) for given in kwargs or [{}] * count]
        self.devices = [
            self._device(index, None if devices is None else devices[index])
            for index in range(count)
        ]

    def _device(self, index: int, given: Any) -> torch.device | None:
        if given is not None:
            return as_device(given)
        first = next(tensors_in([*self.arguments[index], self.keywords[index]]), None)
        return None if first is None else first.device

    def run(self, index: int) -> Any:
        device = self.devices[index]
        current: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device is not None and device.type == "cuda":
            current = torch.cuda.device(device)
        with current:
            return self.modules[index](*self.arguments[index], **self.keywords[index])


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
