"""Treatment of PyTorch's functions that take a tensor which is cut.

A :class:`Cut` goes through a model's own forward method in place of a tensor. It has the shape and
the dtype of the whole tensor, but no memory, because it is on the device ``meta``. PyTorch calls
its ``__torch_function__`` in place of each function that takes the Cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from collective import CollectiveError, ShapeError, UnsupportedError
from collective.inner import nested
from collective.training.splits.blocks import Read, Step, Value
from collective.training.splits.recipes import LayerCall, row_for_row
from collective.training.splits.session import SplitSession, names

from .filters import Watching
from .recipes import LAYERS, in_place, pointwise, recipe_of

Tensor = torch.Tensor


class Cut(torch.Tensor):
    """Stand-in for a tensor that is cut; :meth:`TensorSession.cut` makes it."""

    value: Value
    session: TensorSession

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        leaves = nested.flatten([list(args), kwargs or {}])
        session = next(leaf.session for leaf in leaves if isinstance(leaf, Cut))
        return session.call(function, tuple(args), dict(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "Split: a tensor that is cut cannot be pickled or copied inside forward. Pickle or "
            "copy the result of the Split."
        )


_Property: Any = Tensor  # the class, untyped: its properties are descriptors with a ``__get__``
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
# Properties through which a program reads or writes a parameter without autograd.
_BEHIND = {_Property.data.__get__, _Property.grad.__get__}
_FEATURES = functional.dropout1d, functional.dropout2d, functional.dropout3d


class TensorSession(SplitSession):
    """One forward pass of a module whose tensors are cut."""

    kind = Cut

    @contextlib.contextmanager
    def calls_of(self, model: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._filters is not None:
                stack.enter_context(Watching(self._filters, self.call))
            yield

    def cut(self, value: Value, shape: Sequence[int], like: Tensor) -> Cut:
        if tuple(like.shape) != tuple(shape):
            like = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
        elif not like.is_meta:
            like = torch.empty_like(like, device="meta")
        cut: Cut = like.as_subclass(Cut)
        cut.value, cut.session = value, self
        return cut

    # -- a function that was called --------------------------------------------------------

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``function(*args, **kwargs)``, which has a cut argument."""
        if function in _SIZES:
            return self._metas(function, args, kwargs)
        if function in _DEVICE:
            of_device: Callable[[Any], Any] = _DEVICE[function]
            return of_device(self.arrays.like.device)
        name = f"{names.current} ({_called(function)})"
        if self._filters is not None:
            cut = _cut_among([args, kwargs])
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
                result = self._step(function, name, args, kwargs)
                if result is not None:
                    return self._bind(changed, result)
        except CollectiveError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise type(error)(f"Split: {name}: {error}") from error
        if changed is not None:
            raise UnsupportedError(
                f"Split: {name} writes into a tensor that is cut, which only functions that work "
                "row by row can do. Use a function that returns a new tensor."
            )
        return self._whole(function, name, args, kwargs)

    def _joined(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the arguments with whole parameters in place of this rank's pieces."""
        if function in _BEHIND or self.has_piece(in_place(function, args, kwargs)):
            raise UnsupportedError(
                f"Split: filters='own': {name} reads or writes a parameter without autograd, but "
                "this rank has only a piece of the parameter. Do that outside of forward, or pass "
                "filters='all'."
            )
        return _mapped(self._executor.parameter, args, kwargs)

    def _bind(self, changed: Cut | None, result: Cut) -> Cut:
        """Return the result of a call; a tensor that the call writes into takes the new value."""
        if changed is None:
            return result
        changed.value = result.value
        return changed

    def _metas(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function on tensors without memory, to get the shape and dtype of its result."""
        plain_args, plain_kwargs = _mapped(self._meta, args, kwargs)
        disabled: Any = torch._C.DisableTorchFunctionSubclass
        with disabled():
            return function(*plain_args, **plain_kwargs)

    def _meta(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, Cut):
            return x.as_subclass(Tensor)
        shape = self._executor.shape(x)
        if shape != tuple(x.shape):  # this rank has only a piece of the parameter
            return torch.empty(shape, dtype=x.dtype, device="meta")
        return x if x.is_meta else torch.empty_like(x, device="meta")

    def _step(self, function: Any, name: str, args: Any, kwargs: Any) -> Cut | None:
        """Record or make a call that has a rule; return None if these arguments have no rule."""
        recipe = recipe_of(function)
        # The recipe of a layer runs before PyTorch's function, because its error names the number
        # of channels that the layer expects.
        step = self._recorded(function, name, args, kwargs, ()) if recipe in LAYERS else None
        like = self._metas(function, args, kwargs)
        if not isinstance(like, Tensor):
            return None
        if recipe is None:
            step = self._row_for_row(function, name, [args, kwargs], like)
        elif recipe not in LAYERS:
            step = self._recorded(function, name, args, kwargs, tuple(like.shape))
        return None if step is None else self.cut(self._executor.add(step), like.shape, like)

    def _recorded(
        self, function: Any, name: str, args: Any, kwargs: Any, shape: tuple[int, ...]
    ) -> Step | None:
        """Make the step of a function with a recipe.

        Args:
            function, name, args, kwargs: the function, its name in errors, and its arguments.
            shape: shape of the result; recipes of layers do not use it.
        """
        cut = _cut_among([args, kwargs])
        values = tuple(x.value for x in cut)
        if any(value.lengths != values[0].lengths for value in values):
            return None
        channels = self._meta(cut[0]).shape[1]
        context = LayerCall(self.arrays, self._executor, function, name, values, channels, shape)
        plain_args, plain_kwargs = _mapped(_value_of, args, kwargs)
        recipe = recipe_of(function)
        assert recipe is not None
        return recipe(context, *plain_args, **plain_kwargs)

    def _row_for_row(self, function: Any, name: str, structure: Any, like: Tensor) -> Step | None:
        """Make the step of a function that works row by row; return None if no row is cut."""
        leaves = self._broadcast_whole(nested.flatten(structure), like.shape)
        cut = _cut_among(leaves)
        if not cut:
            return None
        for x in leaves:
            if self._kept is not None and isinstance(x, Tensor) and not isinstance(x, Cut):
                self._kept(x)
        channels = like.shape[1] if like.dim() > 1 else 0
        writes = in_place(function, *structure) is not None

        def call(operands: list[Any]) -> Any:
            if writes:
                # The operand may be a view of an array that is read again.
                operands[0] = operands[0].clone()
            args, kwargs = nested.rebuild(structure, iter(operands))
            return function(*args, **kwargs)

        def number_a_channel(x: Tensor, read: Read, some: range | None) -> Tensor:
            return x if some is None or x.numel() == 1 else x[some.start : some.stop]

        by_channel = function is functional.prelu or function is torch.prelu
        return row_for_row(
            LayerCall(
                *(self.arrays, self._executor, function, name),
                tuple(x.value for x in cut),
                channels,
            ),
            *(list(map(_value_of, leaves)), like.dim(), call),
            along=bool(channels) and all(x.shape[1:2] == like.shape[1:2] for x in cut),
            fit=number_a_channel if by_channel else None,
        )

    def _whole(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function without a rule on whole tensors."""
        leaves = nested.flatten([args, kwargs])
        plain_args, plain_kwargs = nested.rebuild([args, kwargs], iter(self._wholes(name, leaves)))
        return self._again(function(*plain_args, **plain_kwargs), _cut_among(leaves)[0])

    # -- functions with statistics or random numbers ---------------------------------------

    def _batch_norm(
        self, name: str, x: Cut, running_mean: Any, running_var: Any, weight: Any = None,
        bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        _check_channels(name, x, running_mean, running_var, weight, bias)
        if not training:
            mean, var = running_mean.clone()[None], running_var.clone()[None]
        else:
            mean, var, count = self._executor.moments(x.value, None, _wide(x))
            if count < 2:
                raise ValueError("more than one value per channel is expected when training")
            _note(running_mean, running_var, mean, var, count, momentum)
        return self._normalised(name, x, mean, var, weight, bias, eps)

    def _instance_norm(
        self, name: str, x: Cut, running_mean: Any = None, running_var: Any = None,
        weight: Any = None, bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        if not use_input_stats:
            return self._batch_norm(
                name, x, running_mean, running_var, weight, bias, False, momentum, eps
            )
        _check_channels(name, x, running_mean, running_var, weight, bias)
        mean, var, count = self._executor.moments(x.value, x.shape[1], _wide(x))
        _note(running_mean, running_var, mean, var, count, momentum)
        return self._normalised(name, x, mean, var, weight, bias, eps)

    def _group_norm(
        self, name: str, x: Cut, num_groups: int, weight: Any = None, bias: Any = None,
        eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        _check_channels(name, x, weight, bias)
        if x.shape[1] % num_groups:
            raise ShapeError(
                f"Split: {name}: the input has {x.shape[1]} channels (expected a multiple of the "
                f"{num_groups} groups)."
            )
        mean, var, _ = self._executor.moments(x.value, num_groups, _wide(x))
        width = x.shape[1] // num_groups
        mean, var = (moment.repeat_interleave(width, 1) for moment in (mean, var))
        return self._normalised(name, x, mean, var, weight, bias, eps)

    def _normalised(
        self, name: str, x: Cut, mean: Any, var: Any, weight: Any, bias: Any, eps: float
    ) -> Any:
        """Record the normalisation by known moments of shape ``[batch or 1, channels]``."""
        ones = (1,) * (x.dim() - 2)
        scale = (var + eps).rsqrt()
        scale = scale.reshape(*scale.shape, *ones)
        mean = mean.reshape(*mean.shape, *ones)
        affine = [None if p is None else p.reshape(1, -1, *ones) for p in (weight, bias)]
        result = self._step(_normalise, name, (x, mean, scale, *affine), {})
        assert result is not None
        return result

    def _dropout(
        self, name: str, x: Cut, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        """Record dropout by a mask that is drawn whole, as PyTorch draws it on the CPU, and cut."""
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
        noise = torch.empty(shape, dtype=x.dtype, device=self.arrays.like.device)
        noise.bernoulli_(1 - p, generator=self._executor.generator())
        # The mask needs one byte per element, however often a piece is computed.
        result = self._step(_mask, name, (x, noise.bool(), 0.0 if p == 1 else 1 / (1 - p)), {})
        assert result is not None
        return self._bind(x if inplace else None, result)


def _check_channels(name: str, x: Tensor, *tensors: Any) -> None:
    """Check that parameters and statistics have the input's number of channels.

    Raises:
        ShapeError: some have another number of channels.
    """
    for tensor in tensors:
        if tensor is not None and tensor.shape != x.shape[1:2]:
            raise ShapeError(
                f"Split: {name}: the input has {x.shape[1]} channels (expected {len(tensor)}, the "
                "number of channels of the normalisation)."
            )


def _wide(x: Tensor) -> Any:
    """Return the dtype for sums over rows, at least float32, as float16 cannot hold large sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _note(
    running_mean: Any, running_var: Any, mean: Tensor, var: Tensor, count: int, momentum: float
) -> None:
    """Update the running statistics by a batch's, or by the mean of the samples' statistics."""
    for kept, new in ((running_mean, mean), (running_var, var * (count / max(1, count - 1)))):
        if kept is not None:
            kept.lerp_(new.detach().mean(0).to(kept.dtype), momentum)


def _normalise(x: Tensor, mean: Tensor, scale: Tensor, weight: Any, bias: Any) -> Tensor:
    # The moments may have a higher precision than ``x``. The result is computed in that precision.
    y = (x - mean) * (scale if weight is None else scale * weight)
    return (y if bias is None else y + bias).to(x.dtype)


def _mask(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    return x * (mask * x.new_tensor(factor))


_SPECIAL: dict[Any, Callable[..., Any]] = {
    functional.batch_norm: TensorSession._batch_norm,
    functional.instance_norm: TensorSession._instance_norm,
    functional.group_norm: TensorSession._group_norm,
    functional.dropout: TensorSession._dropout,
    **dict.fromkeys(_FEATURES, TensorSession._feature_dropout),
}


def _called(function: Any) -> str:
    name = getattr(function, "__name__", None) or repr(function)
    return name if name != "fn" else "max_pool"


def _cut_among(structure: Any) -> list[Cut]:
    return [x for x in nested.flatten(structure) if isinstance(x, Cut)]


def _value_of(x: Any) -> Any:
    return x.value if isinstance(x, Cut) else x


def _mapped(function: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    """Return the arguments with each leaf replaced by the result of ``function``."""
    leaves = [args, kwargs]
    return nested.rebuild(leaves, map(function, nested.flatten(leaves)))
