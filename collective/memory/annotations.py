"""Types of the arguments of calls: arrays of any framework, numbers, and structures of them."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import numpy as np


class Array(Protocol):
    """Array of any framework: an object that has a shape and a dtype.

    These are NumPy's arrays and scalars, PyTorch's tensors, JAX's arrays, Chainer's variables,
    CuPy's arrays, and arrays that support DLPack. A type cannot express whether the package can
    read an array; a call checks that.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""

    @property
    def dtype(self) -> object:
        """Type of the elements."""


#: An array, or a nested list, tuple or dict of arrays. Lists and dicts are mutable, so a type
#: checker does not accept a list of arrays as a list of a wider type, except as ``list[Any]``.
Nested: TypeAlias = "Array | list[Any] | tuple[Any, ...] | dict[Any, Any]"
#: An array, a structure of arrays, or one of Python's numbers.
Arrays: TypeAlias = "Nested | complex"
#: NumPy array of any dtype, the default type of results.
NumpyArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Name of a framework, by which a caller chooses the type of a result.
Framework = Literal["numpy", "torch", "jax", "chainer", "cupy", "cuda"]
#: Kind of the result: the name of a framework, or an array of the same kind.
Like: TypeAlias = "Framework | Array"
