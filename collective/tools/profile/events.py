"""Reading traces: the slices of each rank, and one file of all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collective.errors import ConfigError
from collective.trace import FIRST_LANE
from collective.trace.file import open_file

__all__ = ["RankTrace", "Slice", "merge", "read"]

#: Categories of slices in which the program is in a call, and computes nothing.
IN_CALLS = frozenset({"collective", "enqueue", "compare", "message", "wait", "start"})


@dataclass(slots=True)
class Slice:
    """Something that a rank did.

    Attributes:
        name, category, args: as in the trace.
        tid: its track.
        start, end: seconds, on rank 0's clock; the trace's end for what was never over.
        over: whether it was.
    """

    name: str
    category: str
    tid: int
    start: float
    end: float
    args: dict[str, Any]
    over: bool = True

    @property
    def background(self) -> bool:
        """Whether it ran beside the program."""
        return self.tid >= FIRST_LANE

    @property
    def key(self) -> tuple[str, int, str]:
        """What is equal for one call on all its ranks."""
        return self.args.get("comm", ""), self.args.get("seq", 0), self.name


@dataclass
class RankTrace:
    """What one rank did.

    Attributes:
        about: the head of its file: rank, size, local_size, host, backend, …
        slices: in the order in which they began.
        steps: by whom marked -> when.
        handles: when each call in the background was made, and from when it was waited for.
    """

    about: dict[str, Any]
    slices: list[Slice] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)
    handles: list[tuple[float, float]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Whose it is."""
        return int(self.about["rank"])

    def calls(self) -> list[Slice]:
        """Return the collective calls that moved something, or waited for each other."""
        return [
            one for one in self.slices
            if one.category in ("collective", "enqueue") and not one.args.get("differ")
        ]  # fmt: skip


def read(directory: Path) -> list[RankTrace]:
    """Return the traces of the last run that wrote to ``directory``, by rank.

    Raises:
        ConfigError: there is none.
    """
    return [_rank_trace(about, events) for _, about, events in _files(directory)]


def merge(directory: Path, output: Path | None = None) -> tuple[Path, int, int]:
    """Write the traces of the last run in ``directory`` as one file.

    Args:
        directory: where the ranks wrote.
        output: the file; None for ``all.json`` in the directory, which then is new or an earlier
            one of this user's.

    Returns:
        The file, how many ranks and how many events it has.

    Raises:
        ConfigError: there is no trace, or ``output`` cannot be written.
    """
    ranks, count = _files(directory), 0
    about = {**ranks[0][1], "rank": [one[1]["rank"] for one in ranks]}
    path = directory / "all.json" if output is None else output
    try:
        # A file that nobody named may be somebody else's, where others can write.
        where: int | Path = path
        if output is None:
            where = open_file(str(path))
            os.ftruncate(where, 0)
        with open(where, "w", encoding="utf-8") as file:
            head = json.dumps({"displayTimeUnit": "ns", "otherData": about})
            file.write(f'{head[:-1]}, "traceEvents": [')
            for _, _, events in ranks:
                for event in events:
                    file.write(f"{',' * (count > 0)}\n{json.dumps(event, separators=(',', ':'))}")
                    count += 1
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"trace: {path} cannot be written: {error.strerror}.") from error
    return path, len(ranks), count


def _files(directory: Path) -> list[tuple[Path, dict[str, Any], Iterable[dict[str, Any]]]]:
    """Return path, head and events of each rank's file of the last run."""
    found: list[tuple[Path, dict[str, Any], Iterable[dict[str, Any]]]] = []
    files = [path for path in directory.glob("rank-*.json") if path.is_file()]
    paths = sorted(files, key=lambda path: path.stat().st_mtime)
    for path in reversed(paths):
        about, events = _content(path)
        if about and (not found or about["run"] == found[0][1]["run"]):
            found.append((path, about, events))
    if not found:
        raise ConfigError(
            f"trace: no trace in {directory}. Run the program with COLLECTIVE_TRACE={directory}, "
            "and let it come as far as init()."
        )
    return sorted(found, key=lambda one: int(one[1]["rank"]))


def _content(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        whole = json.loads(text)
        return whole["otherData"], whole["traceEvents"]
    except (ValueError, KeyError):
        pass
    # Cut off in the middle of a write: an event a line, as far as they go.
    head, *lines = text.splitlines() or [""]
    try:
        about = json.loads(head.removesuffix("[") + "[]}")["otherData"]
    except (ValueError, KeyError):
        return None, []
    return about, list(_whole(lines))


def _whole(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line.removesuffix(","))
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _rank_trace(about: dict[str, Any], events: Iterable[dict[str, Any]]) -> RankTrace:
    trace = RankTrace(about)
    open_: dict[int, list[Slice]] = {}
    made: dict[int, float] = {}
    last = 0.0
    for event in events:
        if "ts" not in event:
            continue
        tid, at, phase = event["tid"], event["ts"] / 1e6, event["ph"]
        last = max(last, at)
        stack = open_.setdefault(tid, [])
        if phase == "B":
            one = Slice(event["name"], event["cat"], tid, at, at, event["args"], over=False)
            trace.slices.append(one)
            stack.append(one)
        elif phase == "E" and stack:
            one = stack.pop()
            one.end, one.over = at, True
            one.args.update(event["args"])
        elif phase == "i" and event["cat"] == "step":
            trace.steps.setdefault(event["args"]["by"], []).append(at)
        elif phase == "i" and event["cat"] == "message" and stack:
            stack[-1].args["bytes"] = event["args"]["bytes"]
        elif phase == "s":
            made[event["id"]] = at
        elif phase == "f" and stack and event["id"] in made:
            trace.handles.append((made.pop(event["id"]), stack[-1].start))
    for stack in open_.values():
        for one in stack:
            one.end = last
    trace.slices.sort(key=lambda one: one.start)
    return trace
