"""What calls take, as types: arrays of any framework, numbers, and structures of them."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

__all__ = ["Array", "Arrays", "Framework", "Like", "Nested", "NumpyArray"]


class Array(Protocol):
    """An array of any framework: what has a shape and a dtype.

    NumPy's arrays and scalars, PyTorch's tensors, Chainer's variables, CuPy's arrays and those that
    speak DLPack. Whether one can be seen is found out when it is: a type cannot say it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths."""

    @property
    def dtype(self) -> object:
        """The type of its elements."""


#: An array, or a nested list, tuple or dict of arrays. Lists and dicts may be changed, so to a type
#: checker a list of arrays is no list of anything wider, but ``list[Any]``.
Nested: TypeAlias = "Array | list[Any] | tuple[Any, ...] | dict[Any, Any]"
#: The same, or one of Python's numbers.
Arrays: TypeAlias = "Nested | complex"
#: What is NumPy's because nothing else was asked for, of any dtype.
NumpyArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: By whose name a result can be asked for.
Framework = Literal["numpy", "torch", "chainer", "cupy", "cuda"]
#: Of which kind a result is to be: of a framework, or as an array.
Like: TypeAlias = "Framework | Array"
