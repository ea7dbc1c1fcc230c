"""The option ``kind=`` of the suite: calls get arrays of a kind, and must return the same kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from collective.errors import BackendUnavailableError, InvalidArgumentError
from collective.testing import KINDS, Kind, all_checks, parametrize_with_checks, run_checks
from collective.testing import kinds as module
from collective.testing.__main__ import main
from tests.support import broken_transport as broken

Check = Any

# One check of each sort that depends on the kind of array, and not on the transport.
PART = (
    "check_all_reduce", "check_async", "check_moves_of_layouts", "check_reductions_of_layouts",
    "check_reduce_scatter_counts", "check_repeated", "check_scatter", "check_send_recv",
    "check_send_structures", "check_structures", "check_empty", "check_empty_views",
)  # fmt: skip


needs_torch = pytest.mark.skipif(not module.has("torch"), reason="needs PyTorch")
needs_chainer = pytest.mark.skipif(not module.has("chainer"), reason="needs Chainer")
TORCH = "torch" if module.has("torch") else "numpy"
CHAINER = "chainer" if module.has("chainer") else "numpy"


@needs_torch
@parametrize_with_checks("threads", sizes=(2,), kind=TORCH)
def test_torch_arrays_pass_all_checks(check: Check) -> None:
    check()


@needs_torch
@parametrize_with_checks("shm", sizes=(3,), kind=TORCH, checks=PART)
def test_torch_arrays_pass_checks_over_shared_memory(check: Check) -> None:
    check()


@needs_chainer
@parametrize_with_checks("threads", sizes=(2,), kind=CHAINER, checks=PART)
def test_chainer_arrays_pass_checks(check: Check) -> None:
    check()


@parametrize_with_checks("threads", sizes=(2,), kind="dlpack", checks=PART)
def test_dlpack_arrays_pass_checks(check: Check) -> None:
    check()


# -- the option itself ------------------------------------------------------------------------


@dataclass
class Box:
    """Array that supports DLPack; the class counts its instances in ``made``."""

    array: np.ndarray[Any, Any]
    made = 0

    def __post_init__(self) -> None:
        Box.made += 1

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def boxed(x: np.ndarray[Any, Any]) -> Box:
    if x.dtype.kind not in "biufc":
        raise TypeError("box: NumPy lends no such array")
    return Box(x)


def unboxed(x: Any) -> np.ndarray[Any, Any]:
    return x.array if isinstance(x, Box) else np.asarray(x)


def test_run_checks_uses_custom_kind() -> None:
    Box.made = 0
    mine = Kind("box", of=boxed, read=unboxed, type=np.ndarray, like="numpy")
    (result,) = run_checks("threads", (2,), kind=mine, checks=["check_scan"])
    assert result.outcome == "passed", result.text
    assert Box.made > 100


def test_run_checks_fails_on_result_of_other_kind() -> None:
    mine = Kind("box", of=boxed, read=unboxed, type=Box, like="numpy")
    (result,) = run_checks("threads", (2,), kind=mine, checks=["check_scan"])
    assert result.outcome == "failed"
    assert "scan: got ndarray for arrays of box" in result.text


@pytest.mark.parametrize("kind", ["torch", "chainer", "dlpack"])
def test_run_checks_catches_broken_transport_with_any_kind(kind: str) -> None:
    if kind != "dlpack" and not module.has(kind):
        pytest.skip(f"needs {kind}")
    (result,) = run_checks(broken.WrongRoot, (3,), kind=kind, checks=["check_broadcast"])
    assert result.outcome == "failed"
    assert "root=1" in result.text


def test_command_with_kind_skips_checks_without_arrays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["check_barrier", "check_scan", "check_killed_peer", "check_dlpack"]
    assert main(["threads", "--sizes", "2", "--kind", "dlpack", "--checks", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Not tested:" not in lines
    assert lines[-1].startswith("conforms: 2 passed, 2 skipped")


def test_command_lists_checks_of_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["threads", "--sizes", "2", "--kind", "dlpack", "--list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == set(all_checks())
    assert lines["check_broadcast"].split(maxsplit=2)[1] == "2"
    assert "  0  skipped: does not depend on the kind of array" in lines["check_fork"]


def test_run_checks_with_unknown_or_missing_kind_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidArgumentError, match="kind: unknown name 'mxnet'; pass one of numpy, torch"
    ):
        run_checks("threads", kind="mxnet")
    monkeypatch.setattr(module, "has", lambda name: False)
    with pytest.raises(BackendUnavailableError, match="kind torch: torch is not installed; `pip"):
        run_checks("threads", kind="torch")
    assert "numpy" in KINDS
