"""The types of the public API: programs under mypy and pyright, and no ``Any`` without a reason.

Both checkers must report the lines of the programs that end in ``# error``, and no other line.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import collective
from collective.communicator import Communicator, communicator
from tests.support.interpreter import ROOT, run, run_python

PROGRAMS = sorted((ROOT / "tests" / "typing").glob("*.py"))
Lines = dict[str, list[tuple[int, str]]]

#: The calls with ``Any`` in their annotations, and the reasons.
ANYTHING = {
    "broadcast": "a rank that passes None gets the class of the root's array",
    "scatter": "a rank that passes None gets the class of the root's array",
    "broadcast_object": "a rank that passes None gets the class of the root's object",
    "scatter_object": "a rank that passes None gets the class of the root's object",
    "recv": "a rank that passes None gets the class of the sender's array",
    "recv_object": "the result has the class of the sender's object",
    "empty": "the result is of a named framework, whose types need not be installed",
}


def _mypy() -> Lines:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    done = run_python("-m", "mypy", "--strict", "--no-error-summary", *PROGRAMS)
    assert done.returncode < 2, done.stdout + done.stderr
    errors: Lines = {}
    for line in done.stdout.splitlines():
        match = re.match(r"(.+?):(\d+): error: (.*)", line)
        if match:
            errors.setdefault(Path(match[1]).name, []).append((int(match[2]), match[3]))
    return errors


def _pyright() -> Lines:
    command = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("basedpyright is not installed")
    folder = ROOT / "tests" / "typing"
    done = run(command, "-p", folder, "--pythonpath", sys.executable, "--outputjson")
    errors: Lines = {}
    for diagnostic in json.loads(done.stdout)["generalDiagnostics"]:
        if diagnostic["severity"] == "error":
            number = diagnostic["range"]["start"]["line"] + 1
            errors.setdefault(Path(diagnostic["file"]).name, []).append(
                (number, diagnostic["message"])
            )
    return errors


@pytest.mark.whole
@pytest.mark.parametrize("check", [_mypy, _pyright], ids=["mypy", "pyright"])
def test_checkers_report_exactly_marked_lines(check: Any) -> None:
    errors = check()
    wrong = []
    for program in PROGRAMS:
        lines = program.read_text().splitlines()
        expected = {n for n, line in enumerate(lines, 1) if line.endswith("# error")}
        reported = dict(errors.get(program.name, []))
        wrong += [f"{program.name}:{n}: no error: {lines[n - 1]}" for n in expected - set(reported)]
        wrong += [f"{program.name}:{n}: {reported[n]}" for n in set(reported) - expected]
    assert wrong == []
    assert "wrong.py" in errors


@pytest.mark.whole
def test_mypy_explains_a_wrong_argument_in_few_lines() -> None:
    """An error names the overloads, and nobody reads more than ten lines of them."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    done = run_python(
        "-m", "mypy", "--strict", "--no-error-summary", PROGRAMS[-1].parent / "wrong.py"
    )
    lines = Counter(line.split(":")[1] for line in done.stdout.splitlines())
    assert 0 < max(lines.values()) <= 10, lines.most_common(3)


def _annotations(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    parameters = [*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [
        ast.unparse(annotation)
        for annotation in [*(a.annotation for a in parameters if a is not None), function.returns]
        if annotation is not None
    ]


def _of_anything(tree: ast.AST, typed: set[str]) -> set[str]:
    """Return the public functions of a module that have ``Any`` in an annotation.

    Args:
        typed: names of functions with overloads, which hide the function's own annotations. The
            function adds to this set the overloaded functions that it meets.
    """
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        overloaded = any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
        if node.name in typed and not overloaded:
            continue
        if overloaded:
            typed.add(node.name)
        texts = [re.sub(r"np\.ndarray\[Any, .*?\]\]?", "", text) for text in _annotations(node)]
        if any(re.search(r"\bAny\b", text) for text in texts):
            names.add(node.name)
    return names


def _sources() -> list[Path]:
    """Return the files that define the public API; the file of signatures comes first."""
    folder = Path(communicator.__file__).parent
    classes = [item for item in Communicator.__mro__ if item.__module__.startswith("collective.")]
    public = [getattr(collective, name) for name in collective.__all__]
    classes += [item for item in public if inspect.isclass(item)]
    functions = [inspect.unwrap(item) for item in public if inspect.isfunction(item)]
    modules: list[ModuleType | None] = [inspect.getmodule(item) for item in [*classes, *functions]]
    files = {Path(str(module.__file__)) for module in modules if module is not None}
    return [folder / "signatures.pyi", *sorted(item for item in files if item.suffix == ".py")]


def test_public_api_has_any_only_with_reason() -> None:
    typed: set[str] = set()
    with_any: set[str] = set()
    for path in _sources():
        tree = ast.parse(path.read_text())
        if path.suffix == ".pyi":  # comes first, and overrides the methods' annotations
            typed |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            with_any |= _of_anything(tree, set())
        else:
            with_any |= _of_anything(tree, typed)
    names = {*collective.__all__, *dir(Communicator)}
    assert {name for name in with_any if name in names} == set(ANYTHING)


def test_signatures_match_functions_of_package() -> None:
    text = (Path(communicator.__file__).parent / "signatures.pyi").read_text()
    methods = re.findall(r"def (\w+)\(", text)
    assert "# type: ignore[override]" in text
    missing = [name for name in methods if name not in collective.__all__]
    assert missing == []
    for name in {*methods}:
        expected = inspect.signature(inspect.unwrap(getattr(collective, name))).parameters
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                annotated = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
                assert sorted(annotated) == sorted(expected), name
