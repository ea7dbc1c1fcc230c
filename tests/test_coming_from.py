"""The tables of ``docs/coming-from``: each row is run on two ranks, on our side and on theirs."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from collective.testing import RankPool, run_ranks
from tests import coming_from
from tests.coming_from import Row
from tests.mpi_launches import mpirun, needs

PAGES = sorted(path.stem for path in coming_from.PAGES.glob("*.md"))
ROWS = [row for page in PAGES for row in coming_from.rows(page)]
MPI = ("mpi4py", "chainermn")


def plain(value: Any) -> Any:
    """Return ``value`` as JSON has it, which is how results come from other processes."""
    return json.loads(json.dumps(value))


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def named(row: Row) -> str:
    return f"{row.page}: {row.theirs}"


@functools.cache
def ours(page: str) -> list[list[Any]]:
    return run_ranks(2, coming_from.ours, page)


@functools.cache
def under_mpi(page: str) -> list[list[Any]]:
    script = f"from tests.coming_from import under_mpiexec; under_mpiexec({page!r})"
    (line,) = [x for x in mpirun("mpich", 2, script).stdout.splitlines() if x.startswith("[[")]
    return json.loads(line)


@pytest.fixture(scope="module")
def torch_distributed(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    skip_without("torch")
    meeting = tmp_path_factory.mktemp("meeting")
    with RankPool(2, "shm") as pool:
        for attempt in range(3):
            store = str(meeting / f"store.{attempt}")
            found = pool.run(coming_from.torch_distributed, "torch-distributed", store)
            # On a busy machine one of Gloo's own connections is closed now and then.
            if "connectFullMesh failed" not in str(found):
                break
        return found


def hold(row: Row, results: list[list[Any]]) -> None:
    """Compare one row's results; where ours is None the other side's array is as it was."""
    nth = coming_from.rows(row.page).index(row)
    for rank, expected in enumerate(row.gives):
        if expected is not None:
            assert plain(results[rank][nth]) == plain(expected), f"rank {rank}: {row}"


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_our_side_gives_what_the_table_says(row: Row) -> None:
    if row.page in ("torch-distributed", "horovod", "ray"):
        skip_without("torch")
    nth = coming_from.rows(row.page).index(row)
    assert plain([rank[nth] for rank in ours(row.page)]) == plain(list(row.gives))


@needs("mpich")
@pytest.mark.parametrize("row", [row for row in ROWS if row.page in MPI], ids=named)
def test_their_side_gives_the_same_over_mpi(row: Row) -> None:
    if row.page == "chainermn":
        skip_without("chainer")
    hold(row, under_mpi(row.page))


@pytest.mark.parametrize("row", [r for r in ROWS if r.page == "torch-distributed"], ids=named)
def test_torch_distributed_gives_the_same(row: Row, torch_distributed: list[list[Any]]) -> None:
    hold(row, torch_distributed)


@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_a_table_of_calls_is_a_row(page: str) -> None:
    text = (Path(coming_from.PAGES) / f"{page}.md").read_text()
    table = text.partition("| here | gives |\n")[2].partition("\n\n")[0]
    assert len(table.splitlines()) - 1 == len(coming_from.rows(page)) > 8
