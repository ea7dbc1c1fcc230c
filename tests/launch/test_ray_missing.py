"""Errors that a program gets where Ray is not installed."""

from __future__ import annotations

from tests.support.interpreter import run_python

PROGRAM = """
import sys
sys.modules["ray"] = None
import collective
try:
    import collective.launch.ray
except collective.BackendUnavailableError as error:
    print(error)
"""


def test_import_without_ray_names_the_install_command() -> None:
    printed = run_python("-c", PROGRAM).stdout
    assert printed.startswith("collective.launch.ray: Ray cannot be imported: import of ray halted")
    assert "pip install" in printed
    assert "ray" in printed.partition("pip install")[2]
