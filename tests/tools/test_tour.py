"""``collective tour``: every lesson runs for real, and its conclusion follows from the output."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest

from collective.tools.cli import tour
from collective.tools.cli.main import main
from collective.tools.cli.tour import Lesson, lessons

NAMES = [lesson.file for lesson in lessons()]


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide PyTorch from this process and its child processes."""
    monkeypatch.setitem(sys.modules, "torch", None)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(hidden))


@pytest.mark.parametrize(
    ("file", "conclusion"),
    [
        ("hello.py", "Three processes, and each has the sum."),
        ("mismatch.py", "Each rank got the error, and the communicator can still be used."),
        ("lost.py", r"The survivors knew after [0-9.]+ ms, and finished the work as two ranks."),
        ("parity.py", "NumPy over shm and tcp: the same bits."),
    ],
)
def test_perform_lesson_reaches_its_conclusion(
    file: str, conclusion: str, without_torch: None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLLECTIVE_BAKEND", "a setting of the user's, which would be refused")
    (lesson,) = [candidate for candidate in lessons() if candidate.file == file]
    assert re.match(conclusion, tour.perform(lesson, tmp_path))
    out = capsys.readouterr().out
    assert out.count("$ collective run -n 3 ") == len(lesson.runs)
    assert out.count("\n[0] ") >= len(lesson.runs)


def test_conclude_parity_with_torch_names_both_frameworks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    for name in [name for name in os.environ if name.startswith("COLLECTIVE_")]:
        monkeypatch.delenv(name)
    lesson = lessons()[-1]
    exec(lesson.program, {"__name__": "__main__"})
    alone = capsys.readouterr().out  # The program ran with one rank.
    other = alone.replace("threads", "shm")
    assert (
        lesson.conclude(alone + other) == "NumPy and PyTorch over shm and threads: the same bits."
    )


# Expected outputs of the lessons; each case below changes one detail.
HELLO = "".join(f"[{n}] process {n}\n[{n}] all add up to [6. 6. 6.]\n" for n in range(3))
REFUSED = "all_reduce: the ranks made different calls\nstill usable: [3. 3.]\n" * 3
LOSS = "known after 1.5 ms\nstep 4: [2. 2.]\n" * 2
BITS = "[0] shm, NumPy: 0123456789abcdef\n[0] tcp, NumPy: 0123456789abcdef\n"


@pytest.mark.parametrize(
    ("file", "shown", "right", "wrong"),
    [
        ("hello.py", HELLO, "process 2", "process 1"),
        ("hello.py", HELLO, "[2] all add up to [6.", "[2] all add up to [3."),
        ("mismatch.py", REFUSED, "different calls\nstill", "calls\nstill"),
        ("mismatch.py", REFUSED, "usable: [3.", "usable: [2."),
        ("lost.py", LOSS, "known", "unknown: "),
        ("lost.py", LOSS, "step 4: [2.", "step 4: [3."),
        ("parity.py", BITS, "tcp, NumPy: 0", "tcp, NumPy: 1"),
        ("parity.py", BITS, "tcp", "shm"),
        ("parity.py", BITS, BITS, ""),
    ],
)
def test_conclude_with_wrong_output_raises_value_error(
    file: str, shown: str, right: str, wrong: str
) -> None:
    (lesson,) = [candidate for candidate in lessons() if candidate.file == file]
    assert lesson.conclude(shown)
    spoilt = shown[::-1].replace(right[::-1], wrong[::-1], 1)[::-1]  # Replace the last occurrence.
    assert spoilt != shown
    with pytest.raises(ValueError, match="expected "):
        lesson.conclude(spoilt)


def test_lead_shows_program_before_run_and_reports_failure(
    without_torch: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def conclude(printed: str) -> str:
        raise AssertionError(printed)

    program = "import sys\nsys.exit(3)\n"
    lesson = Lesson("A title", "A text.", "three.py", program, [["-n", "2"]], conclude)
    shown: list[str] = []
    errors: list[str] = []

    def wait(prompt: str) -> bool:
        out, error = capfd.readouterr()
        shown.append(out)
        errors.append(error)
        return len(shown) < 2

    assert tour.lead(wait, [lesson, lesson, lesson]) == 1
    assert capfd.readouterr() == ("", "")  # The tour ended before the second lesson.
    assert errors == ["", "collective tour: A title: exit code 3.\n\n"]
    assert shown[0] == "1 of 3: A title\n\nA text.\n\n    import sys\n    sys.exit(3)\n\n"
    assert shown[1].startswith("$ collective run -n 2 three.py\n")
    assert shown[1].endswith("2 of 3: A title\n\nA text.\n\n    import sys\n    sys.exit(3)\n\n")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("options", "terminal", "typed", "goes_on"),
    [
        ([], True, "\n", True),
        ([], True, "q\n", False),
        ([], True, "", False),
        (["--no-wait"], True, "q\n", True),
        ([], False, "q\n", True),
    ],
    ids=["enter", "q", "end-of-file", "--no-wait", "no-terminal"],
)
def test_tour_waits_for_enter_only_on_terminal(
    options: list[str], terminal: bool, typed: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(tour, "lead", lambda wait: asked.append(wait("Enter: ")) or 0)
    monkeypatch.setattr(sys, "stdin", (_Terminal if terminal else io.StringIO)(typed))
    monkeypatch.setattr(sys, "stdout", _Terminal())
    assert main(["tour", *options]) == 0
    assert asked == [goes_on]


@pytest.mark.parametrize("lesson", lessons(), ids=NAMES)
def test_lesson_fits_80_columns(lesson: Lesson) -> None:
    assert max(map(len, lesson.text.splitlines())) <= 80
    assert max(len(line) + 4 for line in lesson.program.splitlines()) <= 80
