"""List of all settings: :data:`KEYS`, each with its default and its allowed values."""

from __future__ import annotations

import math
import operator
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from collective.contract.secret import Secret, parse

from . import rendezvous

__all__ = ["KEYS", "Key", "Value", "by_device", "is_address"]

_SIGNALS = frozenset(member.name for member in signal.Signals)
_HOST_AND_PORT = re.compile(r"[^/]+:[0-9]+")


Value = str | int | float | Secret


@dataclass(frozen=True, slots=True)
class Key:
    """Description of a setting.

    Attributes:
        default: value if no source gives one.
        allowed: the allowed values, in words for an error text.
        doc: purpose of the setting.
        parse: function that converts a source's value; raises ValueError or TypeError.
        hazard: function that returns why a value is dangerous, in words such as "loads code", or
            "" if it is not. A dangerous value is refused from a file that is not private or does
            not belong to the user.
        hidden: whether values of this setting are never shown.
    """

    default: str | int | float | None
    allowed: str
    doc: str
    parse: Callable[[Any], Value]
    hazard: Callable[[Any], str] = lambda value: ""
    hidden: bool = False


def by_device(backend: str) -> dict[str, str]:
    """Return the transports of ``"cpu:shm,cuda:nccl"`` by device; empty for a plain name."""
    if not backend.startswith(("cpu:", "cuda:")):
        return {}
    return dict(part.strip().partition(":")[::2] for part in backend.split(","))


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


def _check(value: Any) -> str:
    word, colon, interval = str(value).partition(":")
    if word not in ("auto", "always", "never", "results"):
        raise ValueError
    if colon and (word != "results" or int(interval) < 1):
        raise ValueError
    return str(value)


def _signal(value: Any) -> str:
    if value != "none" and (value in ("SIGKILL", "SIGSTOP") or value not in _SIGNALS):
        raise ValueError
    return str(value)


def _library(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip():
        raise TypeError
    path = os.path.expanduser(path.strip())
    # A name without a slash is one for the system's linker to find.
    return os.path.abspath(path) if "/" in path else path


def _directory(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip():
        raise TypeError
    return os.path.abspath(os.path.expanduser(path))


def is_address(store: str) -> bool:
    """Tell whether a value of ``store`` is meant as an address, and not as a directory.

    An address without its ``tcp://`` is one, too, and an error. As a directory it would be made on
    each host, and the ranks would wait there for each other.
    """
    return store.startswith("tcp:") or _HOST_AND_PORT.fullmatch(store) is not None


def _meeting_place(value: Any) -> str:
    if isinstance(value, str) and is_address(value):
        return f"tcp://{rendezvous.from_url(value)}"
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise TypeError
    return os.path.abspath(os.path.expanduser(path))


def _join(value: Any) -> str:
    return "late" if value == "late" else _switch(value)


def _switch(value: Any) -> str:
    if value in (True, "on", "1"):
        return "on"
    if value in (False, "off", "0"):
        return "off"
    raise ValueError


# -- hazards: values that only a private file of the user may set --------------------


def _loads_code(value: str) -> str:
    return "loads code"


def _writes_files(value: str) -> str:
    return "" if value.startswith("tcp:") else "writes files"


def _opens_the_job(value: object) -> str:
    return "decides who may join"


def _may_load_code(value: str) -> str:
    """Return the hazard of a transport given as ``module:Class``; "" for a registered name."""
    names = by_device(value).values() or [value]
    return "loads code" if any(":" in name for name in names) else ""


#: All settings, by name.
KEYS: Mapping[str, Key] = {
    "backend": Key(
        "auto",
        "the name of a transport, such as 'shm', or 'auto'",
        "the transport, or one for each device: 'cpu:shm,cuda:nccl'",
        _word,
        _may_load_code,
    ),
    "rank": Key(0, "an integer >= 0", "number of this process among all processes", _integer(0)),
    "size": Key(1, "an integer >= 1", "how many processes there are", _integer(1)),
    "local_rank": Key(
        None,
        "an integer >= 0",
        "number of this process among the processes of its host (default: rank)",
        _integer(0),
    ),
    "local_size": Key(
        None, "an integer >= 1", "how many processes run on its host (default: size)", _integer(1)
    ),
    "timeout": Key(300.0, "a number of seconds > 0", "deadline of every call", _seconds),
    "start_timeout": Key(
        60.0, "a number of seconds > 0", "how long init waits for all ranks to arrive", _seconds
    ),
    "shrink_grace": Key(
        5.0,
        "a number of seconds > 0",
        "how long shrink() waits for ranks that have not called it and are not known to be lost",
        _seconds,
    ),
    "min_ranks": Key(
        1,
        "an integer >= 1",
        "how many ranks must survive a loss for a communicator to shrink",
        _integer(1),
    ),
    "join": Key(
        "off",
        "'off', 'on' or 'late'",
        "whether this process joins ranks that are already connected: on, in init(); late, with "
        "the first grow(), as `collective run --replace` sets it for the replacement of a lost "
        "rank",
        _join,
    ),
    "grow": Key(
        "off",
        "'on' or 'off'",
        "whether elastic training checks at each commit for processes that want to join "
        "(`collective run --replace` sets it)",
        _switch,
    ),
    "restart": Key(
        0,
        "an integer >= 0",
        "how often `collective run --max-restarts` has started the ranks again",
        _integer(0),
    ),
    "check": Key(
        "auto",
        "'auto', 'always', 'never', 'results', or 'results:10' for every tenth call",
        "whether ranks compare their calls (auto: if the transport compares them cheaply) or their "
        "results",
        _check,
    ),
    "store": Key(
        None,
        "a directory, or an address such as 'tcp://node1:29500'",
        "where the ranks of one launch meet: a private directory that all ranks see and no other "
        "launch uses; or an address of the host of rank 0, with a port that is free there",
        _meeting_place,
        _writes_files,
    ),
    "store_server": Key(
        "rank",
        "'rank' or 'launcher'",
        "which process serves a store at an address: rank 0, or the launcher, as "
        "`collective run --hosts` sets it",
        _one_of("rank", "launcher"),
    ),
    "interface": Key(
        "",
        "the name of a network interface, such as 'eth0'",
        "the network interface for traffic between hosts (default: the one that routes to the "
        "other hosts)",
        _word,
    ),
    "across": Key(
        "auto",
        "the name of a transport, such as 'gloo', or 'auto'",
        "the transport between hosts under backend 'hierarchical' (auto: mpi under mpiexec, else "
        "gloo)",
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
        "where each rank writes a trace of its calls (default: no trace)",
        _directory,
        _writes_files,
    ),
    "shm_single_copy": Key(
        "on",
        "'on' or 'off'",
        "whether shm reads ordinary memory of its peers directly, if the system allows it",
        _one_of("on", "off"),
    ),
    "shm_adopt": Key(
        "on",
        "'on' or 'off'",
        "whether shm moves a framework's memory, such as DDP's buckets, into shared memory",
        _one_of("on", "off"),
    ),
    "native": Key(
        "on",
        "'on' or 'off'",
        "whether the native core is used if it has been built (see `collective doctor`)",
        _one_of("on", "off"),
    ),
    "device": Key(
        None,
        "an integer >= 0",
        "number of this rank's GPU, as this process counts GPUs (default: local_rank, modulo their "
        "number)",
        _integer(0),
    ),
    "nccl_library": Key(
        "",
        "a file such as '/opt/nccl/lib/libnccl.so.2'",
        "the NCCL library (default: the one in NVIDIA's wheel, or the system's)",
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
        "secret that only the ranks of this job know (`collective run` makes one)",
        parse,
        _opens_the_job,
        hidden=True,
    ),
    "secret_file": Key(
        "",
        "a file of mode 0600",
        "the file that holds the secret, if COLLECTIVE_SECRET is not set",
        _directory,
        _opens_the_job,
    ),
    "insecure": Key(
        "off",
        "'on' or 'off'",
        "whether to omit the warning if ranks of several hosts have no secret",
        _switch,
        _opens_the_job,
    ),
    **{
        f"tls_{kind}": Key("", "a PEM file", doc, _directory, _opens_the_job)
        for kind, doc in {
            "cert": "this host's certificate: with it, the hub and the store use TLS",
            "key": "the private key of tls_cert",
            "ca": "the certificate of the authority that signed the certificates of all hosts",
        }.items()
    },
}
