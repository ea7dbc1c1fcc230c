"""A case as a separate program, for a person who has to fix the fault that it shows."""

from __future__ import annotations

import pprint
from typing import Any

import numpy as np

from collective.memory import nested
from collective.memory.dtypes import BY_NAME, FOREIGN
from collective.testing import run_ranks
from collective.testing.samples import spread

from . import oracle
from .cases import REDUCTIONS, ROOTED, Case
from .execution import run_case

__all__ = ["reproduce", "snippet"]

# Largest number of elements, of all ranks, that a program contains as text.
_WRITTEN = 300

_PROGRAM = '''\
"""{title}, {size} ranks over {backend}."""

import numpy as np
{imports}
{operators}from collective.testing import run_ranks


def inputs():
    return {inputs}


EXPECTED = {expected}


def call(comm):
    x = inputs()[comm.rank]
{body}


if __name__ == "__main__":
    for rank, found in enumerate(run_ranks({size}, call, backend="{backend}")):
        print(f"rank {{rank}}: got {{found}}\\n        expected {{EXPECTED[rank]}}")
'''

_OPERATORS = {
    "premul_sum": "from collective import premul_sum\n",
    "user": (
        "from collective import user_op\nfrom collective.tools.parity.execution import keep_right\n"
    ),
}

_BY_CASE = """\
from collective.tools.parity.cases import Case, CaseLeaf
from collective.tools.parity.snippets import reproduce

CASE = {case}

if __name__ == "__main__":
    reproduce("{backend}", {size}, CASE)
"""


def reproduce(backend: str, size: int, case: Case) -> None:
    """Run one case and print each rank's verdict."""
    for rank, verdict in enumerate(run_ranks(size, run_case, case, backend=backend)):
        print(f"rank {rank}: {verdict.status} {verdict.text}")


def snippet(backend: str, size: int, case: Case) -> str:
    """Return a program that makes the call of a case's first turn, and prints expected results."""
    elements = size * sum(int(np.prod(leaf.shape)) for leaf in nested.flatten(case.data))
    framework_names = {case.frameworks[rank % len(case.frameworks)] for rank in range(size)}
    plain = framework_names <= {"numpy", "torch", "chainer"} and case.outs[0] != "in place"
    # Special numbers have bits that no text expresses.
    if elements > _WRITTEN or not plain or oracle.special(case):
        return _BY_CASE.format(case=pprint.pformat(case), backend=backend, size=size)
    imports = {
        "torch": "import torch",
        "chainer": "import collective.adapters.chainer\nimport chainer",
    }
    lines = [imports[name] for name in sorted(framework_names) if name in imports]
    if any(leaf.dtype in FOREIGN for leaf in nested.flatten(case.data)):
        lines.append("import ml_dtypes")
    return _PROGRAM.format(
        title=case.title(),
        size=size,
        backend=backend,
        imports="\n".join(lines),
        operators=_OPERATORS.get(case.op, "") if case.operation in REDUCTIONS else "",
        inputs=_listed([_input(case, rank, size) for rank in range(size)], 8),
        expected=_listed([_expected(case, rank, size) for rank in range(size)], 4),
        body="\n".join("    " + line for line in _call(case)),
    )


def _listed(items: list[str], indent: int) -> str:
    space = "\n" + " " * indent
    return f"[{space}{f',{space}'.join(items)},{space[:-4]}]"


def _input(case: Case, rank: int, size: int) -> str:
    kind = case.frameworks[rank % len(case.frameworks)]
    arrays = nested.flatten(oracle.inputs(case, rank, size, 0))
    shown = [_array(array, leaf.dtype, leaf.steps, kind)
             for array, leaf in zip(arrays, nested.flatten(case.data))]  # fmt: skip
    return _nested(case.data, iter(shown))


def _nested(data: Any, shown: Any) -> str:
    """Return the text of a structure, given the texts of its leaves."""
    filled = nested.rebuild(data, shown)

    def text(part: Any) -> str:
        if isinstance(part, dict):
            return "{" + ", ".join(f"{key!r}: {text(value)}" for key, value in part.items()) + "}"
        if isinstance(part, tuple):
            return "(" + ", ".join(map(text, part)) + ",)"
        return "[" + ", ".join(map(text, part)) + "]" if isinstance(part, list) else str(part)

    return text(filled)


def _array(array: Any, dtype: str, steps: tuple[int, ...], kind: str) -> str:
    if steps and kind != "numpy":
        steps = tuple(map(abs, steps))
    if steps:
        array, _ = spread(array, steps, 0)
    text = f"np.array({array.tolist()}, {str(array.dtype)!r}).reshape({array.shape})"
    if dtype in FOREIGN and kind == "numpy":
        text += f".view(ml_dtypes.{dtype})"
    if kind == "torch":
        text = f"torch.from_numpy({text})" + f".view(torch.{dtype})" * (dtype in FOREIGN)
    index = ", ".join(f"::{step}" for step in steps)
    text += f"[{index}]" if index else ""
    return f"chainer.Variable({text})" if kind == "chainer" else text


def _expected(case: Case, rank: int, size: int) -> str:
    wanted = oracle.references(case, rank, size, 0)
    if wanted is None:
        return "None"
    shown = []
    for reference, leaf in zip(wanted, nested.flatten(case.data)):
        if reference.bits is not None:
            exact = oracle.decoded(reference.bits, leaf.dtype)
            integral = BY_NAME[leaf.dtype].kind in "biu"
            shown.append(str(reference.bits.tolist() if integral else exact.tolist()))
        else:
            assert reference.value is not None
            shown.append(str(reference.value[0].tolist()))
    return shown[0] if not nested.is_tree(case.data) else _nested(case.data, iter(shown))


def _call(case: Case) -> list[str]:
    if case.operation == "send_recv":
        return [
            "work = comm.send(x, (comm.rank + 1) % comm.size, async_op=True)",
            "found = comm.recv(None, (comm.rank - 1) % comm.size)",
            "work.wait()",
            "return found",
        ]
    if case.operation == "sendrecv":
        return ["return comm.sendrecv(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)"]
    options = [f"root={case.root}"] if case.operation in ROOTED else []
    if case.operation in REDUCTIONS:
        named = {"user": "user_op(keep_right)", "premul_sum": "premul_sum(0.3 * (comm.rank + 1))"}
        options.append(f"op={named.get(case.op, repr(case.op))}")
    options += [f"order={case.order!r}"] if case.order else []
    options += [f"axis={case.axis}"] if case.axis else []
    options += [f"counts={case.counts}"] if case.counts is not None else []
    return [f"return comm.{case.operation}({', '.join(['x', *options])})"]
