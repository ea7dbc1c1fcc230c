"""Tables of ``docs/coming-from``: each row's calls run on two ranks, for both libraries."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import collective
from collective.communicator import foreign_names
from collective.contract.work import Work
from collective.testing import RankPool, run_ranks
from tests.support.interpreter import ROOT
from tests.support.mpi_launches import mpirun, needs

FOLDER = ROOT / "docs" / "coming-from"

# Arrays that may hold the result of another library's call: output arrays come before inputs.
OUTPUTS = ("z", "y", "one", "x")


@dataclass(frozen=True)
class Row:
    """A row: the other library's call, our call, and the result of both on each of two ranks."""

    page: str
    theirs: str
    ours: str
    gives: tuple[Any, Any]


def _cells(line: str) -> list[list[str]]:
    return [re.findall(r"`([^`]+)`", cell) for cell in line.strip().strip("|").split(" | ")]


def _tables(page: str) -> list[list[str]]:
    text = (FOLDER / f"{page}.md").read_text()
    return [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def rows(page: str) -> list[Row]:
    """Return the rows of the table of calls."""
    (table,) = (lines for lines in _tables(page) if lines[0].endswith("| here | gives |"))
    parsed = []
    for line in table[2:]:
        (theirs,), (ours,), gives = _cells(line)
        values = [ast.literal_eval(text) for text in gives]
        parsed.append(Row(page, theirs, ours, (values[0], values[-1])))
    return parsed


def names(page: str) -> dict[str, str]:
    """Return the expression that defines each name in the rows."""
    (table,) = (lines for lines in _tables(page) if lines[0] == "| name | is |")
    return {name: value for (name,), (value,) in map(_cells, table[2:])}


def _plain(value: Any) -> Any:
    """Return ``value`` with arrays converted to lists."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def results(
    page: str, calls: list[str], given: dict[str, Any], outputs: tuple[str, ...] = ()
) -> list[Any]:
    """Run each call with fresh arrays and return the results, or the errors as texts.

    A call consists of statements, and the last one is an expression. If the expression's value is
    None, the result is the first array of ``outputs`` that the call names, because the library
    writes its result there.
    """
    return [_result(names(page), call, dict(given), outputs) for call in calls]


def _result(
    fresh: dict[str, str], call: str, scope: dict[str, Any], outputs: tuple[str, ...]
) -> Any:
    for name, value in fresh.items():
        scope[name] = eval(value, scope)
    *first, last = ast.parse(call).body
    assert isinstance(last, ast.Expr)
    try:
        exec(compile(ast.Module(first, []), call, "exec"), scope)
        value = eval(compile(ast.Expression(last.value), call, "eval"), scope)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if value is None:
        written = [name for name in outputs if re.search(rf"\b{name}\b", call)]
        value = scope[written[0]] if written else None
    return _plain(value)


def our_side(comm: Any, page: str) -> list[Any]:
    """Run our calls of a page on one rank of two."""
    import collective

    scope: dict[str, Any] = {"np": np, "collective": collective, "comm": comm, "rank": comm.rank}
    if "torch." in "".join(names(page).values()):
        import torch

        scope["torch"] = torch
    if "jnp." in "".join(names(page).values()):
        import jax.numpy as jnp

        from collective.adapters.jax import functional

        scope |= {"jnp": jnp, "f": functional}
    return results(page, [row.ours for row in rows(page)], scope)


def side_of_torch(comm: Any, page: str, meeting: str) -> list[Any]:
    """Run the torch.distributed calls of its page on one rank of two."""
    import torch
    import torch.distributed as dist

    scope = {"torch": torch, "dist": dist, "rank": comm.rank}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=comm.rank, world_size=2)
    try:
        return results(page, [row.theirs for row in rows(page)], scope, OUTPUTS)
    finally:
        dist.destroy_process_group()


def under_mpiexec(page: str) -> None:
    """Run the other library's calls as a rank under mpiexec; rank 0 prints both ranks' results."""
    if page == "chainermn":
        import collective.adapters.chainer  # noqa: F401  Chainer on a current NumPy

        import chainermn  # isort: skip

        communicator = chainermn.create_communicator("naive")
        world = communicator.mpi_comm
        scope = {"np": np, "comm": communicator, "rank": communicator.rank}
    else:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        scope = {"np": np, "MPI": MPI, "comm": world, "rank": world.Get_rank()}
    own = results(page, [row.theirs for row in rows(page)], scope, OUTPUTS)
    every = world.gather(own, root=0)
    if every is not None:
        print(json.dumps(every))


# -- the tests ------------------------------------------------------------------------------

PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
# Those of mpi4jax need JAX, so tests/jax/test_pages.py runs them.
ROWS = [row for page in PAGES if page != "mpi4jax" for row in rows(page)]
MPI = ("mpi4py", "chainermn")


def plain(value: Any) -> Any:
    """Return ``value`` after a round trip through JSON, as results of other processes have had."""
    return json.loads(json.dumps(value))


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def named(row: Row) -> str:
    return f"{row.page}: {row.theirs}"


@functools.cache
def ours(page: str) -> list[list[Any]]:
    # Processes: in Python 3.11 ast.parse() fails if another thread parses at the same time.
    return run_ranks(2, our_side, page, backend="shm")


@functools.cache
def under_mpi(page: str) -> list[list[Any]]:
    script = f"from tests.docs.test_coming_from import under_mpiexec; under_mpiexec({page!r})"
    (line,) = [x for x in mpirun("mpich", 2, script).stdout.splitlines() if x.startswith("[[")]
    return json.loads(line)


@pytest.fixture(scope="module")
def torch_distributed(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    skip_without("torch")
    meeting = tmp_path_factory.mktemp("meeting")
    with RankPool(2, "shm") as pool:
        for attempt in range(3):
            store = str(meeting / f"store.{attempt}")
            outcome = pool.run(side_of_torch, "torch-distributed", store)
            # On a busy machine Gloo sometimes closes one of its own connections.
            if "connectFullMesh failed" not in str(outcome):
                break
        return outcome


def hold(row: Row, results: list[list[Any]]) -> None:
    """Compare a row's results; if our result is None, the other library's array is not compared."""
    nth = rows(row.page).index(row)
    for rank, expected in enumerate(row.gives):
        if expected is not None:
            assert plain(results[rank][nth]) == plain(expected), f"rank {rank}: {row}"


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_own_call_returns_value_in_table(row: Row) -> None:
    if row.page in ("torch-distributed", "horovod", "ray"):
        skip_without("torch")
    nth = rows(row.page).index(row)
    assert plain([rank[nth] for rank in ours(row.page)]) == plain(list(row.gives))


@pytest.mark.whole
@needs("mpich")
@pytest.mark.parametrize("row", [row for row in ROWS if row.page in MPI], ids=named)
def test_foreign_call_over_mpi_returns_value_in_table(row: Row) -> None:
    if row.page == "chainermn":
        skip_without("chainer")
    hold(row, under_mpi(row.page))


@pytest.mark.parametrize("row", [r for r in ROWS if r.page == "torch-distributed"], ids=named)
def test_torch_distributed_call_returns_value_in_table(
    row: Row, torch_distributed: list[list[Any]]
) -> None:
    hold(row, torch_distributed)


@pytest.mark.parametrize("page", PAGES)
def test_every_table_line_is_parsed_as_row(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text()
    table = text.partition("| here | gives |\n")[2].partition("\n\n")[0]
    assert len(table.splitlines()) - 1 == len(rows(page)) > 8


# -- hints ----------------------------------------------------------------------------------------

#: Names at the front of calls of other libraries.
LIBRARIES = ("MPI", "col", "comm", "dist", "hvd")
#: Names that exist here as well.
METHODS = {name for name in dir(collective.Communicator) if not name.startswith("_")}
ATTRIBUTES = METHODS | set(dir(collective)) | set(dir(Work)) | {"local_rank", "local_size"}


def _foreign_column() -> list[tuple[str, str]]:
    """Return page and code of the first column of each table that translates calls."""
    found = []
    for path in sorted(FOLDER.glob("*.md")):
        for lines in _tables(path.stem):
            if lines[0] != "| name | is |":
                found += [(path.stem, code) for line in lines[2:] for code in _cells(line)[0]]
    return found


def _foreign_names() -> list[tuple[str, str]]:
    """Return page and name of each attribute of another library's objects in the tables."""
    pattern = rf"(?:\b(?:{'|'.join(LIBRARIES)}|request|work)|\))\.(\w+)"
    return sorted(
        {(page, n) for page, code in _foreign_column() for n in re.findall(pattern, code)}
    )


def _foreign_keywords() -> list[tuple[str, str, str]]:
    """Return page, function and keyword of each keyword of another library's call."""
    found = set()
    for page, code in _foreign_column():
        for match in re.finditer(rf"\b(?:{'|'.join(LIBRARIES)})\.(\w+)\(", code):
            try:
                calls = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)]
            except SyntaxError:  # the text leaves something out
                continue
            for call in calls:
                if isinstance(call.func, ast.Attribute) and call.func.attr == match[1]:
                    found |= {(page, match[1], str(k.arg)) for k in call.keywords}
    return sorted(found)


@pytest.mark.parametrize(("page", "name"), _foreign_names())
def test_foreign_name_in_a_table_has_a_hint(page: str, name: str) -> None:
    if name in ATTRIBUTES:
        return
    if name in ("Wait", "Test"):  # of a request: the hint is that of Work
        with pytest.raises(AttributeError, match="; use work"):
            getattr(Work("call"), name)
    assert foreign_names.remedy_of(name, "collective"), f"{page}.md: no hint for {name}"


@pytest.mark.parametrize(("page", "function", "keyword"), _foreign_keywords())
def test_foreign_keyword_in_a_table_has_a_hint(page: str, function: str, keyword: str) -> None:
    remedy = foreign_names.remedy_of(function, "comm") or f"comm.{function}("
    called = re.findall(r"comm\.(\w+)\(", remedy)
    methods = [getattr(collective.Communicator, name) for name in called]
    # comm.send of mpi4py and ChainerMN carries objects.
    methods += [
        m for name in called if (m := getattr(collective.Communicator, f"{name}_object", 0))
    ]
    assert methods, f"{page}.md: {function} has no counterpart"
    text = f"{function}() got an unexpected keyword argument {keyword!r}"
    for method in methods:
        own = inspect.signature(method).parameters
        explained = str(foreign_names.explain_arguments(method, TypeError(text)))
        assert keyword in own or "; use " in explained, f"{page}.md: no hint for {keyword}="
