"""The results as one self-contained HTML file: the matrix, the errors, and the failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .cases import OPERATIONS
from .report import Cell, cell, columns, worst_by_dtype

__all__ = ["page"]

# Number of failures whose text is unfolded.
_OPEN = 5

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --faint: #6b7a89; --line: #d5dce3;
  --paper: #fff; --good: #1f7a4d; --good-bg: #e5f4ec; --bad: #b3261e; --bad-bg: #fbe4e2;
  --none-bg: #f1f3f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --faint: #94a3b3; --line: #35404c;
  --paper: #14191f; --good: #6fd3a0; --good-bg: #16352a; --bad: #ff9a92; --bad-bg: #45201e;
  --none-bg: #20272f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 78rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { max-width: 48rem; margin: .4rem 0; } .faint, small { color: var(--faint); }
.verdict { display: inline-block; padding: .35rem .9rem; border-radius: .4rem; font-weight: 600;
  margin: .8rem 0; } .good { color: var(--good); background: var(--good-bg); }
.bad { color: var(--bad); background: var(--bad-bg); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; }
th, td { padding: .28rem .6rem; text-align: right; border: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th { font-weight: 600; } thead tr:first-child th:first-child, td:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; }
td.none { background: var(--none-bg); color: var(--faint); text-align: center; }
td small { display: block; } pre { background: var(--none-bg); padding: .8rem; overflow-x: auto;
  border-radius: .4rem; font-size: 13px; white-space: pre-wrap; }
details { margin: .5rem 0; } summary { cursor: pointer; }
"""


def page(data: Mapping[str, Any]) -> str:
    """Return the page for data of :meth:`Report.as_data`."""
    sections = [
        _head(data), _matrix(data), _failures(data), _random(data), _training(data), _splits(data),
        _errors(data), _absent(data), _unsupported(data),
    ]  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>collective parity</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _table(headers: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>'
        "</table></div>"
    )


def _td(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>"


def _head(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    all_ = cell(data)
    counts = "" if all_ is None else (
        f"{all_.passed:,} cases passed, {all_.failed:,} failed, {all_.unsupported:,} unsupported "
        "(declared)"
    )  # fmt: skip
    wrong = sum(
        not result["passed"] for result in (*data["random"], *data["training"], *data["splits"])
    )
    parts = [counts] if counts else []
    parts += [f"{wrong} of the random, training and split comparisons failed"] if wrong else []
    verdict = "; ".join(parts) or "all comparisons passed"
    tone = "bad" if data["exit_code"] else "good"
    ranks = ", ".join(map(str, data["ranks"]))
    return (
        "<h1>Parity of transports and frameworks</h1>"
        f'<div class="verdict {tone}">{verdict}</div>'
        "<p>Each case is a call of the public API on the arrays of a framework, over a transport, "
        "compared with an oracle in NumPy: integers, moves and comparisons bit for bit, sums and "
        "products within the error bound of their dtype and number of ranks.</p>"
        f'<p class="faint">collective {escape(data["collective"])}, '
        f"Python {escape(machine['python'])}, {escape(versions)}; {escape(machine['system'])}, "
        f"{escape(machine['processor'])}, {machine['cores']} cores; {ranks} ranks; "
        f"seed {data['seed']}; {data['seconds']:g} s</p>"
    )


def _failures(data: Mapping[str, Any]) -> str:
    if not data["failures"]:
        return ""
    parts = [
        f"<details{' open' * (number < _OPEN)}><summary><b>{escape(each['transport'])}</b>, "
        f"{each['ranks']} ranks: {escape(each['case'])}</summary>"
        f"<pre>{escape(each['text'].strip())}</pre></details>"
        for number, each in enumerate(data["failures"])
    ]
    return f"<h2>Failed</h2>{''.join(parts)}"


def _random(data: Mapping[str, Any]) -> str:
    if not data["random"]:
        return ""
    parts = ["<h2>Random cases</h2>"]
    for each in data["random"]:
        where = f"{escape(each['transport'])}: {each['count']} cases, seed {each['seed']}"
        if each["passed"]:
            parts.append(f"<p>{where}: all passed</p>")
        else:
            parts.append(
                f'<p class="bad">{where}: {escape(each["case"])}</p>'
                f"<pre>{escape(each['text'])}</pre><p>The smallest case that fails:</p>"
                f"<pre>{escape(each['snippet'])}</pre>"
            )
    return "".join(parts)


def _matrix(data: Mapping[str, Any]) -> str:
    pairs = columns(data)
    if not data["results"]:
        return ""
    rows = []
    for operation in OPERATIONS:
        cells = [
            cell(data, transport=transport, framework=framework, operation=operation)
            for transport, framework in pairs
        ]
        if any(cells):
            rows.append(_td(operation) + "".join(map(_of_cell, cells)))
    first = "".join(
        f'<th colspan="{sum(t == transport for t, _ in pairs)}" style="text-align:center">'
        f"{escape(transport)}</th>"
        for transport in dict.fromkeys(t for t, _ in pairs)
    )
    second = "".join(f"<th>{escape(framework)}</th>" for _, framework in pairs)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        "<h2>Matrix</h2><p>Number of cases that passed; below, where results are rounded, the "
        "largest error as a share of its bound. Each case runs with every number of ranks, for "
        "dtypes, reductions and shapes (scalar, empty, odd, strided, large). “mixed”: each rank "
        "has a different framework.</p>"
        f'<div class="scroll"><table><thead><tr><th rowspan="2">operation</th>{first}</tr>'
        f"<tr>{second}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _of_cell(found: Cell | None) -> str:
    if found is None:
        return _td("–", "none")
    if found.failed:
        total = found.passed + found.failed + found.unsupported
        return _td(f"{found.failed} of {total} failed", "bad")
    if not found.passed:
        return _td(f"{found.unsupported} unsupported", "none")
    note = f"<small>{found.share:.0%} of bound</small>" if found.bound else ""
    note += f"<small>{found.unsupported} unsupported</small>" if found.unsupported else ""
    return _td(f"{found.passed}{note}", "good")


def _errors(data: Mapping[str, Any]) -> str:
    found = list(worst_by_dtype(data))
    if not found:
        return ""
    rows = []
    for op, dtype, cells in found:
        parts = [
            _td("–", "none") if each is None else _td(f"{each.worst:.2f} / {each.bound:.2f}")
            for each in cells
        ]
        rows.append(_td(escape(op)) + _td(escape(dtype), "text") + "".join(parts))
    ranks = [f"{n} ranks" if n > 1 else "1 rank" for n in data["ranks"]]
    return (
        "<h2>Largest error / bound</h2><p>In units in the last place of the magnitude that the "
        "bound refers to (of Σ|x| for a sum over x). The bounds are those of Higham, "
        "<i>Accuracy and Stability of Numerical Algorithms</i>, 2nd ed., 2002 (Lemmas 3.1 and "
        "3.5, section 4.2), and hold for every order of the fold.</p>"
        + _table(["reduction", "dtype", *ranks], rows)
    )


def _training(data: Mapping[str, Any]) -> str:
    return _agreement(
        "Training",
        "The same model from the same weights on the same digits; the largest difference of any "
        "weight, in double precision.",
        data["training"],
    )


def _splits(data: Mapping[str, Any]) -> str:
    return _agreement(
        "Splits",
        "Networks computed in pieces, in turn and over ranks; the largest difference of a result "
        "or a gradient from an oracle in NumPy, relative to its largest element.",
        data["splits"],
    )


def _agreement(title: str, about: str, found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return ""
    rows = []
    for each in found:
        difference = "" if each["difference"] is None else f"{each['difference']:.1e}"
        allowed = f"{each['allowed']:.0e}" if each["allowed"] else "same bits"
        mark = _td("passed", "good") if each["passed"] else _td("failed", "bad")
        text = escape(each.get("text", difference))
        rows.append(_td(escape(each["what"]), "text") + _td(text) + _td(allowed) + mark)
    table = _table(["what has to agree", "largest difference", "allowed", ""], rows)
    return f"<h2>{title}</h2><p>{about}</p>{table}"


def _absent(data: Mapping[str, Any]) -> str:
    rows = [
        _td(escape(each["name"])) + _td(escape(each["reason"]), "text")
        + _td(f"<code>{escape(each['fix'])}</code>" if each.get("fix") else "", "text")
        for kind in ("transports", "frameworks")
        for each in data[kind]
        if not each["available"]
    ]  # fmt: skip
    return "<h2>Not available here</h2>" + _table(["", "why", "remedy"], rows) if rows else ""


def _unsupported(data: Mapping[str, Any]) -> str:
    rows = [
        _td(escape(each["transport"])) + _td(str(each["count"])) + _td(escape(each["text"]), "text")
        for each in data["unsupported"]
    ]
    if not rows:
        return ""
    return "<h2>Declared as unsupported</h2>" + _table(["transport", "cases", "refusal"], rows)
