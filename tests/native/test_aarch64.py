"""Helpers of ``tests.native.aarch64``, which itself needs an emulator and an hour."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.native import aarch64


def test_missing_tools_are_named_with_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["aarch64", "--folder", str(tmp_path / "folder")])
    monkeypatch.setattr("os.nice", lambda more: more)
    assert aarch64.main() == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "no qemu-aarch64" in shown
    assert "apt-get install qemu-user" in shown
    assert not (tmp_path / "folder").exists()


def test_barrier_follows_each_store_release() -> None:
    text = "\tstlr\tx0, [x1]\n\tldar\tx2, [x3]\n\tstr\tx0, [x1]\n\tstlrb\tw0, [x1]\n"
    assert aarch64.with_barriers(text) == (
        "\tstlr\tx0, [x1]\n\tdmb\tish\n\tldar\tx2, [x3]\n\tstr\tx0, [x1]\n"
        "\tstlrb\tw0, [x1]\n\tdmb\tish\n"
    )


def test_failed_download_is_one_line_with_its_reason() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('first\\nno such host')"]
    with pytest.raises(aarch64.MissingError, match=r"^cannot fetch NumPy.*no such host$"):
        aarch64.fetched(command, "NumPy's wheel")
