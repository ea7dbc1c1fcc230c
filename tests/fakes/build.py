"""Compilation of the ABI fake: once for each version of NCCL, kept in a folder of this user."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

_SOURCES = pathlib.Path(__file__).resolve().parent
# The fake's calls of its own functions must not go to a real NCCL whose symbols are global, as
# when CuPy has loaded it: hence -Bsymbolic-functions.
_FLAGS = (
    "-std=c11 -O2 -g -Wall -Wextra -Werror -fPIC -shared -pthread -fvisibility=hidden "
    "-Wl,-Bsymbolic-functions"
).split()


def compiler() -> list[str] | None:
    """Return the command of the C compiler, or None if there is no compiler."""
    named = os.environ.get("CC", "").split()
    if named:
        return named if shutil.which(named[0]) else None
    path = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    return [path] if path else None


def folder() -> pathlib.Path:
    """Return the folder of the compiled libraries, which is private to this user.

    Raises:
        PermissionError: another user made a folder of that name.
    """
    directory = pathlib.Path(tempfile.gettempdir()) / f"collective-fakes-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{directory} belongs to another user: set TMPDIR to a folder of your own"
        )
    return directory


@functools.cache
def build(version: int = 22907) -> pathlib.Path:
    """Return the path of the fake that claims to be this version of NCCL; compile it if needed.

    Of several processes that build at once, one compiles. The others wait for it, so that ranks of
    one test do not come to their meeting at different times.

    Args:
        version: code of the version, 22907 for 2.29.7 and 2708 for 2.7.8. The library lacks
            functions that the version does not have.

    Raises:
        RuntimeError: there is no C compiler, or the compiler fails.
    """
    command = compiler()
    if command is None:
        raise RuntimeError(
            "the ABI fake (tests/fakes): no C compiler; needs gcc, cc or clang, or $CC naming one: "
            "install gcc, e.g. apt-get install gcc libc6-dev"
        )
    sources = sorted(_SOURCES.glob("*.c"))
    key = hashlib.sha256(repr((version, command, _FLAGS)).encode())
    for source in [*sources, *sorted(_SOURCES.glob("*.h"))]:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    library = folder() / f"libfake-{version}-{key.hexdigest()[:16]}.so"
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(command, version, sources, library)
    return library


def _compile(
    command: list[str], version: int, sources: list[pathlib.Path], library: pathlib.Path
) -> None:
    descriptor, compiled = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    define = f"-DNCCL_FAKE_VERSION={version}"
    result = subprocess.run(
        [*command, *_FLAGS, define, "-o", compiled, *map(str, sources), "-lm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        os.unlink(compiled)
        raise RuntimeError(f"the ABI fake: {command[0]} failed:\n{result.stderr}")
    os.replace(compiled, library)
