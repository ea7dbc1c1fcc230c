"""Programs and commands on the documentation pages: they run and print the output shown there.

A Python block whose first line is ``# name.py`` is written to a file of that name. In a ``console``
block, bash executes each line after ``$``, and the output must equal the lines that follow. The
order of the lines does not matter, because ranks print in random order. A line ``...`` stands for
any further lines.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import collective
from collective.backends.shm.layout import Layout
from tests import warm
from tests.support.interpreter import ROOT, run

pytestmark = pytest.mark.whole

OUTSIDE = "README.md CONTRIBUTING.md SECURITY.md CODE_OF_CONDUCT.md changes/README.md".split()
DOCUMENTS = [*map(ROOT.joinpath, OUTSIDE), *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
LANGUAGES = {"console", "python", "sh", "text", "toml", "yaml"}


@dataclass
class Block:
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str | None:
        """Name of the file that this block is written to, or None."""
        match = re.fullmatch(r"# (\w+\.py)", self.lines[0]) if self.lines else None
        return match[1] if match and self.language == "python" else None

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass
class Command:
    """A command of a console block and its expected output."""

    document: str
    line: int
    command: str
    expected: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    blocks: list[Block] = []
    inside = False
    name = document.relative_to(ROOT).as_posix().removeprefix("docs/")
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
            if inside:
                blocks.append(Block(name, number, line[3:].strip()))
        elif inside:
            blocks[-1].lines.append(line)
    return blocks


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def commands() -> list[Command]:
    listed: list[Command] = []
    for block in BLOCKS:
        if block.language == "console":
            for number, line in enumerate(block.lines, block.line + 1):
                if line.startswith("$ "):
                    listed.append(Command(block.document, number, line[2:]))
                else:
                    listed[-1].expected.append(line)
    return listed


COMMANDS = commands()


def shown(block: Block) -> bool:
    """Return whether a console block of the same document runs this program."""
    stem = (block.name or "").removesuffix(".py")
    return any(c.document == block.document and stem in c.command for c in COMMANDS)


def lay_out(document: str, folder: Path) -> None:
    """Put the document's programs, the examples and the commands into ``folder``."""
    for block in BLOCKS:
        if block.document == document and block.name:
            (folder / block.name).write_text(block.text)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "bin").mkdir()
    for name, options in (("python", ""), ("collective", "-m collective")):
        command = folder / "bin" / name
        command.write_text(
            f'#!/bin/sh\nexport PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{ROOT}"\n'
            f'exec "{warm.python()}" {options} "$@"\n'
        )
        command.chmod(0o755)


def execute(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # Ranks of many programs share the cores, and waiting OpenMP threads would spin on them.
    return run("bash", "-c", command, cwd=folder, merged=True, PATH=path, OMP_NUM_THREADS="1")


def plain(lines: list[str], folder: Path) -> list[str]:
    """Return the lines with folders and process ids, which differ between runs, replaced."""
    text = "\n".join(lines).replace(f"{folder}/", "/home/me/")
    return re.sub(r"pid \d+", "pid N", text).splitlines()


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_command_prints_output_shown_on_page(command: Command, tmp_path: Path) -> None:
    lay_out(command.document, tmp_path)
    done = execute(command.command, tmp_path)
    printed = plain(done.stdout.splitlines(), tmp_path)
    expected = plain(command.expected, tmp_path)
    if "..." in expected:
        missing = [line for line in expected if line not in {"...", *printed}]
        assert not missing, done.stdout
    else:
        assert sorted(expected) == sorted(printed), done.stdout


@pytest.mark.parametrize(
    "block",
    [b for b in BLOCKS if b.language == "python" and not shown(b)],
    ids=lambda block: f"{block.document}:{block.line}",
)
def test_program_without_output_runs(block: Block, tmp_path: Path) -> None:
    lay_out(block.document, tmp_path)
    name = block.name or "program.py"
    (tmp_path / name).write_text(block.text)
    if name.startswith("test_"):
        command = f"python -m pytest -q -p no:cacheprovider {name}"
    else:
        command = f"python {name} && collective run -n 2 {name}"
    done = execute(command, tmp_path)
    assert done.returncode == 0, done.stdout


def test_readme_shows_hello_example_verbatim() -> None:
    docstring, _, example = (ROOT / "examples" / "hello.py").read_text().partition("\n\n")
    assert docstring.startswith('"""')
    assert example in [block.text for block in BLOCKS if block.document == "README.md"]


def test_readme_runs_example_near_its_top() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("collective run -n 4 examples/hello.py") < 1500


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.document}:{block.line}")
def test_block_names_known_language(block: Block) -> None:
    assert block.language in LANGUAGES


def broken_links(document: Path) -> list[str]:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    local = [link for link in links if not link.startswith("https://")]
    return [link for link in local if not (document.parent / link).exists()]


@pytest.mark.parametrize(
    "document",
    [*(d for d in DOCUMENTS if d not in DECISIONS), ROOT / "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_local_links_point_to_existing_files(document: Path) -> None:
    assert broken_links(document) == []


def test_links_of_decisions_lead_to_files() -> None:
    assert {d.name: broken_links(d) for d in DECISIONS if broken_links(d)} == {}


def test_every_page_is_in_navigation_or_index() -> None:
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"[ :-] (\S+\.md)$", navigation, re.MULTILINE))
    for folder in ("decisions", "measurements"):
        index = (ROOT / "docs" / folder / "README.md").read_text()
        listed |= {f"{folder}/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", index)}
    assert sorted(set(pages) - listed) == []


def _has_the_form_of_a_decision(path: Path) -> bool:
    heading, _, status, *_ = lines = path.read_text().splitlines()
    sections = [line[3:] for line in lines if line.startswith("## ")]
    return (
        heading.startswith(f"# {path.stem[:4]}: ")
        and re.match(r"Status: (accepted|rejected|replaced)\b", status) is not None
        and [name for name in sections if name != "Measurement"]
        == ["Context", "Decision", "Consequences"]
    )


def test_every_decision_has_number_status_and_sections() -> None:
    assert [d.name for d in DECISIONS if not _has_the_form_of_a_decision(d)] == []


def test_calls_in_table_are_communicator_methods() -> None:
    table = (ROOT / "docs" / "calls.md").read_text().partition("| option")[0]
    names = set(re.findall(r"`(\w+)[(`]", table)) - {"src", "shm"}
    assert len(names) > 25
    assert [name for name in names if not hasattr(collective.Communicator, name)] == []


def test_make_targets_on_pages_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"(?:^|`)make ([\w-]+)", document.read_text(), re.MULTILINE)
    }
    assert {"demo", "test", "docs"} <= named <= set(targets)


def test_shm_memory_table_matches_layout() -> None:
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) MiB \| ([\d.]+) MiB \| ([\d.]+) MiB \| (\d+) KiB \|$",
        (ROOT / "docs" / "shm.md").read_text(),
        re.MULTILINE,
    )
    assert [int(row[0]) for row in rows] == [2, 4, 8, 64]
    for row in rows:
        size = int(row[0])
        layout = Layout(size)
        ring = layout.ring_bytes
        parts = (layout.nbytes, layout.rings - layout.slots[0][0], layout.nbytes - layout.rings)
        assert row[1:] == (*(f"{part / 2**20:.2f}" for part in parts), str(ring >> 10))
        words = -(-(size + 1) * 512 // 4096) * 4096
        notes, slots = size * (124 << 10), 2 * size * (256 << 10)
        areas = 2 * size * layout.area_bytes
        assert layout.nbytes == words + notes + slots + areas + size * (size - 1) * (4096 + ring)
