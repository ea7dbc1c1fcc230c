"""The request of one rank: one collective call, to compare between ranks and to show in errors."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, cast

from collective import native
from collective.memory.dtypes import DType
from collective.ops import ReduceOp


class Request:
    """One collective call as this rank requests it.

    Two ranks made the same call if their digests are equal. A communicator remembers the requests
    of most calls together with their plans, so equal calls share one ``Request`` object. The calls
    for which it makes a request each time are listed at
    :meth:`collective.contract.backend.Backend.plan`.

    Attributes:
        operation: ``"all_reduce"``, …
        dtype: element type; None if the operation has none, or if this rank does not know it.
        shape: shape of this rank's array; None if this rank does not know it (an array that only
            the root has). Reductions always know dtype and shape.
        options: other values that the ranks must agree on, such as ``root`` and ``op``.
        digest: 63 bits that are equal on two ranks if everything above is equal.
        op: operator of a reduction.
        ordered: whether a reduction folds ``((x0 op x1) op x2) op …``, element by element.
        root: rank that has the input or gets the result, if the operation has a root.
        elements: number of elements of each rank, if arrays are split or joined; in
            ``all_to_all``, number of elements that this rank sends to each rank. The
            elements are those of the plan's buffers, which hold bytes for a structure.
        incoming: in ``all_to_all``, number of elements that come from each rank.
        alike: in ``all_to_all``, whether all ranks cut as this rank does, so that the same number
            of elements comes from each rank.
        is_step: whether this is a step of a call, whose arrays may have another dtype and shape.
    """

    # These are None in operations that do not have them.
    op: ReduceOp
    root: int
    elements: Sequence[int]
    incoming: Sequence[int]

    __slots__ = (
        "_described", "alike", "digest", "dtype", "elements", "incoming", "is_step", "op",
        "operation", "options", "ordered", "root", "shape",
    )  # fmt: skip

    def __init__(
        self,
        operation: str,
        dtype: DType | None = None,
        shape: tuple[int, ...] | None = None,
        *,
        op: ReduceOp | None = None,
        ordered: bool = False,
        root: int | None = None,
        elements: Sequence[int] | None = None,
        incoming: Sequence[int] | None = None,
        alike: bool = False,
        **options: Any,
    ) -> None:
        self.alike = alike
        self.is_step = False
        self.operation = operation
        self.dtype = dtype
        self.shape = shape
        self.ordered = ordered
        self._set(op, root, elements, incoming)
        # Each rank may have its own factor, so the factor is not compared. All ranks must agree
        # that there is one.
        name = None if op is None else "premul_sum" if op.name == "premul_sum" else str(op)
        agreed = {"op": name, "order": "rank" if ordered else None, "root": root, **options}
        self.options = {key: value for key, value in agreed.items() if value is not None}
        self._described = {
            "operation": operation,
            "dtype": None if dtype is None else dtype.name,
            "shape": shape,
            "options": self.options,
        }
        self.digest = _digest(json.dumps(self._described, sort_keys=True))

    @property
    def nbytes(self) -> int:
        """Size of this rank's array in bytes; 0 if it is unknown."""
        if self.dtype is None or self.shape is None:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize

    def step(
        self,
        number: int,
        operation: str,
        *,
        count: int | None = None,
        op: ReduceOp | None = None,
        root: int | None = None,
        elements: Sequence[int] | None = None,
        incoming: Sequence[int] | None = None,
    ) -> Request:
        """Return the request of one step of this call; errors describe the step as this call.

        Args:
            number: number of the step. It is part of the digest, so that ranks cannot confuse two
                steps.
            operation: operation of the step.
            count: in a reduction or a broadcast, number of elements of the step.
            op, root, elements, incoming: as in the class.
        """
        part = copy.copy(self)
        part.is_step = True
        part.operation = operation
        part.shape = self.shape if count is None else (count,)
        part.ordered = part.alike = False
        part._set(op, root, elements, incoming)
        part.digest = _digest(f"{self.digest} {(number,)}")
        return part

    def comparing_results(self, elements: Sequence[int]) -> Request:
        """Return the request of an all-gather that carries checksums of this call's results.

        Its digest depends on the name and the root only, because the ranks' requests may differ in
        lengths. Errors describe it as this call.

        Args:
            elements: as in the class.
        """
        call = Request(self.operation, root=self.root)
        part = call.step(1, "all_gather", elements=elements)
        part.options = {**self.options, "compared": "results"}
        part._described = {**self._described, "options": part.options}
        return part

    def _set(
        self,
        op: ReduceOp | None,
        root: int | None,
        elements: Sequence[int] | None,
        incoming: Sequence[int] | None,
    ) -> None:
        self.op = cast("ReduceOp", op)
        self.root = cast("int", root)
        self.elements = cast("Sequence[int]", elements)
        self.incoming = cast("Sequence[int]", incoming)

    def __str__(self) -> str:
        return describe(self._described)

    def header(self, site: str | None = None) -> bytes:
        """Return everything that the other ranks need to compare or report this call, as JSON.

        Args:
            site: place in the program where the call was made; by default the caller's
                :func:`call_site`.
        """
        place = call_site() if site is None else site
        return json.dumps({**self._described, "site": place}).encode()


def _digest(text: str) -> int:
    # Python's hash() differs from process to process. 63 bits fit into a signed word.
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Disagreement(Exception):
    """Exception that a transport raises on every rank when the ranks' digests differ.

    It never reaches a user. The communicator checks whether the difference is allowed (shapes of a
    gather), and raises ``MismatchError`` if not. No output has been written, and the transport is
    ready for the next call.

    Attributes:
        headers: header of each rank's request, in rank order, from :meth:`Request.header`.
    """

    def __init__(self, headers: Sequence[bytes]) -> None:
        super().__init__("ranks disagree")
        self.headers = [json.loads(header) for header in headers]

    @property
    def alike(self) -> bool:
        """Whether the ranks' headers are equal: then only their transports saw a difference."""
        first, *rest = [{**header, "site": ""} for header in self.headers]
        return all(header == first for header in rest)


def describe(header: dict[str, Any]) -> str:
    """Return the call of a header in the form in which a person would write it."""
    options, name, parts = header["options"], header["operation"], []
    if options.get("object"):  # the program knows nothing of the bytes of an object
        name, options = f"{name}_object", {key: options[key] for key in ("root",) if key in options}
    elif header["dtype"] is not None:
        shape = "?" if header["shape"] is None else ", ".join(map(str, header["shape"]))
        parts.append(f"{header['dtype']}[{shape}]")
    parts.extend(f"{key}={value}" for key, value in options.items())
    return f"{name}({', '.join(parts)})"


def differing(headers: Mapping[int, dict[str, Any]], absent: Sequence[int] = ()) -> str:
    """Return a text that shows which rank made which call, and where.

    Ranks that made the same call at the same place share a line.

    Args:
        headers: header of each rank, by rank.
        absent: ranks that have not made the call yet.
    """
    groups: dict[str, list[int]] = {}
    for rank, header in headers.items():
        site = f" at {header['site']}" if header["site"] else ""
        groups.setdefault(describe(header) + site, []).append(rank)
    if absent:
        groups["has not come so far"] = list(absent)
    lines = [f"  {name_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    return "\n".join([*lines, *_misfits(headers)])


def _misfits(headers: Mapping[int, dict[str, Any]]) -> list[str]:
    """Return a line that names pairs of ranks which state different lengths; [] without such pairs.

    Args:
        headers: as in :func:`differing`.
    """
    calls = {(header["operation"], header["options"].get("root")) for header in headers.values()}
    if len(calls) > 1:
        return []
    pairs = []
    for sender, receiver in itertools.product(headers, headers):
        sent = _length_sent(headers[sender], sender, receiver)
        expected = _length_expected(headers[receiver], sender, receiver)
        if sent is not None and expected is not None and sent != expected:
            pairs.append(f"rank {sender} sends {sent} to rank {receiver}, which expects {expected}")
    more = len(pairs) - _PAIRS
    return [f"  {'; '.join(pairs[:_PAIRS])}{f'; and {more} more' * (more > 0)}"] if pairs else []


def _length_sent(header: dict[str, Any], sender: int, receiver: int) -> int | None:
    """Return the length that the header of a sender states for a receiver; None if it has none."""
    operation, options = header["operation"], header["options"]
    lengths, index = options.get("counts"), sender
    if operation == "reduce_scatter":
        index = receiver
    elif operation in ("gather", "all_gather"):
        lengths, index = (lengths, sender) if lengths else (header["shape"], 0)
    else:
        lengths, index = _cut_lengths(options, sender), receiver
    return int(lengths[index]) if lengths else None


def _length_expected(header: dict[str, Any], sender: int, receiver: int) -> int | None:
    """Return the length that the header of a receiver states for a sender; None if it has none."""
    operation, options = header["operation"], header["options"]
    lengths, index = options.get("expects") or options.get("counts"), sender
    if operation == "reduce_scatter":
        index = receiver
    elif operation == "scatter":  # the header of a receiver is its guess of the root's call
        lengths, index = _cut_lengths(options, sender), receiver
    elif operation == "gather" and options["root"] != receiver:
        lengths = None
    return int(lengths[index]) if lengths else None


def _cut_lengths(options: dict[str, Any], sender: int) -> list[int] | None:
    """Return the lengths of the pieces of a sender's array, if the options state them."""
    cut = options.get("sizes") and options.get("root") in (None, sender)
    lengths = options["sizes"][0] if cut else None
    return lengths if isinstance(lengths, list) else None


#: Number of pairs of ranks that an error names.
_PAIRS = 3


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as words: ``rank 7``, ``ranks 0, 1`` or ``ranks 0-6, 8-15``.

    Args:
        ranks: at least one rank, in any order.
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    # Two ranks are not written as a range: "0, 1" is as short as "0-1" and easier to read.
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    several = len(runs) > 1 or len(runs[0]) > 1
    return f"rank{'s' * several} {', '.join(words)}"


class _InThread(threading.local):
    # Reading this class attribute costs 40 ns; getattr() with a default costs 300 ns if the
    # attribute is absent.
    site: str | None = None


#: Thread-local data. In a lane's thread, ``site`` is the place that submitted the running call.
in_thread = native.in_thread() or _InThread()
#: Prefixes of the names of files that do not belong to the program: the folders of this package
#: and of the frameworks that call it, such as PyTorch in a backward pass. The flight recorders in
#: C read this list.
LIBRARIES = [os.path.dirname(os.path.abspath(__file__)) + os.sep]


# Frameworks through which programs call this library.
_FRAMEWORKS = ("torch", "jax", "chainer", "chainermn", "ray")


class _LibraryFiles(dict[str, bool]):
    def __missing__(self, name: str) -> bool:
        self[name] = answer = name.startswith(tuple(LIBRARIES))
        return answer


#: By file name, whether the file is in one of :data:`LIBRARIES`. A cache, since every recorded call
#: looks files up.
is_library_file = _LibraryFiles()


def pass_over(package: ModuleType) -> None:
    """Skip the frames of a package from now on in the search for the place of a call."""
    folder = os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
    if folder not in LIBRARIES:
        LIBRARIES.append(folder)
        is_library_file.clear()


def pass_over_frameworks() -> None:
    """Skip the frames of the frameworks that this process has imported until now."""
    for name in _FRAMEWORKS:
        package = sys.modules.get(name)
        if getattr(package, "__file__", None) is not None:
            pass_over(cast("ModuleType", package))


def call_site(frame: FrameType | None = None) -> str:
    """Return ``file:line in function`` of the innermost frame of the program.

    In a lane's thread, return the place in the program that submitted the running call.

    Args:
        frame: innermost frame of another thread, which is not a lane's. The result is empty if
            only :data:`LIBRARIES` run in that thread.
    """
    skipped: tuple[str, ...] = tuple(LIBRARIES)
    if frame is None:
        if in_thread.site is not None:
            return in_thread.site
        frame = sys._getframe(1)
    else:
        # The thread may wait for an event, or be at the end of a context of this package.
        skipped = (*skipped, threading.__file__, contextlib.__file__)
    while frame.f_code.co_filename.startswith(skipped):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
