"""Figures of the documentation, drawn as SVG files: ``python docs/hooks/figures.py``.

The files in ``docs/figures`` are committed, since GitHub shows the pages without a build; a test
compares them with what this program draws. Each figure has a background of its own and follows the
reader's light or dark setting, so that it is legible on any page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from collective.training.pipelines import order, replay

FOLDER = Path(__file__).resolve().parents[1] / "figures"

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2430; text-anchor: middle; }
.small { font-size: 11px; } .left { text-anchor: start; } .bold { font-weight: 600; }
.code { font-family: ui-monospace, monospace; font-size: 12px; }
.ground { fill: #ffffff; } .box { fill: #eef1f6; stroke: #8a93a3; }
.line { stroke: #8a93a3; stroke-width: 1.3; fill: none; } .empty { fill: none; stroke: #c3cad5; }
.gone { fill: #f3d3d3; stroke: #b04a4a; } .cut { stroke: #b04a4a; stroke-width: 1.6; }
.dash { stroke-dasharray: 4 3; } .tip { fill: #8a93a3; }
.r0 { fill: #bcd7fb; } .r1 { fill: #c5ebc9; } .r2 { fill: #fbe0ae; } .r3 { fill: #ecc8f0; }
.sum { fill: #d5d9e2; } .halo { fill: #f7c9b6; }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ef; } .ground { fill: #1e222a; } .box { fill: #2b303b; stroke: #7c8698; }
.empty { stroke: #4a5160; } .gone { fill: #5b2b2b; }
.r0 { fill: #1f4f8f; } .r1 { fill: #27612f; } .r2 { fill: #77540f; } .r3 { fill: #6a2f72; }
.sum { fill: #4a5160; } .halo { fill: #83432a; }
}
"""


class Drawing:
    """Figure of ``width`` by ``height`` pixels that elements are added to."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._size = width, height
        self._parts = [f"<title>{escape(title)}</title>"]
        self.box(0, 0, width, height, "ground", radius=8)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write ``words`` on the baseline ``y``, centred at ``x`` unless ``kind`` is left."""
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, kind: str = "box",
        words: str = "", radius: float = 3, text: str = "",
    ) -> None:  # fmt: skip
        """Draw a rectangle of class ``kind`` with lines of ``words`` in its middle."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius:g}"/>'
        )
        lines = words.split("\n") if words else []
        for nth, line in enumerate(lines):
            middle = y + height / 2 + 4.5 + 16 * (nth - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, text)

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        """Draw a line through ``points``."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def arrow(self, *points: tuple[float, float], kind: str = "line") -> None:
        """Draw a line through ``points`` with a tip at its end."""
        self.line(*points, kind=kind)
        (x0, y0), (x, y) = points[-2:]
        angle = math.atan2(y - y0, x - x0)
        corners = [(x, y)]
        for side in (2.7, -2.7):
            corners.append((x + 8 * math.cos(angle + side), y + 8 * math.sin(angle + side)))
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self._parts.append(f'<polygon class="tip" points="{path}"/>')

    def svg(self) -> str:
        """Return the file's text."""
        width, height = self._size
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img">\n'
            f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
        )


# -- each collective as boxes before and after ---------------------------------------------------

# By rank, the pieces that it has: a letter is the rank that a piece comes from, a digit its place.
# "+" is a sum over the ranks, and a list of letters before it a sum over those.
_Pieces = list[list[str]]
_CALLS: dict[str, tuple[_Pieces, _Pieces]] = {
    "broadcast(x, root=0)": ([["a"], [], []], [["a"], ["a"], ["a"]]),
    "scatter(x, root=0)": ([["a0", "a1", "a2"], [], []], [["a0"], ["a1"], ["a2"]]),
    "gather(x, root=0)": ([["a"], ["b"], ["c"]], [["a", "b", "c"], [], []]),
    "all_gather(x)": ([["a"], ["b"], ["c"]], [["a", "b", "c"]] * 3),
    "reduce(x, root=0)": ([["a"], ["b"], ["c"]], [["a+b+c"], [], []]),
    "all_reduce(x)": ([["a"], ["b"], ["c"]], [["a+b+c"]] * 3),
    "reduce_scatter(x)": (
        [["a0", "a1", "a2"], ["b0", "b1", "b2"], ["c0", "c1", "c2"]],
        [["Σ0"], ["Σ1"], ["Σ2"]],
    ),
    "all_to_all(x)": (
        [["a0", "a1", "a2"], ["b0", "b1", "b2"], ["c0", "c1", "c2"]],
        [["a0", "b0", "c0"], ["a1", "b1", "c1"], ["a2", "b2", "c2"]],
    ),
    "scan(x)": ([["a"], ["b"], ["c"]], [["a"], ["a+b"], ["a+b+c"]]),
    "sendrecv(x, next, previous)": ([["a"], ["b"], ["c"]], [["c"], ["a"], ["b"]]),
}


def _kind(piece: str) -> str:
    return "sum" if "+" in piece or piece.startswith("Σ") else f"r{'abc'.index(piece[0])}"


def collectives() -> Drawing:
    """Draw each collective on three ranks: the pieces of each rank before and after the call."""
    wide, high, columns = 330, 150, 2
    rows = -(-len(_CALLS) // columns)
    figure = Drawing(columns * wide + 20, rows * high + 14, "What each rank has before and after")
    for nth, (call, states) in enumerate(_CALLS.items()):
        left, top = 20 + nth % columns * wide, 26 + nth // columns * high
        figure.text(left, top, call, "code bold left")
        for side, state in enumerate(states):
            start = left + 44 + side * 146
            for rank, pieces in enumerate(state):
                y = top + 14 + rank * 34
                if side == 0:
                    figure.text(left, y + 17, f"rank {rank}", "small left")
                if not pieces:
                    figure.box(start, y, 30, 26, "empty")
                width = 60 if any("+" in piece for piece in pieces) else 30
                for at, piece in enumerate(pieces):
                    figure.box(
                        start + at * (width + 2), y, width, 26, _kind(piece), piece, text="small"
                    )
        figure.arrow((left + 152, top + 61), (left + 180, top + 61))
    return figure


# -- launcher, ranks and transport ---------------------------------------------------------------


def layers() -> Drawing:
    """Draw a launcher that starts ranks, and a transport that connects them."""
    figure = Drawing(680, 330, "Launcher, ranks and transport")
    figure.box(
        140, 16, 400, 38, words="collective run -n 3 · torchrun · mpiexec · srun", text="code"
    )
    figure.text(96, 40, "launcher", "small bold")
    for rank in range(3):
        x = 80 + rank * 190
        figure.arrow((340, 54), (x + 75, 84))
        figure.box(x, 86, 150, 128, "empty")
        figure.text(x + 75, 104, f"rank {rank}", "bold")
        figure.box(
            x + 5, 114, 140, 40, f"r{rank}", "your program:\nNumPy, PyTorch, …", text="small"
        )
        figure.box(x + 5, 162, 140, 42, "box", "comm.all_reduce(x)", text="code")
        figure.arrow((x + 75, 214), (x + 75, 240))
        figure.arrow((x + 85, 240), (x + 85, 214))
    figure.box(
        80,
        242,
        530,
        34,
        "sum",
        "transport: shm · threads · tcp · mpi · gloo · hierarchical · nccl",
        text="code",
    )
    figure.text(
        345,
        302,
        "chosen by --backend, COLLECTIVE_BACKEND, a settings file or the launcher;",
        "small",
    )
    figure.text(345, 318, "the program is the same for all of them", "small")
    return figure


# -- which transport -----------------------------------------------------------------------------


def transports() -> Drawing:
    """Draw the questions that lead to a transport."""
    figure = Drawing(700, 330, "Which transport")

    def question(x: float, y: float, words: str) -> None:
        figure.box(x - 95, y, 190, 44, "box", words, radius=20, text="small")

    def answer(x: float, y: float, words: str, kind: str) -> None:
        figure.box(x - 75, y, 150, 44, kind, words, text="code")

    def branch(x: float, y: float, to: float, down: float, words: str) -> None:
        figure.arrow((x, y), (x, y + 12), (to, y + 12), (to, down))
        figure.text(to + (14 if to >= x else -14), y + 26, words, "small")

    question(350, 14, "Are the ranks threads\nof one process?")
    branch(350, 58, 110, 92, "yes")
    answer(110, 94, "threads", "r2")
    branch(350, 58, 430, 92, "no")
    question(430, 94, "Are all ranks\non one host?")
    branch(430, 138, 250, 172, "yes")
    answer(250, 174, "shm", "r0")
    branch(430, 138, 550, 172, "no")
    question(550, 174, "Does mpiexec\nstart the ranks?")
    branch(550, 218, 440, 252, "yes")
    answer(440, 254, "mpi", "r1")
    branch(550, 218, 616, 252, "no")
    answer(616, 254, "tcp", "r3")
    figure.text(
        350,
        316,
        "Several ranks on each of several hosts: hierarchical combines shm with mpi or tcp.  "
        "Arrays on GPUs: nccl beside these.",
        "small",
    )
    return figure


# -- the way of a call ---------------------------------------------------------------------------


def call() -> Drawing:
    """Draw the steps of ``comm.all_reduce(x)``, in Python and in C."""
    figure = Drawing(700, 368, "The way of a call")
    steps = [
        ("Communicator.all_reduce", "public method: makes a call object of its arguments"),
        ("AllReduce", "views the array's memory, finds or makes a plan, places the result"),
        ("Path", "runs the call now or in the background; records it; tells the listeners"),
        ("Plan of the transport", "compares the ranks' calls, moves and folds the data"),
        ("result", "an array of the input's framework"),
    ]
    figure.text(312, 24, "Python", "bold")
    for nth, (name, what) in enumerate(steps):
        y = 36 + nth * 64
        figure.box(106, y, 412, 46, "r0" if nth < 3 else "r1" if nth == 3 else "sum")
        figure.text(312, y + 19, name, "code bold")
        figure.text(312, y + 36, what, "small")
        if nth < len(steps) - 1:
            figure.arrow((312, y + 46), (312, y + 62))
    figure.text(618, 24, "C core", "bold")
    figure.box(
        548,
        36,
        140,
        174,
        "r2",
        "plain arrays,\nplain arguments:\nthe known plan\nruns at once",
        text="small",
    )
    figure.arrow((518, 59), (546, 59))
    figure.arrow((618, 210), (618, 315), (520, 315))
    for y, words in (
        (59, "checks of"),
        (75, "arguments"),
        (239, "errors name"),
        (255, "other ranks"),
    ):
        figure.text(54, y, words, "small")
    return figure


# -- splits --------------------------------------------------------------------------------------


def splits() -> Drawing:
    """Draw rows of a picture on two ranks, and the halo that a convolution reads."""
    figure = Drawing(680, 300, "Cuts and halos of a split model")
    size, rows = 20, 10
    for side, title in enumerate(("one process", "two ranks")):
        left = 60 + side * 230
        figure.text(left + 70, 26, title, "bold")
        for row in range(rows):
            first = row < rows // 2
            kind = "sum" if side == 0 else "r0" if first else "r1"
            y = 40 + row * size + (0 if side == 0 or first else 34)
            figure.box(left, y, 140, size - 2, kind)
    left = 60 + 230
    cut = 40 + rows // 2 * size
    figure.box(left, cut, 140, 12, "halo dash", "", text="small")
    figure.box(left, cut + 20, 140, 12, "halo dash", "", text="small")
    figure.arrow(
        (left + 156, cut + 46), (left + 172, cut + 46), (left + 172, cut + 7), (left + 142, cut + 7)
    )
    figure.arrow(
        (left - 16, cut - 10), (left - 30, cut - 10), (left - 30, cut + 26), (left - 2, cut + 26)
    )
    notes = [
        ("rank 0 computes rows 0 to 4", 84), ("halo: the rows of the other rank", 130),
        ("that a 3 × 3 convolution reads", 146), ("rank 1 computes rows 5 to 9", 222),
    ]  # fmt: skip
    for words, y in notes:
        figure.text(left + 190, y, words, "small left")
    figure.text(
        340,
        288,
        "Each layer asks for the rows that it needs; the ranks exchange halos before "
        "the layer, and add their gradients after it.",
        "small",
    )
    return figure


# -- pipelines -----------------------------------------------------------------------------------


def pipeline() -> Drawing:
    """Draw a step of three stages and six micro-batches, by the library's own schedule."""
    stages, microbatches = 3, 6
    figure = Drawing(700, 216, "Schedule 1F1B of a pipeline")
    actions = [order("1f1b", rank, stages, microbatches) for rank in range(stages)]
    spans = replay(actions, [{"forward": 1.0, "backward": 2.0}] * stages)
    end = max(span.end for spans_of_stage in spans for span in spans_of_stage)
    scale = 590 / end
    for rank, spans_of_stage in enumerate(spans):
        y = 40 + rank * 46
        figure.text(16, y + 21, f"stage {rank}", "small left")
        figure.box(76, y, 590, 32, "empty")
        for span in spans_of_stage:
            kind = "r0" if span.kind == "forward" else "r1"
            name = ("F" if kind == "r0" else "B") + str(span.microbatch)
            figure.box(
                77 + span.start * scale, y + 2, (span.end - span.start) * scale - 2, 28, kind,
                name, text="small",
            )  # fmt: skip
    figure.text(340, 24, "time →", "small")
    figure.text(
        340,
        198,
        "F: forward pass of a micro-batch, B: its backward pass, here twice as long. "
        "Empty: the stage waits.",
        "small",
    )
    return figure


# -- a loss and a shrink -------------------------------------------------------------------------


def shrink() -> Drawing:
    """Draw four ranks, of which one dies; the others get an error, decide and continue."""
    figure = Drawing(720, 300, "A loss and a shrink")
    left, right, top, gap = 80, 700, 54, 46
    marks = [
        (200, "rank 2 dies"), (300, "PeerLostError on\nranks 0, 1 and 3"),
        (430, "shrink(): notes\nand one verdict"), (560, "new communicator\nof 3 ranks"),
    ]  # fmt: skip
    for x, words in marks:
        figure.line((x, top - 6), (x, top + 4 * gap - 12), kind="line dash")
        for nth, line in enumerate(words.split("\n")):
            figure.text(x, top + 4 * gap + 8 + 15 * nth, line, "small")
    for rank in range(4):
        y = top + rank * gap
        figure.text(16, y + 16, f"rank {rank}", "small left")
        if rank == 2:
            figure.box(left, y, 120, 26, "r2", "step", text="small")
            figure.line((194, y), (206, y + 26), kind="cut")
            figure.line((206, y), (194, y + 26), kind="cut")
            continue
        figure.box(left, y, 220, 26, f"r{rank}", "step, then a wait for rank 2", text="small")
        figure.box(302, y, 256, 26, "box", "shrink()", text="code")
        new = rank - (rank > 2)
        figure.box(562, y, right - 562, 26, f"r{rank}", f"rank {new} of 3", text="small")
    figure.text(390, 26, "time →", "small")
    figure.text(
        360,
        288,
        "No survivor waits longer than its deadline. Each one gets the error, and "
        "follows the same verdict in the store.",
        "small",
    )
    return figure


# Times as fast as the fastest rival, from the tables of benchmarks/README.md.
_SPEEDS = (
    ("all_reduce of 64 MiB, comm.empty(), against MPI", 10),
    ("psum of 1 MiB in JAX over TCP, against Gloo", 3.5),
    ("all_reduce of 64 MiB, against MPI", 2.96),
    ("all_reduce of 1 KiB, against MPI", 1.92),
    ("DDP step of PyTorch, unmodified, against Gloo", 1.5),
    ("broadcast of 16 KiB, against MPI", 1.44),
    ("all_reduce of 1 MiB, against MPI", 1.11),
    ("message of 16 MiB, against MPI", 0.97),
    ("all_gather of 1 MiB, against MPI", 0.82),
    ("scatter of 16 MiB, against MPI", 0.79),
    ("4 ranks on 2 cores: message of 4 MiB", 0.5),
    ("4 ranks on 2 cores: all_gather of 64 KiB", 0.46),
)


def speed() -> Drawing:
    """Draw a bar for each measured call, to the right of 1 x if it is faster than its rival."""
    row = 36  # pixels
    bottom = 30 + row * len(_SPEEDS)
    figure = Drawing(400, bottom + 30, "Times as fast as the fastest rival")
    one, doubling = 178, 50  # pixels
    for number, (words, times) in enumerate(_SPEEDS):
        y, length = 46 + row * number, doubling * math.log2(times)
        # The words stand above the bar, so that a telephone shows both.
        figure.text(12, y - 5, words, "small left")
        kind = "r1" if times > 1 else "gone"
        figure.box(one + min(0, length), y, abs(length), 17, kind, radius=1)
        figure.text(one + length + (22 if times > 1 else -20), y + 13, f"{times:g} ×", "small")
        figure.line((one, y - 1), (one, y + 18))
    figure.text(one, 20, "as fast", "small")
    figure.text(200, bottom + 16, "2 ranks on 2 cores if not named", "small")
    return figure


FIGURES: Sequence[Callable[[], Drawing]] = (
    collectives, layers, transports, call, splits, pipeline, shrink, speed,
)  # fmt: skip


def draw(folder: Path = FOLDER) -> None:
    """Write all figures into ``folder``."""
    folder.mkdir(exist_ok=True)
    for figure in FIGURES:
        (folder / f"{figure.__name__}.svg").write_text(figure().svg())


if __name__ == "__main__":
    draw()
