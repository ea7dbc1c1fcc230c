"""What one rank asked for: compared with what the others asked, and told in errors."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from collective import native
from collective.memory.dtypes import DType
from collective.ops import ReduceOp

__all__ = ["Disagreement", "Request", "call_site", "describe", "differing", "in_thread"]


class Request:
    """One collective call as this rank asks for it.

    Two ranks made the same call when their digests are equal. Equal calls share one
    ``Request`` object a communicator (it is kept), so nothing here is computed twice.

    Attributes:
        operation: ``"all_reduce"``, …
        dtype: the element type, None where none is involved or known here.
        shape: this rank's shape, None where unknown here (an array that only the root has).
            Of a reduction both are always known.
        options: what else has to agree, such as ``root`` and ``op``.
        digest: 63 bits that are equal on two ranks when everything above is.
        op: of a reduction, its operator.
        ordered: whether it folds ``((x0 op x1) op x2) op …``, element by element.
        root: where there is one, the rank that has the input, or gets the result.
        elements: of what is split or joined, how many elements each rank has; of ``all_to_all``,
            how many of this rank's each rank gets.
        incoming: of ``all_to_all``, how many come from each rank.
        alike: of ``all_to_all``, whether all ranks cut as this one does, so that equally many come
            from each.
    """

    # Of operations that have none of these they are None.
    op: ReduceOp
    root: int
    elements: Sequence[int]
    incoming: Sequence[int]

    __slots__ = (
        "_described", "alike", "digest", "dtype", "elements", "incoming", "op", "operation",
        "options", "ordered", "root", "shape",
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
        self.operation = operation
        self.dtype = dtype
        self.shape = shape
        self.ordered = ordered
        self._set(op, root, elements, incoming)
        # A factor is each rank's own affair; that there is one is not.
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
        """The bytes of this rank's array; 0 where it is unknown."""
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
        """Return a part of this call as one of its own, which errors describe as this one.

        Args:
            number: which step it is: ranks must not mix up two of them.
            operation: what is done in it.
            count: of a reduction, the elements that are folded.
            op, root, elements, incoming: as in the class.
        """
        part = copy.copy(self)
        part.operation = operation
        part.shape = self.shape if count is None else (count,)
        part.ordered = part.alike = False
        part._set(op, root, elements, incoming)
        part.digest = _digest(f"{self.digest} {(number,)}")
        return part

    def comparing(self, operation: str, elements: Sequence[int] | None = None) -> Request:
        """Return what carries a message that all ranks have to be in.

        Its digest depends on the name and the root only, whatever else they know of the call.

        Args:
            operation, elements: what carries it, as in the class.
        """
        part = copy.copy(self)
        part.digest = Request(self.operation, root=self.root).digest
        part.operation = operation
        part.dtype = part.shape = None
        part._set(None, self.root, elements, None)
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
        """Return everything the other ranks need to compare or report this call.

        Args:
            site: where in the program it was made; by default where this is called from.
        """
        found = call_site() if site is None else site
        return json.dumps({**self._described, "site": found}).encode()


def _digest(text: str) -> int:
    # hash() differs from process to process; 63 bits fit a signed word.
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Disagreement(Exception):
    """Raised by a transport on every rank when the ranks' digests differ.

    It never reaches a user: the communicator finds out whether the difference is
    allowed (shapes of a gather) and raises ``MismatchError`` if not. No output has been written
    to, and the transport is ready for the next call.

    Attributes:
        headers: what each rank asked for, in rank order, from :meth:`Request.header`.
    """

    def __init__(self, headers: Sequence[bytes]) -> None:
        super().__init__("ranks disagree")
        self.headers = [json.loads(header) for header in headers]

    @property
    def alike(self) -> bool:
        """Whether the ranks asked for the same: then their transports saw it differently."""
        first, *rest = [{**header, "site": ""} for header in self.headers]
        return all(header == first for header in rest)


def describe(header: dict[str, Any]) -> str:
    """Return a header as a person would write the call."""
    parts = []
    if header["dtype"] is not None:
        shape = "?" if header["shape"] is None else ", ".join(map(str, header["shape"]))
        parts.append(f"{header['dtype']}[{shape}]")
    parts.extend(f"{key}={value}" for key, value in header["options"].items())
    return f"{header['operation']}({', '.join(parts)})"


def differing(headers: Mapping[int, dict[str, Any]], absent: Sequence[int] = ()) -> str:
    """Return who called what, and where: a line for all ranks that did the same.

    Args:
        headers: rank -> header.
        absent: ranks that have not come to it.
    """
    groups: dict[str, list[int]] = {}
    for rank, header in headers.items():
        site = f" at {header['site']}" if header["site"] else ""
        groups.setdefault(describe(header) + site, []).append(rank)
    if absent:
        groups["has not come so far"] = list(absent)
    return "\n".join(
        f"  rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in groups.items()
    )


class _InThread(threading.local):
    # A default that is found costs 40 ns; getattr() with one, for what is absent, 300.
    site: str | None = None


#: In a lane's thread, ``site`` is where the running call was submitted.
in_thread = native.in_thread() or _InThread()
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def call_site(packages: tuple[str, ...] = (_PACKAGE,)) -> str:
    """Return ``file:line in function`` of the innermost frame outside this package.

    For a call that runs in a lane's thread it is the place where it was submitted.

    Args:
        packages: the folders of this and of others that are passed over, too.
    """
    if in_thread.site is not None:
        return in_thread.site
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(packages):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
