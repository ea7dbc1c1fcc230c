"""The plug-in's C library, and the variables with which XLA uses it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from collective import BackendUnavailableError, ConfigError
from collective.inner import install, native

#: Variable with the file of the library, which jaxlib reads when it is imported.
VARIABLE = "MPITRAMPOLINE_LIB"
#: Script that runs another script, or ``-m`` and a module, with the plug-in.
PROGRAM = Path(__file__).with_name("__main__.py")
# Version of the functions that the C libraries and this package call of each other. It grows with
# each change that makes two versions incompatible. It is also in plugin.c and handler.c.
_INTERFACE, _INTERFACE_NAME = 2, "collective_interface"
# Versions of jaxlib whose names the library has.
_CHECKED = ("0.10.2", "0.12.0.1")


def library() -> Path:
    """Return the file of the plug-in's C library.

    Raises:
        BackendUnavailableError: the library is not built, or was built for another version.
    """
    file = Path(__file__).with_name("libcollective_xla.so")
    return _built(file, "the plug-in for XLA")


def handler() -> Path:
    """Return the file of the C library that handles calls inside ``jit``.

    Raises:
        BackendUnavailableError: the library is not built, or was built for another version.
    """
    file = Path(__file__).parent.with_name("libcollective_ffi.so")
    return _built(file, "the handler for calls inside jit")


def runner() -> ctypes.c_void_p:
    """Return the address of the core's function for calls without Python; null if there is none.

    See :func:`collective.native.runner`.
    """
    capsule = native.runner()
    if capsule is None:
        return ctypes.c_void_p()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(address(capsule, b"collective.native._core.run"))


def _built(file: Path, what: str) -> Path:
    """Return ``file``, a library in C that the installation builds, by its path without links."""
    # The launcher and the ranks may import the package by different links, and compare the paths.
    file = file.resolve()
    if not file.is_file():
        raise BackendUnavailableError(
            f"jax: {what} is not built: {file} does not exist. It needs Linux and a C "
            "compiler. Install this package again where there is one: "
            f"{install.hint('jax')}, without COLLECTIVE_DISABLE=native."
        )
    try:
        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise BackendUnavailableError(
            f"jax: {what} cannot be loaded: {error}. Build it again: pip install -e ."
        ) from error
    try:
        interface = ctypes.c_int.in_dll(loaded, _INTERFACE_NAME).value
    except ValueError:  # it was built before there were versions
        interface = 0
    check_interface(interface, f"{what} in {file}")
    return file


def check_interface(interface: int, what: str) -> None:
    """Check that a library in C has been built for this version of the package.

    Args:
        interface: the library's version of the interface; 0 if it is older than the first version.
        what: the library, for the error.

    Raises:
        BackendUnavailableError: it has not.
    """
    if interface != _INTERFACE:
        folder = Path(__file__).parents[3]
        raise BackendUnavailableError(
            f"jax: {what} was built for another version of this package: it has interface "
            f"{interface}, and the Python code in {folder} needs {_INTERFACE}. Build it again "
            "(pip install -e . in its clone), and let no variable name a library of another "
            f"installation ({VARIABLE}, PYTHONPATH)."
        )


def variables() -> dict[str, str]:
    """Return the environment variables with which every JAX program uses the plug-in.

    Raises:
        BackendUnavailableError: the library is not built, or the installed jaxlib looks up names
            that the library does not have.
    """
    file = library()
    _check_names()
    return {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi", VARIABLE: str(file)}


def enable() -> None:
    """Have the JAX programs of this process use the plug-in; call it before ``import jax``.

    Raises:
        ConfigError: jax has been imported without the plug-in, or another MPI library is set.
        BackendUnavailableError: as for :func:`variables`.
    """
    wanted = variables()
    for name, value in wanted.items():
        if os.environ.get(name, value) != value:
            raise ConfigError(
                f"jax: {name}={os.environ[name]!r} is set already (expected {value!r} or nothing). "
                "Unset it."
            )
    late = "jaxlib" in sys.modules and os.environ.get(VARIABLE) != wanted[VARIABLE]
    if late or ("jax" in sys.modules and not wanted.items() <= os.environ.items()):
        raise ConfigError(
            "jax: jax was imported before the plug-in for XLA was enabled, and jaxlib loads it "
            "only when it is imported. Call enable() before `import jax`, or start the program "
            "with `collective run --jax`."
        )
    os.environ.update(wanted)


def _check_names() -> None:
    """Raise if jaxlib looks up a name that the library lacks; jaxlib would end the process."""
    try:
        version = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailableError(
            f"jax: JAX is not installed in this environment. Install it: {install.hint('jax')}."
        ) from None
    if version in _CHECKED:
        return
    # Reading jaxlib takes a second, so only for versions that nobody has checked.
    from .symbols import jaxlib_file, listed, looked_up

    missing = sorted(set(looked_up(jaxlib_file())) - set(listed()))
    if missing:
        raise BackendUnavailableError(
            f"jax: jaxlib {version} looks up {len(missing)} names that the plug-in for XLA does "
            f"not have: {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}. Use jaxlib "
            f"{_CHECKED[0]} to {_CHECKED[-1]}, or a newer version of this package."
        )
