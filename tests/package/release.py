"""Check what a release uploads, after ``make release-check`` has built it.

``python -m tests.package.release`` reads the sdist and the two wheels in ``dist`` and the site in
``site``, prints what is wrong with them, and ends with code 1 if anything is.
"""

from __future__ import annotations

import email
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import collective

__all__ = ["faults"]

ROOT = Path(__file__).resolve().parents[2]
#: Placeholder for the owner of the repository, which nothing that is built may have.
PLACEHOLDER = "__OWNER__"
#: Names of the files, without the version, and the path of the metadata in each.
FILES = {
    "sdist": (r"{}\.tar\.gz", r"[^/]+/PKG-INFO"),
    "wheel with the core": (r"{}-cp311-abi3-linux_\w+\.whl", r"{}\.dist-info/METADATA"),
    "wheel for every platform": (r"{}-py3-none-any\.whl", r"{}\.dist-info/METADATA"),
}
#: Compiled files of the wheel with the core.
COMPILED = {
    "collective/adapters/jax/libcollective_ffi.so",
    "collective/adapters/jax/xla/libcollective_xla.so",
    "collective/native/_core.abi3.so",
}
#: Fields of the metadata, besides the name and the version.
FIELDS = {
    "Requires-Python": ">=3.11",
    "License-Expression": "BSD-3-Clause",
    "License-File": "LICENSE",
    "Description-Content-Type": "text/markdown",
}


def faults(dist: Path, site: Path, version: str) -> Iterator[str]:
    """Yield what is wrong with a release, one text for each fault.

    Args:
        dist: folder with the sdist and the wheels.
        site: folder with the site.
        version: version of the package.
    """
    stem = re.escape(f"collective_comm-{version}")
    contents: dict[str, Mapping[str, bytes]] = {}
    known = set()
    for kind, (name, _) in FILES.items():
        paths = [path for path in dist.glob("*") if re.fullmatch(name.format(stem), path.name)]
        known.update(paths)
        if len(paths) != 1:
            yield f"{dist}: {len(paths)} files are the {kind} of version {version}, expected 1"
            continue
        contents[kind] = _contents(paths[0])
        yield from _of_archive(kind, contents[kind], FILES[kind][1].format(stem), version)
    for path in sorted(set(dist.glob("*")) - known):
        yield f"{path}: it does not belong to a release of version {version}"
    yield from _of_wheels(*(set(contents.get(kind, ())) for kind in list(FILES)[1:]))
    yield from _of_site(site, version)


def _contents(path: Path) -> dict[str, bytes]:
    """Return the files of an archive by their names."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    files = {}
    with tarfile.open(path) as sdist:
        for member in sdist.getmembers():
            if (file := sdist.extractfile(member)) is not None:
                files[member.name] = file.read()
    return files


def _of_archive(
    kind: str, files: Mapping[str, bytes], metadata: str, version: str
) -> Iterator[str]:
    """Yield what is wrong with the metadata and the licence of an archive."""
    found = [data for name, data in files.items() if re.fullmatch(metadata, name)]
    if len(found) != 1:
        yield f"{kind}: {len(found)} files of metadata, expected 1"
        return
    fields = email.message_from_bytes(found[0])
    for field, value in {"Name": "collective-comm", "Version": version, **FIELDS}.items():
        if fields[field] != value:
            yield f"{kind}: metadata: {field}: {fields[field]}, expected {value}"
    if PLACEHOLDER in found[0].decode():
        yield f"{kind}: metadata: it has the placeholder {PLACEHOLDER}"
    licence = (ROOT / "LICENSE").read_bytes()
    if licence not in [data for name, data in files.items() if name.endswith("/LICENSE")]:
        yield f"{kind}: it has no copy of LICENSE"


def _of_wheels(full: set[str], pure: set[str]) -> Iterator[str]:
    """Yield how two wheels differ beside the compiled files."""
    compiled = {name for name in full if name.endswith(".so")}
    if compiled != COMPILED:
        yield f"wheel with the core: compiled files {sorted(compiled)}, expected {sorted(COMPILED)}"
    for name in sorted((full - compiled) ^ pure):
        yield f"{name}: only one of the wheels has it"


def _of_site(site: Path, version: str) -> Iterator[str]:
    """Yield the pages without the version, and those with the placeholder."""
    pages = sorted(site.rglob("*.html"))
    if not pages:
        yield f"{site}: there are no pages"
    for page in pages:
        text = page.read_text()
        if PLACEHOLDER in text:
            yield f"{page}: it has the placeholder {PLACEHOLDER}"
        if f"collective {version}" not in text:
            yield f"{page}: it does not show version {version}"


if __name__ == "__main__":
    wrong = list(faults(ROOT / "dist", ROOT / "site", collective.__version__))
    if PLACEHOLDER in (ROOT / "pyproject.toml").read_text():
        print(
            f"The repository has no owner ({PLACEHOLDER} in pyproject.toml), so metadata and site "
            "have no addresses. CONTRIBUTING.md, Release, says how to name the owner."
        )
    print("\n".join(wrong) or f"The files of version {collective.__version__} are complete.")
    sys.exit(bool(wrong))
