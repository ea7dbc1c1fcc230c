"""The tables of ``docs/coming-from``, and what their rows come to: on our side, and on theirs."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAGES = Path(__file__).resolve().parent.parent / "docs" / "coming-from"

# Where the other libraries write, before what they read.
OUTPUTS = ("z", "y", "one", "x")


@dataclass(frozen=True)
class Row:
    """What is called there, what is called here, and what both give on each of two ranks."""

    page: str
    theirs: str
    ours: str
    gives: tuple[Any, Any]


def _cells(line: str) -> list[list[str]]:
    return [re.findall(r"`([^`]+)`", cell) for cell in line.strip().strip("|").split(" | ")]


def _tables(page: str) -> list[list[str]]:
    text = (PAGES / f"{page}.md").read_text()
    return [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def rows(page: str) -> list[Row]:
    """Return the rows of the table of calls."""
    (table,) = (lines for lines in _tables(page) if lines[0].endswith("| here | gives |"))
    found = []
    for line in table[2:]:
        (theirs,), (ours,), gives = _cells(line)
        values = [ast.literal_eval(text) for text in gives]
        found.append(Row(page, theirs, ours, (values[0], values[-1])))
    return found


def names(page: str) -> dict[str, str]:
    """Return what the names in the rows are, as expressions."""
    (table,) = (lines for lines in _tables(page) if lines[0] == "| name | is |")
    return {name: value for (name,), (value,) in map(_cells, table[2:])}


def _plain(value: Any) -> Any:
    """Return ``value`` without arrays, in lists."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def results(
    page: str, calls: list[str], given: dict[str, Any], outputs: tuple[str, ...] = ()
) -> list[Any]:
    """Run each call with fresh arrays and return what they give, or the errors as texts.

    A call is statements of which the last is an expression. What has no value gives the first
    array of ``outputs`` that it names: where that library writes its result.
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


def ours(comm: Any, page: str) -> list[Any]:
    """Run our side on one rank of two."""
    import collective

    given: dict[str, Any] = {"np": np, "collective": collective, "comm": comm, "rank": comm.rank}
    if "torch." in "".join(names(page).values()):
        import torch

        given["torch"] = torch
    return results(page, [row.ours for row in rows(page)], given)


def torch_distributed(comm: Any, page: str, meeting: str) -> list[Any]:
    """Run the other side of torch.distributed's page on one rank of two."""
    import torch
    import torch.distributed as dist

    given = {"torch": torch, "dist": dist, "rank": comm.rank}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=comm.rank, world_size=2)
    try:
        return results(page, [row.theirs for row in rows(page)], given, OUTPUTS)
    finally:
        dist.destroy_process_group()


def under_mpiexec(page: str) -> None:
    """Run the other side as a rank under mpiexec; rank 0 prints what both give."""
    if page == "chainermn":
        import collective.adapters.chainer  # noqa: F401  Chainer on a current NumPy

        import chainermn  # isort: skip

        communicator = chainermn.create_communicator("naive")
        world = communicator.mpi_comm
        given = {"np": np, "comm": communicator, "rank": communicator.rank}
    else:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        given = {"np": np, "MPI": MPI, "comm": world, "rank": world.Get_rank()}
    mine = results(page, [row.theirs for row in rows(page)], given, OUTPUTS)
    every = world.gather(mine, root=0)
    if every is not None:
        print(json.dumps(every))
