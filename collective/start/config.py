"""Settings, and where each came from.

The strongest source that names a setting wins:

1. an argument (of ``collective.init`` or of a command),
2. the environment variable ``COLLECTIVE_<KEY>``; an empty one counts as unset,
3. ``collective.toml``, or the table ``[tool.collective]`` of ``pyproject.toml``: the
   nearest one that is believed, from the working directory up to the project's root or home
   (:mod:`collective.start.config_file`),
4. the launcher (``collective run``, torchrun, mpiexec, srun),
5. the default.

:data:`~.keys.KEYS` is the whole list. A name that is not on it is an error in each of the
first three, and in the environment every ``COLLECTIVE_…`` counts.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from collective.contract.secret import Secret
from collective.errors import ConfigError

from . import config_file
from .keys import KEYS, Value
from .launchers import Launched, detect
from .secret_file import read

__all__ = [
    "Config",
    "Setting",
    "load",
    "not_read",
    "secret_of",
    "settings",
]

_PREFIX = "COLLECTIVE_"
# All that says who this rank is.
_IDENTITY = ("rank", "size", "local_rank", "local_size")


class Setting(NamedTuple):
    """A value and its source."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one :func:`load`, as attributes; :data:`~.keys.KEYS` describes them.

    Attributes:
        launched: what the launcher of this process said, or None without one.
        refused: files of settings that were not believed, and why each was not.
    """

    backend: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    timeout: float
    start_timeout: float
    shrink_grace: float
    min_ranks: int
    join: str
    grow: str
    restart: int
    check: str
    store: str | None
    interface: str
    across: str
    dump_signal: str
    trace: str
    shm_single_copy: str
    shm_adopt: str
    native: str
    device: int | None
    nccl_library: str
    cuda_library: str
    secret: Secret | None
    secret_file: str
    insecure: str
    tls_cert: str
    tls_key: str
    tls_ca: str
    launched: Launched | None
    refused: Mapping[Path, str]
    _origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """Return where the value of ``key`` came from.

        Returns:
            ``"argument"``, ``"environment COLLECTIVE_TIMEOUT"``,
            ``"file /home/me/job/collective.toml"``, ``"launcher torchrun"``,
            ``"default"``.
        """
        return self._origins[key]

    def shown(self, key: str) -> str | int | float | None:
        """Return the value of ``key`` as it may be shown: a secret is ``"set"``."""
        value = getattr(self, key)
        return str(value) if KEYS[key].hidden and value is not None else value

    def resolved_secret(self) -> Secret | None:
        """Return the job's secret, from whichever setting gives it.

        Raises:
            ConfigError: a file that is named cannot be trusted.
        """
        names = ("secret", "secret_file")
        return secret_of({n: Setting(getattr(self, n), self.origin(n)) for n in names})

    def warn_of_refused(self) -> None:
        """Warn of each file that was not believed: once a host, and not once a rank.

        Warns:
            RuntimeWarning: there is such a file.
        """
        for path, reason in self.refused.items() if self.local_rank == 0 else ():
            warnings.warn(f"settings: {not_read(path, reason)}", RuntimeWarning, stacklevel=3)


def not_read(path: Path, reason: str) -> str:
    """Return what is to be said of a file that was not believed."""
    return (
        f"{path} is not read: {reason}. It must be the user's or root's, as its directory, and "
        "writable by nobody else: chown or chmod go-w them, or set COLLECTIVE_… variables."
    )


def load(arguments: Mapping[str, object]) -> Config:
    """Collect the settings of this process from all sources.

    Args:
        arguments: key to value; None means not given.

    Raises:
        ConfigError: a key is unknown, a value is not allowed, a file cannot be read, or
            rank and size contradict each other; says which source is to be corrected.
    """
    try:
        launched = detect(os.environ)
    except ConfigError:
        # Whoever has been told its whole place needs no launcher, which may have told others.
        if any(arguments.get(key) is None for key in _IDENTITY):
            raise
        launched = None
    file = config_file.find()
    found = settings(arguments, file)
    if launched is not None:
        origin = f"launcher {launched.launcher}"
        found.setdefault("rank", Setting(launched.rank, origin))
        found.setdefault("size", Setting(launched.size, origin))
        # The launcher's placement is that of the launcher's own ranks: a world of
        # another shape, arranged by hand within one process of it, is not placed so.
        if (found["rank"].value, found["size"].value) == (launched.rank, launched.size):
            found.setdefault("local_rank", Setting(launched.local_rank, origin))
            found.setdefault("local_size", Setting(launched.local_size, origin))
    for name, key in KEYS.items():
        found.setdefault(name, Setting(key.default, "default"))
    for local, of_all in (("local_rank", "rank"), ("local_size", "size")):
        if found[local].value is None:
            found[local] = Setting(found[of_all].value, "default")
    _check_place(found, "rank", "size")
    _check_place(found, "local_rank", "local_size")
    return Config(
        **{name: setting.value for name, setting in found.items()},
        launched=launched,
        refused=file.refused,
        _origins={name: setting.origin for name, setting in found.items()},
    )


def settings(
    arguments: Mapping[str, object], file: config_file.Found | None = None
) -> dict[str, Setting]:
    """Collect what arguments, environment and files say, each key from the strongest.

    This is :func:`load` without launchers and defaults.

    Args:
        arguments: as of :func:`load`.
        file: what :func:`.config_file.find` returned, if it has been asked.

    Raises:
        ConfigError: as :func:`load`.
    """
    file = file or config_file.find()
    sources = [
        {key: Setting(value, "argument") for key, value in arguments.items() if value is not None},
        {
            name[len(_PREFIX) :].lower(): Setting(value, f"environment {name}")
            for name, value in os.environ.items()
            if name.startswith(_PREFIX) and value
        },
    ]
    found: dict[str, Setting] = {}
    for source in sources:
        for name, setting in source.items():
            value = _parse(name, setting)  # also of a value that a stronger one hides
            found.setdefault(name, Setting(value, setting.origin))
    for name, value in file.table.items():
        setting = _of_file(name, value, file)
        value = _parse(name, setting)
        if name not in found:
            _refuse_hazard(name, value, file)
            found[name] = Setting(value, setting.origin)
    return found


def secret_of(found: Mapping[str, Setting]) -> Secret | None:
    """Return the secret that settings give, ``secret`` before ``secret_file``, or None.

    Raises:
        ConfigError: the file is missing, too short, or others can read it.
    """
    secret, file = found.get("secret"), found.get("secret_file")
    if secret is not None and secret.value is not None:
        value: Secret = secret.value
        return value
    return read(file.value, file.origin) if file is not None and file.value else None


def _variable(key: str) -> str:
    return _PREFIX + key.upper()


def _parse(name: str, setting: Setting) -> Value:
    key = KEYS.get(name)
    spelt: Callable[[str], str] = str
    written = name
    if setting.origin.startswith("environment "):
        spelt = _variable
        written = setting.origin.removeprefix("environment ")
    if key is None or written != spelt(name):  # one spelling: COLLECTIVE_timeout is another name
        near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{written} ({setting.origin}): no setting of that name; the nearest is "
            f"{spelt(near)}, all are {', '.join(map(spelt, sorted(KEYS)))}."
        )
    try:
        return key.parse(setting.value)
    except (TypeError, ValueError):
        value = "a value that is not shown" if key.hidden else repr(setting.value)
        raise ConfigError(
            f"{name}: {value} ({setting.origin}); it must be {key.allowed}."
        ) from None


def _of_file(key: str, value: Any, file: config_file.Found) -> Setting:
    assert file.path is not None
    if isinstance(value, str) and (
        (key == "store" and not value.startswith("tcp:"))
        or key in ("trace", "secret_file", "tls_cert", "tls_key", "tls_ca")
        or (key in ("nccl_library", "cuda_library") and "/" in value)
    ):
        value = file.path.parent / os.path.expanduser(value)  # relative to the file that says it
    return Setting(value, f"file {file.path}")


def _refuse_hazard(name: str, value: Any, file: config_file.Found) -> None:
    hazard = KEYS[name].hazard(value)
    if hazard and file.exposed:
        raise ConfigError(
            f"{name}: {value!r} (file {file.path}) {hazard}, which a file may ask for only if it "
            f"is the user's own and private; this one {file.exposed}. chmod 600 a file of yours, "
            f"or give it as an argument or as {_variable(name)}."
        )


def _check_place(found: Mapping[str, Setting], rank: str, size: str) -> None:
    if found[rank].value >= found[size].value:
        raise ConfigError(
            f"{rank}: {found[rank].value} ({found[rank].origin}) with {size} "
            f"{found[size].value} ({found[size].origin}); ranks go from 0 to {size} - 1. Give both."
        )
