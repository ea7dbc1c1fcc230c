"""Runner for unchanged Chainer and ChainerMN programs over the transports of ``collective``.

::

    collective run -n 2 -m collective.adapters.chainer SCRIPT [ARGUMENT …]
    mpiexec -n 2 python -m collective.adapters.chainer SCRIPT [ARGUMENT …]

The program imports Chainer on a current NumPy. For any communicator that it names in
``chainermn.create_communicator``, it gets one of ``collective``. ``-m MODULE`` instead of a script
runs a module.

Processes that a program starts by ``multiprocessing`` need the same. A process that is spawned, or
forked by a server, begins by importing the program's main module, which imports Chainer at its top.
For this it receives the name in the main module's ``__spec__``. So the program gets a name below
this package, which encodes where the program is. A process that imports a module of that name
imports this package first, and this package repairs Chainer.
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

# Prefix of a program's name in this package; the encoded path and module of the program follow.
_PREFIX = f"{__name__}.at_"
_USAGE = "usage: python -m collective.adapters.chainer (SCRIPT | -m MODULE) [ARGUMENT ...]"
# Ranks that are threads share sys.argv: the first one reads the program from it for all ranks.
_lock = threading.Lock()
_program: list[str] | None = None
_running = False


def running() -> bool:
    """Return whether this process, or the one that started it, runs an unchanged program."""
    return _running


class _ProgramLoader(importlib.abc.InspectLoader):
    """Loader of a program, for a process that imports it to find its definitions.

    Args:
        path: path of the program's file.
        module: name of the module, if the program was started by a module's name.
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
            # This code runs whatever its name is, so child processes skip it, as in Python itself.
            return self.source_to_code("", self._path)
        return self._inner().get_code(self._module)

    def _inner(self) -> importlib.abc.InspectLoader:
        assert self._module is not None
        # This call imports the package that contains the module.
        spec = importlib.util.find_spec(self._module)
        if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
            raise ModuleNotFoundError(f"no module named {self._module!r}", name=self._module)
        return spec.loader


class _ProgramSpec(importlib.machinery.ModuleSpec):
    """``__spec__`` of the program, with a name by which other processes can import it."""

    def __init__(self, path: str, module: str | None) -> None:
        name = _PREFIX + json.dumps([path, module]).encode().hex()
        super().__init__(name, _ProgramLoader(path, module), origin=path)
        self._package = module.rpartition(".")[0] if module else ""

    @property
    def parent(self) -> str:
        """Package to which the program's relative imports are relative."""
        return self._package


class _ProgramFinder(importlib.abc.MetaPathFinder):
    """Finder of programs by the names of :class:`_ProgramSpec`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        global _running
        if not fullname.startswith(_PREFIX):
            return None
        _running = True
        return _ProgramSpec(*json.loads(bytes.fromhex(fullname.removeprefix(_PREFIX))))


def become(namespace: dict[str, Any]) -> CodeType:
    """Turn a ``__main__`` module into the program that the command line names.

    Args:
        namespace: namespace of the module, which is emptied.

    Returns:
        The program's code, to be executed in this namespace.
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
    # These are the names that Python sets in a __main__ module.
    namespace.update(
        __name__="__main__", __file__=spec.origin, __package__=package, __spec__=spec, __doc__=None,
        __loader__=spec.loader, __builtins__=builtins,
    )  # fmt: skip
    return code


sys.meta_path.append(_ProgramFinder())
