"""The types of the public API: programs under mypy and pyright, and no ``Any`` that has no reason.

A line of a program that ends in ``# error`` is one that both report, and no other is.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import collective
from collective.communicator import Communicator, communicator
from tests.support.interpreter import ROOT, run, run_python

PROGRAMS = sorted((ROOT / "tests" / "typing").glob("*.py"))
Lines = dict[str, list[tuple[int, str]]]

#: What may be Any, and why.
ANYTHING = {
    "broadcast": "who passes None gets what the root has",
    "scatter": "who passes None gets what the root has",
    "broadcast_object": "who passes None gets what the root has",
    "scatter_object": "who passes None gets what the root has",
    "recv": "who passes None gets what the sender has",
    "recv_object": "it is what the sender has",
    "empty": "of a framework that is named: its types need not be installed",
    "plan": "its arguments are another method's",
}


def _mypy() -> Lines:
    done = run_python("-m", "mypy", "--strict", "--no-error-summary", *PROGRAMS)
    assert done.returncode < 2, done.stdout + done.stderr
    found: Lines = {}
    for line in done.stdout.splitlines():
        match = re.match(r"(.+?):(\d+): error: (.*)", line)
        if match:
            found.setdefault(Path(match[1]).name, []).append((int(match[2]), match[3]))
    return found


def _pyright() -> Lines:
    command = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("basedpyright is not installed")
    folder = ROOT / "tests" / "typing"
    done = run(command, "-p", folder, "--pythonpath", sys.executable, "--outputjson")
    found: Lines = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            number = each["range"]["start"]["line"] + 1
            found.setdefault(Path(each["file"]).name, []).append((number, each["message"]))
    return found


@pytest.mark.parametrize("check", [_mypy, _pyright], ids=["mypy", "pyright"])
def test_checkers_report_the_lines_that_say_so_and_no_others(check: Any) -> None:
    found = check()
    wrong = []
    for program in PROGRAMS:
        lines = program.read_text().splitlines()
        expected = {n for n, line in enumerate(lines, 1) if line.endswith("# error")}
        reported = dict(found.get(program.name, []))
        wrong += [f"{program.name}:{n}: no error: {lines[n - 1]}" for n in expected - set(reported)]
        wrong += [f"{program.name}:{n}: {reported[n]}" for n in set(reported) - expected]
    assert wrong == []
    assert "wrong.py" in found


def _annotations(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    given = [*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [
        ast.unparse(each)
        for each in [*(a.annotation for a in given if a is not None), function.returns]
        if each is not None
    ]


def _of_anything(tree: ast.AST, typed: set[str]) -> set[str]:
    """Return the public functions of a module one of whose annotations is Any.

    Args:
        typed: is added those that have overloads, behind which the function itself is not seen.
    """
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        overloaded = any(ast.unparse(each) == "overload" for each in node.decorator_list)
        if node.name in typed and not overloaded:
            continue
        if overloaded:
            typed.add(node.name)
        texts = [re.sub(r"np\.ndarray\[Any, .*?\]\]?", "", text) for text in _annotations(node)]
        if any(re.search(r"\bAny\b", text) for text in texts):
            found.add(node.name)
    return found


def _sources() -> list[Path]:
    """Return the files that have what is public: of the signatures first."""
    folder = Path(communicator.__file__).parent
    classes = [each for each in Communicator.__mro__ if each.__module__.startswith("collective.")]
    public = [getattr(collective, name) for name in collective.__all__]
    classes += [each for each in public if inspect.isclass(each)]
    functions = [inspect.unwrap(each) for each in public if inspect.isfunction(each)]
    modules: list[ModuleType | None] = [inspect.getmodule(each) for each in [*classes, *functions]]
    files = {Path(str(module.__file__)) for module in modules if module is not None}
    return [folder / "signatures.pyi", *sorted(each for each in files if each.suffix == ".py")]


def test_nothing_that_a_user_calls_is_any_without_a_reason() -> None:
    typed: set[str] = set()
    found: set[str] = set()
    for path in _sources():
        tree = ast.parse(path.read_text())
        if path.suffix == ".pyi":  # which stands before the methods
            typed |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            found |= _of_anything(tree, set())
        else:
            found |= _of_anything(tree, typed)
    names = {*collective.__all__, *dir(Communicator)}
    assert {name for name in found if name in names} == set(ANYTHING)


def test_every_call_on_arrays_has_overloads() -> None:
    text = (Path(communicator.__file__).parent / "signatures.pyi").read_text()
    methods = re.findall(r"def (\w+)\(", text)
    assert "# type: ignore[override]" in text
    missing = [name for name in methods if name not in collective.__all__]
    assert missing == []
    for name in {*methods}:
        theirs = inspect.signature(inspect.unwrap(getattr(collective, name))).parameters
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                ours = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
                assert sorted(ours) == sorted(theirs), name
