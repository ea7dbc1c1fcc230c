"""Compile the ABI fake: once for a version of NCCL, kept in a folder of this user's own."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

_SOURCES = pathlib.Path(__file__).resolve().parent
# A real NCCL that somebody else loaded for all to see, as CuPy does, must not answer the fake's
# calls of its own functions: hence symbolic.
_FLAGS = (
    "-std=c11 -O2 -g -Wall -Wextra -Werror -fPIC -shared -pthread -fvisibility=hidden "
    "-Wl,-Bsymbolic-functions"
).split()


def compiler() -> list[str] | None:
    """Return the command of the C compiler, or None where there is none."""
    named = os.environ.get("CC", "").split()
    if named:
        return named if shutil.which(named[0]) else None
    found = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    return [found] if found else None


def folder() -> pathlib.Path:
    """Return the folder of what was compiled, private to this user.

    Raises:
        PermissionError: somebody else made a folder of that name.
    """
    kept = pathlib.Path(tempfile.gettempdir()) / f"collective-fakes-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    if kept.is_symlink() or kept.stat().st_uid != os.getuid():
        raise PermissionError(f"{kept} belongs to somebody else: set TMPDIR to a folder of yours")
    return kept


@functools.cache
def build(version: int = 22907) -> pathlib.Path:
    """Return the path of the shared library that says it is this version of NCCL.

    Several processes may build at once: each compiles to a name of its own and renames.

    Args:
        version: the code of the version, 22907 for 2.29.7 and 2708 for 2.7.8. Functions that
            it did not have are left out.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
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
    if not library.exists():
        descriptor, made = tempfile.mkstemp(suffix=".so", dir=library.parent)
        os.close(descriptor)
        define = f"-DNCCL_FAKE_VERSION={version}"
        done = subprocess.run(
            [*command, *_FLAGS, define, "-o", made, *map(str, sources), "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            os.unlink(made)
            raise RuntimeError(f"the ABI fake: {command[0]} failed:\n{done.stderr}")
        os.replace(made, library)
    return library
