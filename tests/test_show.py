"""What the commands show, and how they read options."""

from __future__ import annotations

import argparse
import io

import pytest

from collective.tools import show


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "unknown"), (0, "0 B"), (1000, "1000 B"), (1024, "1 KiB"), (1000 << 10, "0.977 MiB"),
        (999 << 10, "999 KiB"), (1023 << 20, "0.999 GiB"), (5000 << 40, "5000 TiB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits_and_no_exponent(nbytes, text):
    assert show.size_name(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0"), (2e-10, "0.2 ns"), (1.234e-5, "12.3 µs"), (9.996e-4, "1 ms"), (5000.0, "5000 s")],
)
def test_times_have_three_digits_and_no_exponent(seconds, text):
    assert show.time_name(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(None, "-"), (9.999e8, "1 GB/s"), (12.34e9, "12.3 GB/s"), (0.0, "0 B/s")]
)
def test_rates_have_three_digits_and_no_exponent(rate, text):
    assert show.rate_name(rate) == text


def test_a_table_keeps_what_looks_like_a_colour(capsys):
    pytest.importorskip("rich")
    show.print_table("what", ["side", "why not"], [["a", "all_reduce: no [rank 1 of 2]. [red]"]])
    assert "all_reduce: no [rank 1 of 2]. [red]" in capsys.readouterr().out


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_counts_and_leaves_an_empty_line(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    progress = show.Progress()
    progress.begin("cases", 3)
    progress.step(failed=1)
    progress.show("more")
    progress.clear()
    *_, last, cleared = terminal.getvalue().split("\r\033[K")
    assert last.startswith(f"more  {'━' * 6}{'─' * 14}  33%  1 of 3, 1 FAILED, 0:0")
    assert cleared == ""


@pytest.mark.parametrize("text", ["", "a,,b", "a,"])
def test_names_without_a_name_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="names with commas between them"):
        show.names(text)


@pytest.mark.parametrize("text", ["0", "2,x", "", "-1"])
def test_counts_below_one_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="integers >= 1"):
        show.counts(text)
