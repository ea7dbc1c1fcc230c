"""The supported Pythons of this machine: where they are found, and unpacked from Debian's packages.

The modules of this folder import only the standard library: ``run.py`` makes the environments that
have more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["FOLDER", "ROOT", "VERSIONS", "Missing", "about", "command", "find", "unpack"]

ROOT = Path(__file__).resolve().parents[2]
#: Folder of the unpacked Pythons, of the environments and of the logs; ``make clean`` removes it.
FOLDER = ROOT / ".pythons"
#: The supported Pythons, oldest first.
VERSIONS = ("3.11", "3.12", "3.13", "3.14", "3.15")

_DEBIAN = FOLDER / "debian"
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# A Python that cannot make environments is of no use, and a shim of pyenv may start no Python.
_ABOUT = "import sys, venv; print(*sys.version_info[:2], sep='.'); print(sys.version.split()[0])"


class Missing(Exception):
    """Something that the program needs and this machine does not have, with the remedy."""


def about(python: Path | str) -> tuple[str, str] | None:
    """Return the version of an interpreter, short and whole, or None if it does not start."""
    try:
        done = subprocess.run(
            [python, "-c", _ABOUT], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    short, whole = done.stdout.split()
    return short, whole


def find(version: str) -> Path | None:
    """Return an interpreter of a version such as "3.14", or None if this machine has none."""
    for candidate in _candidates(version):
        found = about(candidate)
        if found is not None and found[0] == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[Path]:
    """Yield the files that may be an interpreter of the version, the unpacked one first."""
    yield _DEBIAN / f"usr/bin/python{version}"
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        # An environment's Python starts others in its environment, so take the one below.
        yield Path(getattr(sys, "_base_executable", sys.executable))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}*/bin/python{version}"), reverse=True)
    for folder in os.get_exec_path():
        candidate = Path(folder, f"python{version}")
        if candidate.is_file():
            yield candidate


def command(words: Sequence[object], **options: object) -> str:
    """Run a command and return its output.

    Raises:
        Missing: the command is not installed, or it failed; the text has its last lines.
    """
    words = [str(word) for word in words]
    try:
        done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    except FileNotFoundError as error:
        raise Missing(f"{words[0]} is not installed") from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Missing(f"`{' '.join(words[:3])} …` failed: {' / '.join(lines[-3:])}")
    return str(done.stdout)


def unpack(version: str, patchelf: Path) -> None:
    """Unpack a Python of Debian's unstable suite below :data:`FOLDER`, with its libraries.

    Nothing is installed, and nothing needs root: apt keeps its lists below the folder. ``patchelf``
    writes the paths of the unpacked loader and libraries into the interpreter. So the interpreter
    runs with the C library that it was built for, as do the environments made of it, and the
    programs that it starts keep the C library of the machine.

    Raises:
        Missing: apt, its mirror or the packages are missing.
    """
    if shutil.which("dpkg-deb") is None:
        raise Missing("dpkg-deb is not installed: install this Python in another way")
    apt = FOLDER / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial", "packages"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    signed = f"Signed-By: {_KEYS}\n" if _KEYS.exists() else ""
    (apt / "unstable.sources").write_text(
        f"Types: deb\nURIs: {_mirror()}\nSuites: unstable\nComponents: main\n{signed}"
    )
    options = [
        f"Dir::State={apt}/state",
        "Dir::State::status=/dev/null",
        f"Dir::Cache={apt}/cache",
        f"Dir::Etc::sourcelist={apt}/unstable.sources",
        "Dir::Etc::sourceparts=-",
        "APT::Sandbox::User=",
    ]
    get = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    command([*get, "update"])
    # The headers depend on those of the C library, which the compiler takes from the machine. So
    # they are downloaded without their dependencies.
    command([*get, "install", "--yes", "--download-only", "--no-install-recommends",
             "libstdc++6", f"python{version}"])  # fmt: skip
    command([*get, "download", f"libpython{version}-dev"], cwd=apt / "packages")
    for package in [*apt.glob("cache/archives/*.deb"), *apt.glob("packages/*.deb")]:
        command(["dpkg-deb", "--extract", package, _DEBIAN])
    (libraries,) = {file.parent for file in _DEBIAN.glob("usr/lib/*/libc.so.6")}
    (loader,) = libraries.glob("ld-linux*.so.*")
    # The packages of a version that was unpacked before have just been unpacked again.
    for python in (_DEBIAN / "usr/bin" / f"python{other}" for other in VERSIONS):
        if python.exists():
            command([patchelf, "--set-interpreter", loader, "--force-rpath", "--set-rpath",
                     libraries, python])  # fmt: skip


def _mirror() -> str:
    """Return the address from which apt gets Debian's packages on this machine."""
    listed = command(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)/$(LABEL) $(REPO_URI)",
         "Created-By: Packages"]
    )  # fmt: skip
    for line in listed.splitlines():
        label, _, address = line.partition(" ")
        if label == "Debian/Debian":
            return address
    raise Missing("apt has no mirror of Debian with fetched lists: run `apt-get update` once")
