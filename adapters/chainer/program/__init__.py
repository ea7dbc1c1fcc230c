"""Run a program of Chainer's or ChainerMN's as it is, over our transports.

::

    collective run -n 2 -m collective.adapters.chainer SCRIPT [ARGUMENT …]
    mpiexec -n 2 python -m collective.adapters.chainer SCRIPT [ARGUMENT …]

The program imports Chainer on a current NumPy, and whatever communicator it names in
``chainermn.create_communicator`` is ours. ``-m MODULE`` instead of a script runs a module.

The processes that a program starts by ``multiprocessing`` are to have that, too. Those that are
spawned, or forked by a server, begin by importing the program's main module, which imports
Chainer at its top. What they are sent for it is the name in its ``__spec__``. So the program gets
a name below this package, which says where the program is: whoever imports a module of that name
imports this package first, and with it what mends Chainer.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from collective.launch.threads import load_program

__all__ = ["become", "running"]

# Before what the program's path and module become in its name here.
_PREFIX = f"{__name__}.at_"
_USAGE = "usage: python -m collective.adapters.chainer (SCRIPT | -m MODULE) [ARGUMENT ...]"
# Ranks that are threads share sys.argv: the first takes the program from it for all.
_lock = threading.Lock()
_program: list[str] | None = None
_running = False


def running() -> bool:
    """Tell whether this process runs a program as it is, or was started by one that does."""
    return _running


class _ProgramLoader(importlib.abc.InspectLoader):
    """Load a program for a process that imports it to find what is defined there.

    Args:
        path: of its file.
        module: the module's name, if it was named so and not by its file.
    """

    def __init__(self, path: str, module: str | None) -> None:
        self._path = path
        self._module = module

    def get_source(self, fullname: str) -> str | None:
        if self._module is not None:
            return self._inner().get_source(self._module)
        with open(self._path, "rb") as file:
            return importlib.util.decode_source(file.read())

    def get_code(self, fullname: str) -> CodeType | None:
        if self._module is None:
            return self.source_to_code(self.get_source(fullname) or "", self._path)
        if self._module.endswith(".__main__"):
            # It runs whatever its name is: as elsewhere, child processes do without it.
            return self.source_to_code("", self._path)
        return self._inner().get_code(self._module)

    def _inner(self) -> importlib.abc.InspectLoader:
        assert self._module is not None
        # This imports the package that it is in.
        spec = importlib.util.find_spec(self._module)
        if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
            raise ModuleNotFoundError(f"no module named {self._module!r}", name=self._module)
        return spec.loader


class _ProgramSpec(importlib.machinery.ModuleSpec):
    """What ``__spec__`` is in the program: of a name by which other processes can import it."""

    def __init__(self, path: str, module: str | None) -> None:
        name = _PREFIX + json.dumps([path, module]).encode().hex()
        super().__init__(name, _ProgramLoader(path, module), origin=path)
        self._package = module.rpartition(".")[0] if module else ""

    @property
    def parent(self) -> str:
        """The package that the program's relative imports are relative to."""
        return self._package


class _Finder(importlib.abc.MetaPathFinder):
    """Find programs by the names of :class:`_ProgramSpec`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        global _running
        if not fullname.startswith(_PREFIX):
            return None
        _running = True
        return _ProgramSpec(*json.loads(bytes.fromhex(fullname.removeprefix(_PREFIX))))


def become(namespace: dict[str, Any]) -> CodeType:
    """Make a ``__main__`` module that of the program which the command line names.

    Args:
        namespace: the module's, which is emptied.

    Returns:
        The program's code, to be executed there.
    """
    global _program, _running
    with _lock:
        program = _program = sys.argv[1:] if _program is None else _program
        if not program or program in (["-m"], ["-h"], ["--help"]):
            print(_USAGE, file=sys.stdout if program[:1] in (["-h"], ["--help"]) else sys.stderr)
            raise SystemExit(0 if program[:1] in (["-h"], ["--help"]) else 2)
        if program[0] != "-m" and not os.path.exists(program[0]):
            sys.exit(f"python -m collective.adapters.chainer: {program[0]!r}: no such file")
        code, path, package = load_program(program)
        _running = True
    module = None
    if program[0] == "-m":
        inside = os.path.splitext(os.path.basename(path))[0] == "__main__"
        module = f"{package}.__main__" if inside else program[1]
    spec = _ProgramSpec(os.path.abspath(path), module)
    builtins = namespace["__builtins__"]
    namespace.clear()
    # As Python does.
    namespace.update(
        __name__="__main__", __file__=spec.origin, __package__=package, __spec__=spec, __doc__=None,
        __loader__=spec.loader, __builtins__=builtins,
    )  # fmt: skip
    return code


sys.meta_path.append(_Finder())
