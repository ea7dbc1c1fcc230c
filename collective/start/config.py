"""Settings, and where each came from.

The strongest source that names a setting wins:

1. an argument (of ``collective.init`` or of a command),
2. the environment variable ``COLLECTIVE_<KEY>``; an empty one counts as unset,
3. ``collective.toml``, or the table ``[tool.collective]`` of ``pyproject.toml``: the
   nearest one that is believed, from the working directory up to the project's root or home
   (:mod:`collective.start.config_file`),
4. the launcher (``collective run``, torchrun, mpiexec, srun),
5. the default.

:data:`KEYS` is the whole list. A name that is not on it is an error in each of the
first three, and in the environment every ``COLLECTIVE_…`` counts.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from collective.contract.secret import Secret, parse
from collective.errors import ConfigError

from . import config_file, rendezvous
from .launchers import Launched, detect
from .secret_file import read

__all__ = [
    "KEYS",
    "Config",
    "Key",
    "Setting",
    "by_device",
    "load",
    "not_read",
    "secret_of",
    "settings",
]

_PREFIX = "COLLECTIVE_"
# All that says who this rank is.
_IDENTITY = ("rank", "size", "local_rank", "local_size")
_SIGNALS = frozenset(each.name for each in signal.Signals)


Value = str | int | float | Secret


@dataclass(frozen=True, slots=True)
class Key:
    """One setting that exists.

    Attributes:
        default: its value where no source names it.
        allowed: the values it takes, in words for an error text.
        doc: what it is for.
        parse: turns what a source says into the value; raises ValueError or TypeError.
        hazard: what a value makes this process do that not every file may ask for, in words,
            or "". A file that is not the user's own and private cannot set such a value.
        hidden: whether its values are shown to nobody.
    """

    default: str | int | float | None
    allowed: str
    doc: str
    parse: Callable[[Any], Value]
    hazard: Callable[[Any], str] = lambda value: ""
    hidden: bool = False


class Setting(NamedTuple):
    """A value and its source."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one :func:`load`, as attributes; :data:`KEYS` describes them.

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
    found = _settings(arguments, file)
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


def settings(arguments: Mapping[str, object]) -> dict[str, Setting]:
    """Collect what arguments, environment and files say, each key from the strongest.

    This is :func:`load` without launchers and defaults.

    Raises:
        ConfigError: as :func:`load`.
    """
    return _settings(arguments, config_file.find())


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


def _settings(arguments: Mapping[str, object], file: config_file.Found) -> dict[str, Setting]:
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


def by_device(backend: str) -> dict[str, str]:
    """Return what ``"cpu:shm,cuda:nccl"`` names for each device, nothing for a plain name."""
    if not backend.startswith(("cpu:", "cuda:")):
        return {}
    return dict(part.strip().partition(":")[::2] for part in backend.split(","))


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


# -- values ------------------------------------------------------------------------


def _integer(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(value)
        if number < least:
            raise ValueError
        return number

    return parse


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, Real)):
        raise TypeError
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError
    return seconds


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    if not value.strip():
        raise ValueError
    return value.strip()


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return parse


def _signal(value: Any) -> str:
    if value != "none" and (value in ("SIGKILL", "SIGSTOP") or value not in _SIGNALS):
        raise ValueError
    return str(value)


def _library(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip():
        raise TypeError
    path = os.path.expanduser(path.strip())
    # Without a slash it is a name that the system's linker knows.
    return os.path.abspath(path) if "/" in path else path


def _directory(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip():
        raise TypeError
    return os.path.abspath(os.path.expanduser(path))


def _meeting_place(value: Any) -> str:
    if isinstance(value, str) and value.startswith("tcp:"):
        return f"tcp://{rendezvous.from_url(value)}"
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise TypeError
    return os.path.abspath(os.path.expanduser(path))


def _switch(value: Any) -> str:
    if value in (True, "on", "1"):
        return "on"
    if value in (False, "off", "0"):
        return "off"
    raise ValueError


# -- what not every file may ask for ------------------------------------------------


def _loads_code(value: str) -> str:
    return "loads code"


def _writes_files(value: str) -> str:
    return "" if value.startswith("tcp:") else "writes files"


def _opens_the_job(value: object) -> str:
    return "decides who may join"


def _may_load_code(value: str) -> str:
    """Tell a transport at ``module:Class`` from one that is known by its name."""
    names = by_device(value).values() or [value]
    return "loads code" if any(":" in name for name in names) else ""


#: Every setting there is.
KEYS: Mapping[str, Key] = {
    "backend": Key(
        "auto",
        "the name of a transport, such as 'shm', or 'auto'",
        "the transport, or one a device: 'cpu:shm,cuda:nccl'",
        _word,
        _may_load_code,
    ),
    "rank": Key(0, "an integer >= 0", "this process among all", _integer(0)),
    "size": Key(1, "an integer >= 1", "how many processes there are", _integer(1)),
    "local_rank": Key(
        None, "an integer >= 0", "this process among those of its host (default: rank)", _integer(0)
    ),
    "local_size": Key(
        None, "an integer >= 1", "how many processes its host has (default: size)", _integer(1)
    ),
    "timeout": Key(300.0, "a number of seconds > 0", "deadline of every call", _seconds),
    "start_timeout": Key(
        60.0, "a number of seconds > 0", "how long init waits for all ranks to arrive", _seconds
    ),
    "check": Key(
        "auto",
        "'auto', 'always' or 'never'",
        "whether ranks compare their calls (auto: where the transport does so cheaply)",
        _one_of("auto", "always", "never"),
    ),
    "store": Key(
        None,
        "a directory, or an address such as 'tcp://node1:29500'",
        "where the ranks of one launch meet: a directory that is private, seen by all and used by "
        "no other launch; or an address of the host of rank 0 with a port that is free there",
        _meeting_place,
        _writes_files,
    ),
    "interface": Key(
        "",
        "the name of a network interface, such as 'eth0'",
        "the network interface for traffic between hosts (default: the one on the way to the "
        "other hosts)",
        _word,
    ),
    "across": Key(
        "auto",
        "the name of a transport, such as 'gloo', or 'auto'",
        "what connects the hosts under backend 'hierarchical' (auto: mpi under mpiexec, or gloo)",
        _word,
        _may_load_code,
    ),
    "dump_signal": Key(
        "SIGUSR2",
        "the name of a signal, such as 'SIGUSR2', or 'none'",
        "the signal on which a process prints its flight recorder",
        _signal,
    ),
    "trace": Key(
        "",
        "a directory that every rank can write to",
        "where each rank writes a trace of its calls (default: none is written)",
        _directory,
        _writes_files,
    ),
    "shm_single_copy": Key(
        "on",
        "'on' or 'off'",
        "whether shm reads peers' ordinary memory where the system allows it",
        _one_of("on", "off"),
    ),
    "shm_adopt": Key(
        "on",
        "'on' or 'off'",
        "whether shm moves a framework's memory, such as DDP's buckets, to where peers map it",
        _one_of("on", "off"),
    ),
    "native": Key(
        "on",
        "'on' or 'off'",
        "whether the native core is used where it has been built (`collective doctor` says)",
        _one_of("on", "off"),
    ),
    "device": Key(
        None,
        "an integer >= 0",
        "the GPU of this rank, by its number in this process (default: local_rank, in turn)",
        _integer(0),
    ),
    "nccl_library": Key(
        "",
        "a file such as '/opt/nccl/lib/libnccl.so.2'",
        "the NCCL library (default: that of NVIDIA's wheel, or the system's)",
        _library,
        _loads_code,
    ),
    "cuda_library": Key(
        "",
        "a file such as '/usr/lib/libcuda.so.1'",
        "the library of NVIDIA's driver (default: the system's)",
        _library,
        _loads_code,
    ),
    "secret": Key(
        None,
        "at least 16 bytes, such as the text that `openssl rand -hex 32` prints",
        "what the ranks of this job know and nobody else (`collective run` makes one)",
        parse,
        _opens_the_job,
        hidden=True,
    ),
    "secret_file": Key(
        "",
        "a file of mode 0600",
        "the file that holds the secret, where COLLECTIVE_SECRET is not set",
        _directory,
        _opens_the_job,
    ),
    "insecure": Key(
        "off",
        "'on' or 'off'",
        "whether ranks of several hosts may do without a secret unwarned",
        _switch,
        _opens_the_job,
    ),
    **{
        f"tls_{kind}": Key("", "a PEM file", doc, _directory, _opens_the_job)
        for kind, doc in {
            "cert": "this host's certificate: with it the hub and the store speak TLS",
            "key": "the key of that certificate",
            "ca": "the certificate that has signed those of all hosts",
        }.items()
    },
}
