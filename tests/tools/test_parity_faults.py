"""``collective parity`` finds the fault of each transport in broken_transport.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from collective.backends.threads import ThreadsBackend
from collective.contract.backend import Backend
from collective.request import Request
from collective.tools.parity.cases import OPERATIONS
from collective.tools.parity.runner import CaseResult
from tests.support import broken_transport as broken
from tests.support.loopback import Loopback
from tests.tools.test_parity import outcomes

pytestmark = pytest.mark.whole

# The timeout is long enough for a busy machine, and short enough to wait for a hang.
TIMEOUT_S = 4.0


class Fault(NamedTuple):
    """A broken transport, the operation that shows the fault, and a fragment of the report."""

    kind: type[Backend]
    operation: str
    says: str
    size: int = 3
    operations: tuple[str, ...] = OPERATIONS
    timeout: float = TIMEOUT_S
    ops: tuple[str, ...] = ("sum", "avg", "user")
    dtypes: tuple[str, ...] = ("float32",)


class HangingScan(ThreadsBackend):
    """Transport whose rank 1 never leaves a scan."""

    def scan(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().scan(request, src, dst, timeout)
        if self.rank == 1:
            broken.released.wait()


FAULTS = [
    Fault(broken.WrongRoot, "broadcast", "elements are wrong"),
    Fault(broken.WrongOrder, "all_gather", "elements are wrong"),
    Fault(broken.LostTail, "send_recv", "[300007]"),
    Fault(broken.Aliasing, "all_reduce", "the input of dtype float32 was changed"),
    Fault(broken.Stale, "reduce_scatter", "turn 1"),
    Fault(broken.DroppedRank, "all_reduce", "elements are wrong"),
    Fault(broken.WrongDtype, "reduce", "elements are wrong"),
    Fault(
        broken.Saturating, "all_reduce", "all_reduce(sum)", ops=("sum", "min"),
        dtypes=("float32", "int16"),
    ),
    Fault(broken.Platform, "all_reduce", "all_reduce(min)", ops=("sum", "min")),
    Fault(HangingScan, "scan", "RankHungError", 2, ("scan", "all_reduce"), 1.5, ("sum",)),
    Fault(
        broken.Crashing, "all_gather", "killed by signal 9", 2,
        ("all_reduce", "all_gather", "gather"),
    ),
    Fault(broken.Raising, "scan", "the cable is loose"),
    Fault(broken.Undivided, "all_reduce", "all_reduce(avg)"),
    Fault(broken.Disordered, "all_reduce", "order='rank'", 4),
    Fault(broken.Commuting, "all_reduce", "all_reduce(user)"),
]  # fmt: skip


def found_on(kind: type[Backend], size: int, **asked: Any) -> list[CaseResult]:
    return outcomes(f"{kind.__module__}:{kind.__name__}", (size,), shapes=["odd", "large"], **asked)


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    broken.released.clear()
    yield
    broken.released.set()


# Parity compares results, so it misses these transports. Their faults show only in the order of
# messages, in groups, in barriers, in symmetric memory, in the text of an error, after an error,
# when survivors continue, in durations, in read-only inputs, in calls of other threads, or in the
# bytes of booleans.
UNSEEN = set(
    """
    Laconic Forgiving Unwaking Ignoring Alone Slandering Unhospitable Secretive Lending
    Rewriting Bytewise RawFirst Tidying Lingering
    SwappedTags Hanging Swallowing Impatient Unchecked Early Deaf SortedGroups Overrunning MixedUp
    """.split()
)


def test_faults_cover_every_broken_transport() -> None:
    known = {
        name for name, kind in vars(broken).items()
        if isinstance(kind, type) and kind.__module__ == broken.__name__
    }  # fmt: skip
    assert {fault.kind.__name__ for fault in FAULTS} - {"HangingScan"} == known - UNSEEN


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind.__name__)
def test_parity_finds_planted_fault(fault: Fault) -> None:
    results = found_on(
        fault.kind, fault.size, operations=fault.operations, timeout=fault.timeout, ops=fault.ops,
        dtypes=fault.dtypes,
    )  # fmt: skip
    failed = [result for result in results if result.status == "failed"]
    assert fault.operation in {result.case.operation for result in failed}
    texts = [result.text for result in failed if result.case.operation == fault.operation]
    assert any(fault.says in text for text in texts), texts
    # A case that fails, hangs or dies does not affect other cases.
    assert {result.case.operation for result in results} == set(fault.operations)
    assert len({result.case for result in results}) == len(results)
    assert any(result.status == "passed" for result in results)


@pytest.mark.parametrize("kind", [ThreadsBackend, Loopback])
def test_parity_finds_nothing_on_sound_transports(kind: type[Backend]) -> None:
    ops, dtypes = ("sum", "avg", "user", "min"), ("float32", "int16")
    results = found_on(kind, 3, timeout=60.0, ops=ops, dtypes=dtypes)
    assert {result.text for result in results if result.status != "passed"} == set()
