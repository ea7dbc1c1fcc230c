"""The problems of an environment, from the facts of ``collective doctor``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from collective.inner import install, not_read

from .mpi import mates, starter_for

#: First and last release of PyTorch that were tested, as in the extra ``torch``.
TORCH = (2, 5), (2, 15)

# Launcher -> vendor of the mpiexec that sets its variables.
_STARTED_BY = {"mpich": "MPICH", "intelmpi": "Intel MPI", "openmpi": "Open MPI"}


def problems(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the problems, gravest first: ``problem``, ``remedy``, and whether it is ``fatal``."""
    if report["settings"]["error"]:
        yield _problem(report["settings"]["error"], fatal=True)
    if report["across_hosts"]["error"]:
        yield _problem(report["across_hosts"]["error"], fatal=True)
    for path, reason in report["settings"]["refused"].items():
        yield _problem(not_read(Path(path), reason))
    for choice_ in report["choices"][:1]:
        transport = report["transports"].get(choice_["backend"])
        if transport is None:
            yield _problem(choice_["reason"], fatal=True)
        elif transport["works"] is False:
            yield _problem(
                f"a program started here and now takes {choice_['backend']}, which does not work",
                transport["fix"],
                fatal=True,
            )
    for name, transport in report["transports"].items():
        trial = transport.get("trial", {"passed": True})
        if trial["passed"] is False:
            yield _problem(f"{name}: two ranks failed: {trial['error']}", fatal=True)
        elif trial["passed"] is None:
            yield _problem(f"{name}: the trial of two ranks tells nothing: {trial['error']}")
    busy = report["processors"]["busy"]
    if busy:
        yield _problem(
            f"{busy}. Times are too long, and an answer that is late says nothing about a library",
            "collective doctor, again, once the machine is idle",
        )
    for package, found in report["packages"].items():
        if found["late"] and busy:
            yield _problem(f"importing {package}: {found['error']}, on a busy machine")
        elif found["late"]:
            yield _problem(
                f"importing {package}: {found['error']}; programs that use it may work nevertheless"
            )
        elif found["error"]:
            yield _problem(
                f"{package} is installed but cannot be imported: {found['error']}",
                install.anew(found["distribution"] or package),
            )
    yield from _problems_of_torch(report)
    yield from _problems_of_nccl(report)
    yield from _problems_of_mpi(report)
    yield from _problems_of_names(report)
    if report["shared_memory"]["directory_error"]:
        yield _problem(report["shared_memory"]["directory_error"])


def _problem(problem: str, remedy: str = "", fatal: bool = False) -> dict[str, Any]:
    return {"problem": problem, "remedy": remedy, "fatal": fatal}


def _problems_of_torch(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    version = report["packages"].get("torch", {}).get("version", "")
    release = re.match(r"(\d+)\.(\d+)", version)
    first, last = TORCH
    if release and not first <= (int(release[1]), int(release[2])) <= last:
        tested = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        yield _problem(
            f"torch {version} was not tested with this package, {tested} were: the process group "
            "for torch.distributed and the transport gloo depend on parts of PyTorch that change",
            f"pip install 'torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}'",
        )


def _problems_of_nccl(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    gpus, nccl = report["gpus"]["devices"], report["nccl"]
    transport = report["transports"].get("nccl", {})
    if gpus and nccl["error"]:
        number = f"{len(gpus)} GPUs are" if len(gpus) > 1 else "a GPU is"
        yield _problem(
            f"{number} here, but no NCCL: arrays in GPU memory are copied through host memory",
            nccl["install"],
        )
    elif gpus and transport.get("works") is False:
        yield _problem(f"NCCL is installed but does not work: {transport['reason']}")


def _problems_of_mpi(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    mpi, launcher = report["mpi"], report["settings"]["launcher"]
    vendor = mpi["library"].get("vendor", "")
    if not vendor:
        return
    here = report["choices"][0]["backend"] if report["choices"] else ""
    typed = next((one for one in mpi["mpiexec"] if one["on_path"]), None)
    right = starter_for(vendor, mpi["mpiexec"])
    if launcher and not mates(vendor, _STARTED_BY.get(launcher["launcher"], vendor)):
        yield _problem(
            f"this process was started by mpiexec of {_STARTED_BY[launcher['launcher']]}, and "
            f"mpi4py has {vendor}: its ranks would not find each other",
            fatal=here in ("mpi", "hierarchical"),
        )
    if typed and typed["vendor"] and not mates(vendor, typed["vendor"]):
        yield _problem(
            f"mpiexec on PATH, {typed['path']}, is of {typed['vendor']}, and mpi4py has {vendor}: "
            "ranks that it starts would not find each other",
            f"start them with {right['path']}" if right else f"install mpiexec of {vendor}",
        )
    elif not right:
        yield _problem(
            f"no mpiexec of {vendor} is on PATH or beside the library; `mpi` works where "
            "something else starts the ranks, such as srun"
        )


def _problems_of_names(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    network = report["network"]
    if network["address_error"]:
        yield _problem(network["address_error"])
    name, address = network["name"], network["address"]
    if network["error"]:
        fault = f"does not resolve: {network['error']}"
    elif network["loopback"]:
        fault = f"resolves to {', '.join(network['addresses'])}, which is each host's own address"
    else:
        return
    instead = f"name this host by {address}, as in MASTER_ADDR={address}, or " if address else ""
    yield _problem(
        f"for several hosts: the name of this host, {name!r}, {fault}",
        f"{instead}give the name its address in /etc/hosts or the name service",
    )
