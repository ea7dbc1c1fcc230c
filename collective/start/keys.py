"""The settings that there are: :data:`KEYS`, each with its default and what it takes."""

from __future__ import annotations

import math
import operator
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from collective.contract.secret import Secret, parse

from . import rendezvous

__all__ = ["KEYS", "Key", "Value", "by_device"]

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


def by_device(backend: str) -> dict[str, str]:
    """Return what ``"cpu:shm,cuda:nccl"`` names for each device, nothing for a plain name."""
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


def _join(value: Any) -> str:
    return "late" if value == "late" else _switch(value)


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
    "shrink_grace": Key(
        5.0,
        "a number of seconds > 0",
        "how long shrink() waits for ranks that are neither there nor known to be lost",
        _seconds,
    ),
    "min_ranks": Key(
        1,
        "an integer >= 1",
        "how many ranks have to be left for a communicator to shrink when some are lost",
        _integer(1),
    ),
    "join": Key(
        "off",
        "'off', 'on' or 'late'",
        "whether this process joins ranks that are connected: on, in init(); late, with the first "
        "grow(), as `collective run --replace` asks of one that stands in for a lost rank",
        _join,
    ),
    "grow": Key(
        "off",
        "'on' or 'off'",
        "whether elastic training looks for processes that want to join, at each commit "
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
