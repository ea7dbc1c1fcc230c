"""Topology of a host, and the division of its processors among ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collective.platform import topology, usable_cores
from collective.platform.topology import Processor, listed, processors, shares


def host(nodes: int, cores: int, threads: int = 1) -> list[Processor]:
    """Return the processors of a host; the second thread of a core comes after all first ones."""
    total = nodes * cores
    return sorted(
        Processor(core // cores, core, core + thread * total, core // cores)
        for core in range(total)
        for thread in range(threads)
    )


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with the kernel's files about two sockets of two cores of two threads."""
    files = {"cpu/online": "0-7", "node/node0/cpulist": "0-1,4-5", "node/node1/cpulist": "2-3,6-7"}
    for number in range(8):
        folder = f"cpu/cpu{number}/topology"
        files[f"{folder}/thread_siblings_list"] = f"{number % 4},{number % 4 + 4}"
        files[f"{folder}/physical_package_id"] = str(number % 4 // 2)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(topology, "SYSTEM", tmp_path)
    return tmp_path


def test_processors_have_nodes_cores_and_sockets(system: Path) -> None:
    assert processors() == [
        *(Processor(0, 0, 0, 0), Processor(0, 0, 4, 0), Processor(0, 1, 1, 0)),
        *(Processor(0, 1, 5, 0), Processor(1, 2, 2, 1), Processor(1, 2, 6, 1)),
        *(Processor(1, 3, 3, 1), Processor(1, 3, 7, 1)),
    ]


def test_usable_processors_are_those_of_the_affinity(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 6, 7})
    assert [one.number for one in processors(usable=True)] == [1, 6, 7]


def test_processors_without_files_are_cores_of_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "SYSTEM", tmp_path / "absent")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})
    assert processors() == [Processor(0, 2, 2, 0), Processor(0, 5, 5, 0)]


def test_unknown_socket_counts_as_the_first(system: Path) -> None:
    (system / "cpu/cpu3/topology/physical_package_id").write_text("-1\n")
    assert [one.socket for one in processors() if one.number == 3] == [0]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([7], "7"), ([3, 0, 1, 2, 8], "0-3,8"), ([1, 3, 5], "1,3,5")]
)
def test_listed_writes_numbers_as_the_kernel(numbers: list[int], text: str) -> None:
    assert listed(numbers) == text


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        pytest.param(host(1, 4), [[0, 1], [2, 3]], id="halves of one node"),
        pytest.param(host(1, 3), [[0], [1, 2]], id="a core left over"),
        pytest.param(host(2, 4), [[0, 1, 2, 3], [4, 5, 6, 7]], id="a node for each rank"),
        pytest.param(host(2, 2), [[0, 1], [2, 3]], id="two nodes"),
        pytest.param(host(4, 1), [[0, 1], [2, 3]], id="neighbouring nodes"),
        pytest.param(host(1, 2, 2), [[0, 2], [1, 3]], id="both threads of a core"),
        pytest.param(host(2, 2)[1:], [[1], [2, 3]], id="part of a node"),
        pytest.param(host(2, 8)[:2], [[0], [1]], id="one node of two"),
    ],
)
def test_shares_of_two_ranks(usable: list[Processor], expected: list[list[int]]) -> None:
    assert shares(usable, 2) == expected


def test_one_rank_gets_all_processors() -> None:
    assert shares(host(2, 2, 2), 1) == [list(range(8))]


def test_threads_of_a_core_are_not_enough_for_two_ranks() -> None:
    assert shares(host(1, 1, 2), 2) == []


@pytest.mark.parametrize("ranks", range(1, 13))
@pytest.mark.parametrize("shape", [(1, 12, 2), (2, 6, 2), (3, 4, 1), (4, 3, 2)], ids=str)
def test_shares_are_disjoint_and_cover_the_host(shape: tuple[int, int, int], ranks: int) -> None:
    usable = host(*shape)
    parts = shares(usable, ranks)
    assert len(parts) == ranks
    assert sorted(number for part in parts for number in part) == list(range(len(usable)))
    core_of = {one.number: one.core for one in usable}
    cores = [{core_of[number] for number in part} for part in parts]
    assert sum(map(len, cores)) == len(set(core_of.values()))
    node_of = {one.number: one.node for one in usable}
    if ranks >= shape[0]:  # no rank has cores of two nodes
        assert [len({node_of[number] for number in part}) for part in parts] == [1] * ranks


def test_usable_cores_are_those_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(pid: int) -> set[int]:
        if pid == 9:
            raise ProcessLookupError
        return {0: {1}, 7: {1, 2}, 8: {5}}[pid]

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert [usable_cores(), usable_cores(7, 8, 9)] == [1, 3]
