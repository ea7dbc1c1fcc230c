"""Lists of hosts: from the command line, from files, and from the jobs of batch systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from collective.errors import ConfigError
from collective.start.host_list import HostSlots, from_batch_system, from_file, from_text


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:4", [("a", 4), ("b", 4)]),
        ("a, b:2", [("a", 1), ("b", 2)]),
        ("a:2,b,a:2", [("a", 4), ("b", 1)]),
        ("me@node-1.example:8", [("me@node-1.example", 8)]),
        ("10.0.0.1:2,[fe80::1]:3", [("10.0.0.1", 2), ("fe80::1", 3)]),
    ],
)
def test_list_of_hosts_has_numbers_of_ranks(text: str, hosts: list[tuple[str, int]]) -> None:
    assert from_text(text, "--hosts") == hosts


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a:0", "a:x", "a b", "-oProxyCommand=x", ":4", "a:-1", "a;b"]
)
def test_text_that_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--hosts .* is not a host\. Write NAME:RANKS"):
        from_text(text, "--hosts")


def test_host_file_has_the_forms_of_other_launchers(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the first two\na:2\nb slots=3   # of Open MPI\n\nc 4\nd\nd\n")
    assert from_file(path, "--hostfile") == [("a", 2), ("b", 3), ("c", 4), ("d", 2)]


def test_wrong_line_of_host_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:2\n\nb:two\n")
    with pytest.raises(ConfigError, match=rf"--hostfile {path}, line 3: 'b:two' is not a host"):
        from_file(path, "--hostfile")


def test_missing_host_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hostfile .*none: cannot be read: No such file"):
        from_file(tmp_path / "none", "--hostfile")


# Variables of real jobs: Slurm 23.11, OpenPBS 23, LSF 10.1.
def test_job_of_slurm_gives_hosts_and_tasks() -> None:
    environ = {"SLURM_JOB_NODELIST": "gpu[07-08],cpu1", "SLURM_TASKS_PER_NODE": "4(x2),2"}
    assert from_batch_system(environ) == [("gpu07", 4), ("gpu08", 4), ("cpu1", 2)]


def test_job_of_slurm_without_tasks_has_one_rank_for_each_host() -> None:
    assert from_batch_system({"SLURM_JOB_NODELIST": "n[1-2]"}) == [("n1", 1), ("n2", 1)]


def test_contradicting_variables_of_slurm_are_named() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x3)"}
    with pytest.raises(ConfigError, match=r"SLURM_TASKS_PER_NODE='4\(x3\)' lists 3 hosts"):
        from_batch_system(environ)


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_job_with_file_of_hosts_counts_lines(tmp_path: Path, variable: str) -> None:
    path = tmp_path / "nodes"
    path.write_text("n1\nn1\nn2\nn2\n")
    assert from_batch_system({variable: str(path)}) == [("n1", 2), ("n2", 2)]


def test_job_of_lsf_counts_words() -> None:
    assert from_batch_system({"LSB_HOSTS": "h1 h1 h2"}) == [("h1", 2), ("h2", 1)]
    assert from_batch_system({"LSB_MCPU_HOSTS": "h1 2 h2 1"}) == [("h1", 2), ("h2", 1)]


def test_odd_list_of_lsf_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LSB_MCPU_HOSTS='h1 2 h2'; it must be"):
        from_batch_system({"LSB_MCPU_HOSTS": "h1 2 h2"})


def test_auto_outside_a_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--hosts auto: none of SLURM_JOB_NODELIST, .* is set"):
        from_batch_system({"PATH": "/bin"})


def test_entries_are_named_tuples() -> None:
    assert from_text("a", "--hosts")[0] == HostSlots(name="a", slots=1)
