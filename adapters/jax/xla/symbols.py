"""Names that XLA looks up in the plug-in, and the generator of ``symbols.h``.

jaxlib contains MPItrampoline, which opens the library that ``MPITRAMPOLINE_LIB`` names. It looks up
every function and constant of MPI there, and ends the process if one is missing. So the plug-in has
all of them. ``symbols.h`` lists those that the plug-in does not implement. After a new jaxlib has
added names, make the file again::

    python -m collective.adapters.jax.xla.symbols > adapters/jax/xla/symbols.h
"""

from __future__ import annotations

import importlib.util
import mmap
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from collective import BackendUnavailableError
from collective.inner import BY_NAME
from collective.ops import NAMES

#: Functions that ``plugin.c`` defines itself.
FUNCTIONS = frozenset(
    "Allgather Allreduce Comm_free Comm_rank Comm_size Comm_split Error_string Finalize Finalized "
    "Get_library_version Get_version Init_thread Initialized Irecv Is_thread_main Isend "
    "Reduce_scatter Sendrecv Wait".split()
)
_DTYPES = {
    "BYTE": "uint8", "INT8_T": "int8", "INT16_T": "int16", "INT32_T": "int32", "INT64_T": "int64",
    "UINT8_T": "uint8", "UINT16_T": "uint16", "UINT32_T": "uint32", "UINT64_T": "uint64",
    "FLOAT": "float32", "DOUBLE": "float64", "C_COMPLEX": "complex64",
    "C_FLOAT_COMPLEX": "complex64", "C_DOUBLE_COMPLEX": "complex128",
}  # fmt: skip
_OPS = ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
#: Values of the constants that XLA uses. ``plugin.c`` tells kinds of constants apart by the second
#: byte: 1 for dtypes, 2 for operators. The others have its value for unused constants.
CONSTANTS = {
    "SUCCESS": 0, "UNDEFINED": -32766, "COMM_NULL": 0, "COMM_WORLD": 1, "REQUEST_NULL": 0,
    "THREAD_SINGLE": 0, "THREAD_FUNNELED": 1, "THREAD_SERIALIZED": 2, "THREAD_MULTIPLE": 3,
    "STATUS_IGNORE": 0, "STATUSES_IGNORE": 0, "IN_PLACE": -1, "ANY_SOURCE": -1, "ANY_TAG": -1,
    "PROC_NULL": -2,
    **{name: 0x100 + BY_NAME[dtype].code for name, dtype in _DTYPES.items()},
    **{name.upper(): 0x200 + NAMES.index(name) for name in _OPS},
}  # fmt: skip


def looked_up(jaxlib: Path) -> list[str]:
    """Return the names of MPI that a jaxlib looks up, sorted.

    Args:
        jaxlib: the file ``libjax_common.so``. Reading it takes a second.
    """
    with jaxlib.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return sorted({n.decode() for n in re.findall(rb"\0(MPIX?ABI_\w+)(?=\0)", content)})


def jaxlib_file() -> Path:
    """Return the file of the installed jaxlib that contains MPItrampoline, without importing it.

    Raises:
        BackendUnavailableError: jaxlib is not installed, or has no such file.
    """
    spec = importlib.util.find_spec("jaxlib")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        file = Path(folder) / "libjax_common.so"
        if file.is_file():
            return file
    raise BackendUnavailableError(
        "jax: jaxlib is not installed here, or contains no libjax_common.so. Install JAX: "
        "pip install 'jax>=0.10'."
    )


def listed() -> list[str]:
    """Return the names that the plug-in has, sorted, from the ``symbols.h`` beside this module."""
    text = Path(__file__).with_name("symbols.h").read_text(encoding="ascii")
    return sorted(
        [*re.findall(r"\b(?:REFUSED|CONSTANT|UNUSED)\((\w+)", text)]
        + [f"MPIABI_{name}" for name in FUNCTIONS]
    )


def header(names: Iterable[str]) -> str:
    """Return the text of ``symbols.h`` for the names that a jaxlib looks up."""
    definitions = []
    for full in sorted(names):
        name = full.partition("_")[2]
        if re.fullmatch(r"[A-Z0-9_]+", name):
            used = name in CONSTANTS
            definitions.append(f"CONSTANT({full},{CONSTANTS[name]})" if used else f"UNUSED({full})")
        elif name not in FUNCTIONS:
            definitions.append(f"REFUSED({full})")
    head = "/* Made by symbols.py: see there. Do not edit. */\n/* clang-format off */\n"
    return head + textwrap.fill(" ".join(definitions), 100, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    print(header(looked_up(jaxlib_file())), end="")
