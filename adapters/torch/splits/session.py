"""What becomes of functions that take a tensor which is cut.

PyTorch asks a :class:`~.cut.Cut` before every function that it is given to
(``__torch_function__``). A function with a rule becomes a step; one without is called on the whole
tensor, which ends the cut there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from collective.errors import CollectiveError, UnsupportedError
from collective.memory import nested
from collective.training.splits.blocks import Value, lengths_of

from .context import Context
from .cut import Cut, names
from .executor import TensorExecutor
from .filters import ModuleFilters
from .recipes import LAYERS, pointwise, recipe_of
from .rowwise import in_place, row_for_row

__all__ = ["Session"]

Tensor = torch.Tensor


_Property: Any = Tensor  # whose properties are objects that say how to get them
_SIZES = {
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.ndimension,
    Tensor.is_contiguous, torch.is_floating_point, torch.is_complex, torch.numel,
    *(getattr(_Property, name).__get__ for name in
      ("shape", "dtype", "ndim", "layout", "is_sparse", "is_quantized", "is_nested")),
}  # fmt: skip
_DEVICE = {
    _Property.device.__get__: lambda device: device,
    _Property.is_cuda.__get__: lambda device: device.type == "cuda",
    _Property.is_cpu.__get__: lambda device: device.type == "cpu",
    _Property.is_meta.__get__: lambda device: False,
}
# What a parameter is read by, and written to, without a gradient of it.
_BEHIND = {_Property.data.__get__, _Property.grad.__get__}
_FEATURES = {functional.dropout1d: 1, functional.dropout2d: 2, functional.dropout3d: 3}


class Session:
    """One forward pass of a module whose tensors are cut.

    Args:
        executor: makes the calls.
        like: a tensor on the device where they are made.
        strict: whether functions without a rule are refused.
        kept: is called with each tensor that steps hold, to be combined with pieces.
        filters: which parameters this rank has a piece of.

    Attributes:
        joined: the names of the functions that took whole tensors.
    """

    def __init__(
        self,
        executor: TensorExecutor,
        like: Tensor,
        strict: bool,
        kept: Callable[[Tensor], Tensor] | None = None,
        filters: ModuleFilters | None = None,
    ) -> None:
        self._executor = executor
        self._strict = strict
        self._kept = kept
        self._filters = filters
        self._device = like.device
        self.joined: list[str] = []

    def cut(self, value: Value, like: Tensor) -> Cut:
        """Return what stands for a value of the shape and dtype of ``like``, a meta tensor."""
        made: Cut = like.as_subclass(Cut)
        made.value, made.session = value, self
        return made

    def enter(self, x: Tensor) -> Cut:
        """Return what stands for a tensor that is there."""
        value = self._executor.enter(x)
        first, *rest = value.lengths
        shape = (first, x.shape[1], *rest)
        return self.cut(value, torch.empty(shape, dtype=x.dtype, device="meta"))

    def whole(self, cut: Cut) -> Tensor:
        """Return all of a tensor that is cut."""
        found: Tensor = self._executor.whole([cut.value])[0]
        return found

    def leave(self, result: Any) -> Any:
        """Return a forward's result with whole tensors in it."""
        leaves = nested.flatten(result)
        arrays = iter(self._executor.results([x.value for x in leaves if isinstance(x, Cut)]))
        found = (next(arrays) if isinstance(x, Cut) else x for x in leaves)
        return nested.rebuild(result, found)

    # -- a function that was called --------------------------------------------------------

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Be ``function(*args, **kwargs)``."""
        if function in _SIZES:
            return self._metas(function, args, kwargs)
        if function in _DEVICE:
            of_device: Callable[[Any], Any] = _DEVICE[function]
            return of_device(self._device)
        name = f"{names.current} ({_called(function)})"
        if self._filters is not None:
            cut = any(isinstance(x, Cut) for x in _leaves([args, kwargs]))
            if not cut or recipe_of(function) not in LAYERS:
                args, kwargs = self._joined(function, name, args, kwargs)
            if not cut:
                return function(*args, **kwargs)
        special = _SPECIAL.get(function)
        try:
            if special is not None:
                return special(self, name, *args, **kwargs)
            changed = in_place(function, args, kwargs)
            if pointwise(function) or recipe_of(function) is not None:
                made = self._step(function, name, args, kwargs)
                if made is not None:
                    return self._bind(changed, made)
        except CollectiveError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise type(error)(f"Split: {name}: {error}") from error
        if changed is not None:
            raise UnsupportedError(
                f"Split: {name} writes into a tensor that is cut, which only functions that work "
                "row for row can. Use the function that returns a new tensor."
            )
        return self._whole(function, name, args, kwargs)

    def _joined(self, function: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments with all of the parameters of which this rank has a piece."""
        assert self._filters is not None
        changed = in_place(function, args, kwargs)
        if function in _BEHIND or self._filters.share(changed) is not None:
            raise UnsupportedError(
                f"Split: filters='own': {name} reads or writes a parameter behind autograd's back, "
                "of which this rank has a piece. Do that outside of forward, or pass filters='all'."
            )
        leaves = [args, kwargs]
        joined_args, joined_kwargs = _rebuilt(
            leaves, map(self._executor.parameter, _leaves(leaves))
        )
        return joined_args, joined_kwargs

    def _bind(self, changed: Cut | None, made: Cut) -> Cut:
        """Return the result; a tensor that was written into stands for it from now on."""
        if changed is None:
            return made
        changed.value = made.value
        return changed

    def _metas(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function on tensors without memory."""
        leaves = [args, kwargs]
        found = (self._meta(x) if isinstance(x, Tensor) else x for x in _leaves(leaves))
        plain_args, plain_kwargs = _rebuilt(leaves, found)
        disabled: Any = torch._C.DisableTorchFunctionSubclass
        with disabled():
            return function(*plain_args, **plain_kwargs)

    def _meta(self, x: Tensor) -> Tensor:
        if isinstance(x, Cut):
            return x.as_subclass(Tensor)
        if self._filters is not None:
            return self._filters.meta(x)
        return x if x.is_meta else torch.empty_like(x, device="meta")

    def _step(self, function: Any, name: str, args: Any, kwargs: Any) -> Cut | None:
        """Record or make a call that has a rule; None where this one has none."""
        like = self._metas(function, args, kwargs)
        if not isinstance(like, Tensor):
            return None
        leaves = [args, kwargs]
        recipe = recipe_of(function)
        if recipe is None:
            lengths = lengths_of(like.shape)
            # What is broadcast along a cut axis is there for every piece.
            found = [
                x if not isinstance(x, Cut) or (x.value.lengths, x.dim()) == (lengths, like.dim())
                else self._executor.whole([x.value])[0]
                for x in _leaves(leaves)
            ]  # fmt: skip
            if not any(isinstance(x, Cut) for x in found):
                return None
            for x in found:
                if self._kept is not None and isinstance(x, Tensor) and not isinstance(x, Cut):
                    self._kept(x)
            step = row_for_row(function, name, leaves, found, like, self._executor)
        else:
            values = tuple(x.value for x in _leaves(leaves) if isinstance(x, Cut))
            executor = self._executor
            shared, in_part = (executor.shared(values[0], part) for part in (False, True))
            context = Context(
                *(function, name, tuple(like.shape), values),
                *(shared, in_part, executor.layout, executor.parameter),
            )
            plain = (x.value if isinstance(x, Cut) else x for x in _leaves(leaves))
            plain_args, plain_kwargs = _rebuilt(leaves, plain)
            if any(value.lengths != values[0].lengths for value in values):
                return None
            found_step = recipe(context, *plain_args, **plain_kwargs)
            if found_step is None:
                return None
            step = found_step
        return self.cut(self._executor.add(step, lengths_of(like.shape)), like)

    def _whole(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function that no rule is known of on whole tensors."""
        if self._strict:
            raise UnsupportedError(
                f"Split: {name} needs its input whole, which strict=True refuses. Split the layers "
                "before it, and call it on their result."
            )
        leaves = [args, kwargs]
        cut = [x for x in _leaves(leaves) if isinstance(x, Cut)]
        whole = dict(zip(map(id, cut), self._executor.whole([x.value for x in cut])))
        self.joined.append(name)
        plain = (whole.get(id(x), self._executor.parameter(x)) for x in _leaves(leaves))
        plain_args, plain_kwargs = _rebuilt(leaves, plain)
        found = function(*plain_args, **plain_kwargs)
        rows = len(cut[0].value.lengths), cut[0].value.lengths
        if not isinstance(found, Tensor) or (found.dim() - 1, lengths_of(found.shape)) != rows:
            return found
        # The same rows: what follows may go on in pieces.
        like = torch.empty_like(found, device="meta")
        return self.cut(self._executor.enter_whole(found), like)

    # -- functions with statistics or random numbers ---------------------------------------

    def _batch_norm(
        self, name: str, x: Cut, running_mean: Any, running_var: Any, weight: Any = None,
        bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        if not training:
            mean, var = running_mean.clone(), running_var.clone()
        else:
            mean, var, count = self._executor.moments(x.value, None)
            if count < 2:
                raise ValueError("more than one value per channel is expected when training")
            for kept, new in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
                if kept is not None:
                    kept.lerp_(new.detach().to(kept.dtype), momentum)
        return self._normalised(name, x, mean[None], var[None], weight, bias, eps)

    def _instance_norm(
        self, name: str, x: Cut, running_mean: Any = None, running_var: Any = None,
        weight: Any = None, bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        if not use_input_stats:
            return self._batch_norm(
                name, x, running_mean, running_var, weight, bias, False, momentum, eps
            )
        mean, var, count = self._executor.moments(x.value, x.shape[1])
        for kept, new in ((running_mean, mean), (running_var, var * (count / max(1, count - 1)))):
            if kept is not None:
                kept.lerp_(new.detach().mean(0).to(kept.dtype), momentum)
        return self._normalised(name, x, mean, var, weight, bias, eps)

    def _group_norm(
        self, name: str, x: Cut, num_groups: int, weight: Any = None, bias: Any = None,
        eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        mean, var, _ = self._executor.moments(x.value, num_groups)
        each = x.shape[1] // num_groups
        mean, var = (x.repeat_interleave(each, 1) for x in (mean, var))
        return self._normalised(name, x, mean, var, weight, bias, eps)

    def _normalised(
        self, name: str, x: Cut, mean: Any, var: Any, weight: Any, bias: Any, eps: float
    ) -> Any:
        """Record the normalisation by known moments, ``[batch or 1, channels]``."""
        ones = (1,) * (x.dim() - 2)
        scale = (var + eps).rsqrt()
        scale = scale.reshape(*scale.shape, *ones)
        mean = mean.reshape(*mean.shape, *ones)
        affine = [None if p is None else p.reshape(1, -1, *ones) for p in (weight, bias)]
        made = self._step(_normalise, name, (x, mean, scale, *affine), {})
        assert made is not None
        return made

    def _dropout(
        self, name: str, x: Cut, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        """Drop by a mask that is drawn whole, as PyTorch draws it on the CPU, and cut."""
        return self._masked(name, x, p, training, inplace, tuple(x.shape))

    def _feature_dropout(
        self, name: str, x: Cut, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2))
        return self._masked(name, x, p, training, inplace, shape)

    def _masked(
        self, name: str, x: Cut, p: float, training: bool, inplace: bool, shape: Any
    ) -> Any:
        if not training or p == 0:
            return x
        noise = torch.empty(shape, dtype=x.dtype, device=self._device)
        noise.bernoulli_(1 - p, generator=self._executor.generator())
        # A byte an element, however often a piece is computed.
        made = self._step(_mask, name, (x, noise.bool(), 0.0 if p == 1 else 1 / (1 - p)), {})
        assert made is not None
        return self._bind(x if inplace else None, made)


def _normalise(x: Tensor, mean: Tensor, scale: Tensor, weight: Any, bias: Any) -> Tensor:
    # The moments may be of a higher precision, and what is computed with them is, too.
    y = (x - mean) * (scale if weight is None else scale * weight)
    return (y if bias is None else y + bias).to(x.dtype)


def _mask(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    return x * (mask * x.new_tensor(factor))


_SPECIAL: dict[Any, Callable[..., Any]] = {
    functional.batch_norm: Session._batch_norm,
    functional.instance_norm: Session._instance_norm,
    functional.group_norm: Session._group_norm,
    functional.dropout: Session._dropout,
    **dict.fromkeys(_FEATURES, Session._feature_dropout),
}


def _called(function: Any) -> str:
    name = getattr(function, "__name__", None) or repr(function)
    return name if name != "fn" else "max_pool"


def _leaves(structure: Any) -> list[Any]:
    return nested.flatten(structure)


def _rebuilt(structure: Any, leaves: Iterator[Any]) -> Any:
    return nested.rebuild(structure, leaves)
