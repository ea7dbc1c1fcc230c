"""Program that runs a JAX program with the plug-in, or prints the variables for it.

::

    eval "$(python -m collective.adapters.jax.xla)"     # then any launcher and any program
    srun python -m collective.adapters.jax.xla train.py --epochs 3
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and len(sys.argv) > 1 and not getattr(sys.flags, "safe_path", False):
    # Before any other import: search the folder that Python would search for the program itself,
    # and not the folder of this file.
    _is_module = sys.argv[1] == "-m"
    sys.path[0] = os.getcwd() if _is_module else os.path.dirname(os.path.realpath(sys.argv[1]))

import builtins
import io
import runpy
import shlex
from collections.abc import Sequence
from types import ModuleType

from collective import CollectiveError
from collective.adapters.jax.xla.detection import detect_collective
from collective.adapters.jax.xla.library import enable, variables


def main(arguments: Sequence[str]) -> int:
    """Run the program that ``arguments`` name; without arguments print the variables.

    Args:
        arguments: a script, or ``-m`` and a module, followed by the program's arguments.
    """
    try:
        if not arguments:
            _print_variables()
            return 0
        enable()
    except CollectiveError as error:
        print(f"collective: {error}", file=sys.stderr)
        return 2
    detect_collective()
    if arguments[0] == "-m":
        sys.argv[:] = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(arguments)
        _run_script(arguments[0])
    return 0


def _print_variables() -> None:
    """Print commands that export the variables, for a shell's ``eval``."""
    try:
        exports = variables()
    except BaseException:
        print("false")  # an eval of nothing would succeed
        raise
    for name, value in exports.items():
        print(f"export {name}={shlex.quote(value)}")


def _run_script(path: str) -> None:
    if not os.path.isfile(path):  # a folder or an archive with a __main__.py
        runpy.run_path(path, run_name="__main__")
        return
    # Not by runpy, whose frames would be in every traceback of the program.
    module = ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
