"""The check of the files that a release uploads: what it accepts and refuses."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.package.release import COMPILED, FIELDS, PLACEHOLDER, ROOT, faults

LICENCE = (ROOT / "LICENSE").read_text()
METADATA = "".join(
    f"{field}: {value}\n"
    for field, value in {"Name": "collective-comm", "Version": "1.2", **FIELDS}.items()
)
INFO = "collective_comm-1.2.dist-info"
FULL, PURE = (
    "collective_comm-1.2-cp311-abi3-linux_x86_64.whl",
    "collective_comm-1.2-py3-none-any.whl",
)
SDIST = "collective_comm-1.2.tar.gz"


def write(path: Path, files: dict[str, str]) -> None:
    """Write an archive with these files."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)
        return
    with tarfile.open(path, "w:gz") as sdist:
        for name, text in files.items():
            member = tarfile.TarInfo(f"collective_comm-1.2/{name}")
            member.size = len(text.encode())
            sdist.addfile(member, io.BytesIO(text.encode()))


class Release:
    """Folder with the files of a complete release; a test changes one of them.

    Attributes:
        archives: files of each archive by name.
        pages: pages of the site by name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        wheel = {f"{INFO}/METADATA": METADATA, f"{INFO}/licenses/LICENSE": LICENCE, "c.py": ""}
        self.archives = {
            SDIST: {"PKG-INFO": METADATA, "LICENSE": LICENCE},
            FULL: {**wheel, **dict.fromkeys(COMPILED, "")},
            PURE: dict(wheel),
        }
        self.pages = {"index.html": "collective 1.2", "a.html": "collective 1.2"}

    def faults(self) -> list[str]:
        dist, site = self.folder / "dist", self.folder / "site"
        dist.mkdir()
        site.mkdir()
        for name, files in self.archives.items():
            write(dist / name, files)
        for name, text in self.pages.items():
            (site / name).write_text(text)
        return list(faults(dist, site, "1.2"))


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path)


def test_complete_release_has_no_faults(release: Release) -> None:
    assert release.faults() == []


def lose(name: str) -> Callable[[Release], None]:
    def change(release: Release) -> None:
        release.archives.pop(name)

    return change


def put(archive: str, name: str, old: str = "", new: str = "") -> Callable[[Release], None]:
    """Return a change of a file of an archive: the file is new, or has ``new`` for ``old``."""

    def change(release: Release) -> None:
        files = release.archives[archive]
        files[name] = files.get(name, "").replace(old, new) if old else new

    return change


def drop(archive: str, name: str) -> Callable[[Release], None]:
    def change(release: Release) -> None:
        del release.archives[archive][name]

    return change


def show(page: str, text: str) -> Callable[[Release], None]:
    def change(release: Release) -> None:
        release.pages[page] = text

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lose(SDIST), "0 files are the sdist of version 1.2"),
        (lose(FULL), "0 files are the wheel with the core of version 1.2"),
        (lose(PURE), "0 files are the wheel for every platform of version 1.2"),
        (put(SDIST, "PKG-INFO", "Version: 1.2", "Version: 1.1"), "sdist: metadata: Version: 1.1"),
        (put(FULL, f"{INFO}/METADATA", "BSD-3-Clause", "MIT"), "License-Expression: MIT, expected"),
        (
            put(PURE, f"{INFO}/METADATA", "Name", f"X: {PLACEHOLDER}\nName"),
            f"placeholder {PLACEHOLDER}",
        ),
        (put(SDIST, "LICENSE", LICENCE, "none"), "sdist: it has no copy of LICENSE"),
        (drop(FULL, f"{INFO}/METADATA"), "wheel with the core: 0 files of metadata"),
        (drop(FULL, "collective/native/_core.abi3.so"), "wheel with the core: compiled files"),
        (put(PURE, "collective/native/_core.abi3.so"), "_core.abi3.so: only one of the wheels"),
        (drop(PURE, "c.py"), "c.py: only one of the wheels has it"),
        (
            show("a.html", f"collective 1.2 {PLACEHOLDER}"),
            f"a.html: it has the placeholder {PLACEHOLDER}",
        ),
        (show("a.html", "collective"), "a.html: it does not show version 1.2"),
        (lambda release: release.pages.clear(), "site: there are no pages"),
    ],
)
def test_fault_of_a_release_is_named(
    release: Release, change: Callable[[Release], None], words: str
) -> None:
    change(release)
    found = release.faults()
    assert found
    assert any(words in fault for fault in found), found


def test_file_of_another_version_is_named(release: Release) -> None:
    release.archives[SDIST.replace("1.2", "1.3")] = {}
    (fault,) = release.faults()
    assert re.search(r"1\.3\.tar\.gz: it does not belong to a release of version 1\.2$", fault)
