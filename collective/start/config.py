"""Settings, each with its source.

Several sources can give a setting. The first one in this list wins:

1. An argument of ``collective.init`` or of a command.
2. The environment variable ``COLLECTIVE_<KEY>``. An empty variable counts as unset.
3. ``collective.toml``, or the table ``[tool.collective]`` of ``pyproject.toml``. This is the
   nearest trusted file, from the working directory up to the project's root or the home
   directory (:mod:`collective.start.config_file`).
4. The launcher (``collective run``, torchrun, mpiexec, srun).
5. The default.

:data:`~.keys.KEYS` lists all settings. An unknown name in one of the first three sources is an
error. In the environment this applies to every variable whose name begins with ``COLLECTIVE_``.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from collective import native
from collective.control.secret import Secret
from collective.errors import ConfigError

from . import config_file
from .keys import FORMER, KEYS, LAUNCH, Value, is_address
from .launchers import Launched, detect

_PREFIX = "COLLECTIVE_"
# Variable in which `collective run` tells its ranks what no user sets.
_LAUNCH = "COLLECTIVE_LAUNCH"
# Least likeness of two names, by difflib, for one to be a misspelling of the other.
_LIKENESS = 0.5
# The settings that identify this rank.
_IDENTITY = ("rank", "size", "local_rank", "local_size")


class Setting(NamedTuple):
    """Value of a setting, with its source."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one :func:`load`, as attributes.

    :data:`~.keys.KEYS` and :data:`~.keys.LAUNCH` describe them.

    Attributes:
        launched: the launcher's description of this process, or None without a launcher.
        refused: settings files that were not trusted, each with the reason.
        origins: where each value came from: ``"argument"``, ``"environment COLLECTIVE_TIMEOUT"``,
            ``"file /home/me/job/collective.toml"``, ``"launcher torchrun"`` or ``"default"``.
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
    check: str
    store: str | None
    interface: str
    port: str
    across: str
    trace: str
    disable: str
    device: int | None
    nccl_library: str
    cuda_library: str
    secret: Secret | str | None
    tls: str
    restart: int
    grow: str
    store_server: str
    launched: Launched | None
    refused: Mapping[Path, str]
    origins: Mapping[str, str]

    def shown(self, key: str) -> str | int | float | None:
        """Return the value of ``key`` for display: a secret is shown as ``"set"``."""
        value = getattr(self, key)
        return str(value) if KEYS[key].hidden and value is not None else value

    def name_libraries(self) -> None:
        """Apply the settings of libraries and of the native core to this whole process.

        Each library is loaded once in a process. The loaders read its path from the environment,
        since they also work without settings. The native core is switched off if the settings ask
        for it.
        """
        for key in ("cuda_library", "nccl_library"):
            if getattr(self, key):
                os.environ[_variable(key)] = getattr(self, key)
        if self.origins["disable"] != "default":
            native.switch("native" not in self.disable)

    def of_communicator(self) -> dict[str, Any]:
        """Return the settings that :func:`collective.connect` takes, except ``start_timeout``."""
        keys = "timeout", "check", "trace", "shrink_grace", "min_ranks"
        return {key: getattr(self, key) for key in keys}

    def shared(self) -> str:
        """Return what the ranks that these settings describe share, such as the name of a launch.

        Each of these ranks is one process. The result is empty if nothing tells them from others.
        """
        if self.store is None and self.launched is not None:
            numbers = self.launched.rank, self.launched.size
            return (self.launched.job or "") if numbers == (self.rank, self.size) else ""
        return self.store or ""

    def warn_of_refused(self) -> None:
        """Warn about each file that was not trusted, on one rank of each host.

        Warns:
            RuntimeWarning: a settings file was not trusted.
        """
        for path, reason in self.refused.items() if self.local_rank == 0 else ():
            warnings.warn(f"settings: {not_read(path, reason)}", RuntimeWarning, stacklevel=4)


def not_read(path: Path, reason: str) -> str:
    """Return the text of the warning about a settings file that was not trusted."""
    return (
        f"{path} is not read: {reason}. The file and its directory must belong to you or root, "
        "and nobody else may write to them. Use chown or chmod go-w, or set COLLECTIVE_… "
        "variables instead."
    )


def load(arguments: Mapping[str, object]) -> Config:
    """Collect the settings of this process from all sources.

    Args:
        arguments: values by key; None means not given.

    Raises:
        ConfigError: a key is unknown, a value is not allowed, a file cannot be read, or
            rank and size contradict each other. The text names the source to correct.
    """
    try:
        launched = detect(os.environ)
    except ConfigError:
        # If rank, size, local_rank and local_size are all given as arguments, the launcher's
        # variables are not needed. They may describe other processes.
        if any(arguments.get(key) is None for key in _IDENTITY):
            raise
        launched = None
    file = config_file.find()
    found = settings(arguments, file)
    if launched is not None:
        origin = f"launcher {launched.launcher}"
        found.setdefault("rank", Setting(launched.rank, origin))
        found.setdefault("size", Setting(launched.size, origin))
        # The launcher's local rank and local size describe its own ranks. They do not apply if a
        # process sets another rank and size by hand, to be part of a different world.
        if (found["rank"].value, found["size"].value) == (launched.rank, launched.size):
            found.setdefault("local_rank", Setting(launched.local_rank, origin))
            found.setdefault("local_size", Setting(launched.local_size, origin))
        elif found["size"].value == 1 < launched.size:
            # A child of a rank that is alone inherits the variables of `collective run`.
            for local in ("local_rank", "local_size", "store"):
                if local in found and found[local].origin == f"environment {_variable(local)}":
                    del found[local]
    found.update(_of_launch(os.environ.get(_LAUNCH, "")))
    defaults = {name: key.default for name, key in KEYS.items()}
    defaults.update((name, default) for name, (default, _) in LAUNCH.items())
    for name, default in defaults.items():
        found.setdefault(name, Setting(default, "default"))
    for local, of_all in (("local_rank", "rank"), ("local_size", "size")):
        if found[local].value is None:
            found[local] = Setting(found[of_all].value, "default")
    _check_place(found, "rank", "size")
    _check_place(found, "local_rank", "local_size")
    return Config(
        **{name: setting.value for name, setting in found.items()},
        launched=launched,
        refused=file.refused,
        origins={name: setting.origin for name, setting in found.items()},
    )


def settings(
    arguments: Mapping[str, object], file: config_file.Found | None = None
) -> dict[str, Setting]:
    """Collect settings from arguments, environment and file; for each key the first source wins.

    This is :func:`load` without launchers and defaults.

    Args:
        arguments: as in :func:`load`.
        file: result of :func:`.config_file.find`, or None to call it.

    Raises:
        ConfigError: as in :func:`load`.
    """
    file = file or config_file.find()
    sources = [
        {key: Setting(value, "argument") for key, value in arguments.items() if value is not None},
        {
            name[len(_PREFIX) :].lower(): Setting(value, f"environment {name}")
            for name, value in os.environ.items()
            if name.startswith(_PREFIX) and name != _LAUNCH and value
        },
    ]
    found: dict[str, Setting] = {}
    for source in sources:
        for name, setting in source.items():
            value = _parse(name, setting)  # a wrong value is an error even if another source wins
            found.setdefault(name, Setting(value, setting.origin))
    for name, value in file.table.items():
        setting = _of_file(name, value, file)
        value = _parse(name, setting)
        if name not in found:
            _refuse_hazard(name, value, file)
            found[name] = Setting(value, setting.origin)
    return found


def _variable(key: str) -> str:
    return _PREFIX + key.upper()


def _of_launch(text: str) -> dict[str, Setting]:
    """Return the settings in the variable of the launcher, such as ``restart=2,grow=on``."""
    origin = f"environment {_LAUNCH}"
    try:
        parts = dict(part.split("=") for part in text.split(",") if part)
        return {name: Setting(LAUNCH[name][1](parts[name]), origin) for name in parts}
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{_LAUNCH}: {text!r} ({origin}); only `collective run` sets this variable. Unset it."
        ) from None


def _parse(name: str, setting: Setting) -> Value:
    key = KEYS.get(name)
    spelt: Callable[[str], str] = str
    written = name
    if setting.origin.startswith("environment "):
        spelt = _variable
        written = setting.origin.removeprefix("environment ")
    if key is None or written != spelt(name):  # COLLECTIVE_timeout is not COLLECTIVE_TIMEOUT
        if name in FORMER:
            raise ConfigError(f"{written} ({setting.origin}): this is now {FORMER[name]}.")
        near = difflib.get_close_matches(name, KEYS, n=1, cutoff=_LIKENESS)
        nearest = f"; the nearest is {spelt(near[0])}" if near else ""
        raise ConfigError(
            f"{written} ({setting.origin}): there is no setting of this name{nearest}. "
            "`collective config` lists all settings."
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
    if key == "secret" and isinstance(value, str) and value.startswith("file:"):
        value = f"file:{file.path.parent / os.path.expanduser(value.removeprefix('file:'))}"
    if isinstance(value, str) and (
        (key == "store" and not is_address(value))
        or key in ("trace", "tls")
        or (key in ("nccl_library", "cuda_library") and "/" in value)
    ):
        value = file.path.parent / os.path.expanduser(value)  # relative to the settings file
    return Setting(value, f"file {file.path}")


def _refuse_hazard(name: str, value: Any, file: config_file.Found) -> None:
    hazard = KEYS[name].hazard(value)
    if hazard and file.exposed:
        raise ConfigError(
            f"{name}: {value!r} (file {file.path}) {hazard}. Only a file that belongs to you, "
            f"with mode 0600, may set this; this one {file.exposed}. Use chmod 600 on a file of "
            f"yours, or give the value as an argument or as {_variable(name)}."
        )


def _check_place(found: Mapping[str, Setting], rank: str, size: str) -> None:
    if found[rank].value >= found[size].value:
        raise ConfigError(
            f"{rank}: {found[rank].value} ({found[rank].origin}) with {size} "
            f"{found[size].value} ({found[size].origin}); {rank} must be from 0 to {size} - 1. "
            "Set both."
        )
