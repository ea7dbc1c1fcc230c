"""Output of the commands, which fits 80 columns without cuts, and their reading of options."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from collective.tools import show
from collective.tools.bench import figures
from collective.tools.bench.machine import Observer
from collective.tools.bench.measure import Gap, Pace, Record
from collective.tools.bench.run import Benchmark, measure
from collective.tools.cli.main import main

# -- figures and options ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "unknown"), (0, "0 B"), (1000, "1000 B"), (1024, "1 KiB"), (1000 << 10, "0.977 MiB"),
        (999 << 10, "999 KiB"), (1023 << 20, "0.999 GiB"), (5000 << 40, "5000 TiB"),
    ],
)  # fmt: skip
def test_size_name_has_three_digits_and_no_exponent(nbytes: float | None, text: str) -> None:
    assert show.size_name(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0"), (2e-10, "0.2 ns"), (1.234e-5, "12.3 µs"), (9.996e-4, "1 ms"), (5000.0, "5000 s")],
)
def test_time_name_has_three_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert show.time_name(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(None, "-"), (9.999e8, "1 GB/s"), (12.34e9, "12.3 GB/s"), (0.0, "0 B/s")]
)
def test_rate_name_has_three_digits_and_no_exponent(rate: float | None, text: str) -> None:
    assert show.rate_name(rate) == text


@pytest.mark.parametrize("text", ["", "a,,b", "a,"])
def test_names_with_empty_name_raise_argument_error(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="names with commas between them"):
        show.names(text)


@pytest.mark.parametrize("text", ["0", "2,x", "", "-1"])
def test_counts_below_one_raise_argument_error(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="integers >= 1"):
        show.counts(text)


# -- the layout ---------------------------------------------------------------------------------

HEADER = ["size", "side", "p50", "p99", "why not"]
ROWS = [["4 B", "shm", "123456", "1", ""], ["", "gloo", "–", "–", "it is " * 20]]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (300, [[0, 1, 2, 3, 4]]),
        (51, [[0, 1, 2, 3, 4]]),
        (48, [[0, 1, 2, 3], [0, 1, 4]]),
        (20, [[0, 1, 2], [0, 1, 3], [0, 1, 4]]),
    ],
)
def test_parts_splits_columns_that_do_not_fit(width: int, expected: list[list[int]]) -> None:
    assert show.parts(HEADER, ROWS, width) == expected


def test_lines_aligns_figures_right() -> None:
    rows = [["size", "µs", "GB/s"], ["4 B", "1.5", "–"], ["1 KiB", "1234", "27"]]
    assert show.lines(rows, 80) == [
        "size     µs  GB/s",
        "4 B     1.5     –",
        "1 KiB  1234    27",
    ]


def test_lines_wraps_at_spaces_and_ignores_single_wide_cell() -> None:
    rows = [
        ["key", "value", "origin"],
        ["one", "1", "the environment, as everything else that is here"],
        ["two", "/a/path/that/is/longer/than/that", "a file"],
    ]
    assert show.lines(rows, 32) == [
        "key  value  origin",
        "one  1      the environment, as",
        "            everything else that",
        "            is here",
        "two  /a/path/that/is/longer/than/that",
        "            a file",
    ]


# -- the commands' tables -----------------------------------------------------------------------


def record(method: str, contestant: str, memory: str, framework: str | None) -> Record:
    latency = method == "latency"
    return Record(
        "reduce_scatter", 65536, "complex128", 16, contestant, memory, framework, method,
        1.23e-4, *((4.56e-4, 7.89e-4) if latency else (None, None)), 1e-4, 2e-4,
        *((None, None) if latency else (11.1e9, 22.2e9)), 100, 0,
    )  # fmt: skip


SIDES = [("shm", "symmetric", "torch.cuda"), ("hierarchical", "ordinary", "torch.cuda"),
         ("mpi4py/openmpi", "", None), ("mpi4py/intelmpi", "", None),
         ("torch", "", None)]  # fmt: skip
GAP = Gap("reduce_scatter", 65536, "complex128", 16, "nccl",
          "no GPU: /dev/nvidia0 is not there, and so no library of NVIDIA's is of use")  # fmt: skip


def bench(method: str) -> None:
    figures.show([record(method, *side) for side in SIDES], [GAP])


def parity() -> None:
    from collective.tools.parity import report

    frameworks = ["numpy", "torch", "chainer", "cupy", "torch.cuda", "mixed"]
    results = [
        {"transport": "hierarchical", "framework": name, "ranks": ranks, "operation": operation,
         "op": "sum", "order": "", "dtype": "complex128", "passed": 1234, "unsupported": 56,
         "failed": 0, "worst_ulp": 1.25, "bound_ulp": 12.5}
        for name in frameworks for ranks in (2, 3, 4) for operation in ("all_reduce", "scan")
    ]  # fmt: skip
    agreement = {"what": "chainer, resnet: the weights after 8 steps on 4 ranks over hierarchical",
                 "difference": 1.2e-7, "allowed": 1e-6, "passed": True}  # fmt: skip
    data = {
        "transports": [{"name": "hierarchical", "available": True}],
        "frameworks": [{"name": name, "available": True} for name in frameworks],
        "ranks": [2, 3, 4], "results": results, "training": [agreement],
        "failures": [], "unsupported": [], "exit_code": 0, "seed": 0,
        "collective": "1.0", "versions": {"numpy": "2.4"}, "machine": Observer().machine(),
    }  # fmt: skip
    report.show(show.Console(), data)


def profile() -> None:
    from collective.tools.profile import report
    from collective.tools.profile.measure import OperationCost, Profile

    cost = OperationCost("reduce_scatter", 123_456, 1 << 40, 2e12, 123.4, 50.0, 73.4,
                         Counter({13: 70, 1: 30}), 10.0, 8.7)  # fmt: skip
    about = {"rank": 0, "size": 16, "local_size": 16, "cores": 32, "backend": "hierarchical"}
    report.show(show.Console(), Profile(about, 16, 200.0, [cost], None, 2e-5))


def config() -> None:
    assert main(["config"]) == 0


#: For each command: a function that prints its tables, and texts that must appear uncut.
COMMANDS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "bench --latency": (lambda: bench("latency"), ["123", "456", "789", "× mpi4py"]),
    "bench --bandwidth": (lambda: bench("bandwidth"), ["123", "11.1", "22.2", "1.00"]),
    "parity": (parity, ["hierarchical", "torch.cuda", "3702", "1.25 / 12.50", "1.2e-07", "1e-06"]),
    "profile": (profile, ["reduce_scatter", "123,456", "rank 13: 70%", "87%", "27.2 GB/s"]),
    "config": (config, ["backend", "shrink_grace", "environment", "COLLECTIVE_STORE"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_of_command_fit_80_columns(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("COLLECTIVE_STORE", "tcp://" + "a-name." * 5 + "example:12345")
    show_tables, texts = COMMANDS[command]
    show_tables()
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80, text
    assert "…" not in text
    for expected in texts:
        assert expected in text, text


def test_output_wraps_texts_but_not_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = show.Console()
    out.say("\nsome words that are too many\n/a/very/long/path/that/stays")
    out.quote("words that are not wrapped at all!")
    assert capsys.readouterr().out.splitlines() == [
        "", "some words that are", "too many", "/a/very/long/path/that/stays",
        "words that are not wrapped at all!",
    ]  # fmt: skip


def test_output_on_a_terminal_colours_failures_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    show.Console().quote("passed FAILED")
    monkeypatch.setenv("NO_COLOR", "1")
    show.Console().quote("passed FAILED")
    assert capsys.readouterr().out == "passed \033[31mFAILED\033[0m\npassed FAILED\n"


@pytest.mark.parametrize(
    ("terminal", "variable", "shown"),
    [(True, "", "\033[32mworks\033[0m"), (True, "1", "works"), (False, "", "works")],
)
def test_painted_has_colours_at_a_terminal_without_no_color(monkeypatch, terminal, variable, shown):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", variable)
    assert show.painted("works", "32") == shown


def test_table_written_to_pipe_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    bench("latency")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) > 100


# -- progress -----------------------------------------------------------------------------------


def progress_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, ci: str
) -> str:
    """Return the output of a progress line of four steps, after the first step has failed."""
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    progress = show.Progress()
    progress.begin("what", 4)
    progress.step(failed=1)
    progress.show("more")
    progress.clear()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ("80", f"more  {'━' * 5}{'─' * 15}  25%  1 of 4, 1 FAILED, 0:0"),
        ("50", f"more  {'━' * 2}{'─' * 7}  25%  1 of 4, 1 FAILED, 0:0"),
        ("44", "more  25%  1 of 4, 1 FAILED, 0:0"),
    ],
)
def test_progress_shows_counts_and_a_bar_if_it_fits(
    columns: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = progress_shown(monkeypatch, capsys, terminal=True, ci="")
    *_, last, cleared = shown.split("\r\033[K")
    assert last.startswith(line)
    assert len(last) < int(columns)
    assert cleared == ""


@pytest.mark.parametrize(("terminal", "ci"), [(True, "true"), (False, "")], ids=["CI", "pipe"])
def test_progress_is_silent_without_terminal_or_in_ci(
    terminal: bool, ci: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress_shown(monkeypatch, capsys, terminal, ci) == ""


@pytest.mark.parametrize(("terminal", "ci"), [(True, "true"), (False, "")], ids=["CI", "pipe"])
def test_progress_of_a_long_command_is_lines_in_a_pipe(
    terminal: bool, ci: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(show, "_LINE_S", 0.0)
    progress = show.Progress("collective x")
    progress.begin("", 4)
    progress.show("what")
    progress.show("what")
    progress.step(failed=1)
    monkeypatch.setattr(show, "_LINE_S", 600.0)
    progress.step(failed=1)
    progress.show("more")
    progress.clear()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", 0:0")[0] for line in lines] == [
        "collective x: what   0%  0 of 4",
        "collective x: what  25%  1 of 4, 1 FAILED",
        "collective x: more  50%  2 of 4, 1 FAILED",
    ]


def test_bench_progress_counts_all_steps() -> None:
    class Counted(show.Progress):
        total, done = 0, 0

        def begin(self, text: str, total: int) -> None:
            super().begin(text, total)
            self.total = total

        def step(self, failed: int = 0) -> None:
            super().step(failed)
            self.done += 1

    # Each measurement that is not available is reported as a gap.
    plan = Benchmark(
        ["all_reduce"], [4, 8, 16], ["float32", "int32"], [2, 3], ["mpi/nosuch"], ["ordinary"],
        ["numpy"], ["latency"], {}, Pace.of(quick=True),
    )  # fmt: skip
    progress = Counted()
    measure(plan, progress)
    assert progress.done == progress.total == 2 * 3 * 2
