"""Datatypes of MPI from those of NumPy, and back."""

from __future__ import annotations

from typing import Any

from numpy import dtype as _np_dtype

from collective.adapters.mpi4py.datatypes import blocks_of

from .. import MPI


def from_numpy_dtype(dtype: Any) -> Any:
    """Return the datatype of a NumPy dtype: an element, an array or a structure.

    Raises:
        ValueError: the dtype has objects, no size, or foreign byte order.
    """
    if _np_dtype is None:
        raise RuntimeError("from_numpy_dtype: NumPy is not installed")
    dtype = _np_dtype(dtype)
    if dtype.hasobject:
        raise ValueError("from_numpy_dtype: Python objects have no datatype")
    if not dtype.isnative:
        raise ValueError("from_numpy_dtype: the byte order is not the machine's")
    if dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        types = [from_numpy_dtype(field[0]) for field in fields]
        structure = MPI.Datatype.Create_struct(
            [1] * len(fields), [field[1] for field in fields], types
        )
        if structure.extent != dtype.itemsize or not dtype.isalignedstruct:
            return structure.Create_resized(0, dtype.itemsize)
        return structure
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        element = from_numpy_dtype(base)
        if len(shape) == 1:
            return element.Create_contiguous(shape[0])
        return element.Create_subarray(shape, shape, [0] * len(shape))
    if dtype.kind in "SUV":
        if not dtype.itemsize:
            raise ValueError(f"from_numpy_dtype: {dtype!r} has no size")
        name, size = {"S": ("CHAR", 1), "U": ("WCHAR", 4), "V": ("BYTE", 1)}[dtype.kind]
        count = dtype.itemsize // size
        element = getattr(MPI, name)
        return element.Dup() if count == 1 else element.Create_contiguous(count)
    return MPI.Datatype.fromcode(
        dtype.str[1:] if dtype.char not in "lLqQgGpP" else dtype.char
    ).Dup()


def to_numpy_dtype(datatype: Any) -> Any:
    """Return the NumPy dtype of a datatype.

    Raises:
        ValueError: NumPy has none, such as for a part of an array.
    """
    if not datatype:
        raise ValueError("to_numpy_dtype: the datatype is null")
    base, combiner, params = datatype.decode()
    if combiner == "DUP":
        return to_numpy_dtype(base)
    blocks = blocks_of(datatype)
    if combiner[:3] == "F90" or (combiner == "NAMED" and not blocks):
        return _made(datatype.tocode() if _np_dtype is None else datatype.typestr)
    if combiner == "CONTIGUOUS":
        return _made((to_numpy_dtype(base), (params["count"],)))
    if combiner == "SUBARRAY":
        sizes = params["sizes"]
        if params["subsizes"] != sizes or any(params["starts"]):
            raise ValueError("to_numpy_dtype: a part of an array has no dtype")
        shape = sizes if params["order"] == MPI.ORDER_C else sizes[::-1]
        return _made((to_numpy_dtype(base), tuple(shape)))
    if combiner == "RESIZED":
        inner = to_numpy_dtype(base)
        if params["lb"] or inner.fields is None:
            raise ValueError("to_numpy_dtype: a resized element has no dtype")
        fields = [inner.fields[name] for name in inner.names]
        return _structure([form for form, _ in fields], [at for _, at in fields], datatype.extent)
    if combiner == "DARRAY":
        raise ValueError("to_numpy_dtype: a distributed array has no dtype")
    formats = []
    for _, length, element in blocks:
        form = to_numpy_dtype(element)
        formats.append(form if length == 1 else _made((form, (length,))))
    # A dtype begins at 0, also if the first block does not.
    itemsize = max(datatype.extent, datatype.true_ub)
    return _structure(formats, [place for place, *_ in blocks], itemsize)


def _made(spec: Any) -> Any:
    return spec if _np_dtype is None else _np_dtype(spec)


def _structure(formats: Any, offsets: Any, itemsize: int) -> Any:
    names = [f"f{i}" for i in range(len(formats))]
    spec = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    # The elements of a second structure after the first must be aligned, too.
    aligned = _np_dtype is None or all(
        _is_aligned(form, place) and _is_aligned(form, place + itemsize)
        for form, place in zip(formats, offsets)
    )
    return _made({**spec, "aligned": aligned})


def _is_aligned(form: Any, place: int) -> bool:
    """Return whether all elements of a dtype at a place are aligned."""
    base = form.base
    if base.fields is None:
        return bool(place % base.alignment == 0)
    return all(_is_aligned(field[0], place + field[1]) for field in base.fields.values())
