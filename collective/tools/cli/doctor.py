"""``collective doctor``: what works here, why the rest does not, and the transport of auto."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from collective import ConfigError, RendezvousError
from collective.inner import HostSlots, platform
from collective.tools.show import Progress, painted, size_name, time_name

from .run import add_hosts, hosts_of

_EPILOG = """\
exit code: 1 if a program that starts here and now would not work (because a setting is wrong or
its transport does not work), or if a trial fails; else 0, also if the report names other problems.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what works here, why the rest does not, and what auto takes",
        description="Show which transports work on this machine and in this environment, why "
        "the others do not and how to mend that, and which transport 'auto' takes. Under a "
        "launcher, the first rank of each host reports. With --hosts, connect to these hosts as "
        "`collective run --hosts` does, and test whether each reaches all others.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="let two ranks on this machine try each transport that works",
    )
    add_hosts(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Print the report; return the exit code."""
    if hosts := hosts_of(options):
        return _examine_hosts(hosts, options)
    # Imported here: the module imports NumPy and the transports.
    from collective.tools.doctor import examine, is_spokesman

    if not is_spokesman():
        return 0
    progress = Progress()
    report = examine(options.test, lambda text: progress.show(f"{text} ..."))
    progress.clear()
    print(json.dumps(report, indent=2) if options.json else text(report, _width()))
    code: int = report["exit_code"]
    return code


def _examine_hosts(hosts: Sequence[HostSlots], options: argparse.Namespace) -> int:
    """Print what each host has, and whether the hosts reach each other; return the exit code."""
    # Imported here: the module imports NumPy.
    from collective.launch.hosts.launching import check_hosts

    found, error = [], ""
    try:
        found = check_hosts(hosts, shlex.split(options.ssh))
    except (ConfigError, RendezvousError) as problem:
        error = str(problem)
    if options.json:
        print(json.dumps({"hosts": found, "error": error, "exit_code": int(bool(error))}, indent=2))
    elif error:
        print(f"collective doctor: {error}", file=sys.stderr)
    else:
        facts = (
            "{interface} {address}; Python {python}, collective {version}, NumPy {numpy}, "
            "{cores} cores"
        )
        rows = [(host["name"], facts.format_map(host)) for host in found]
        print("Hosts", *_aligned(rows, _width()), sep="\n")
        together = "reaches all others" if len(found) > 1 else "is ready"
        print(f"\nEach of the {len(found)} hosts {together}.")
    return int(bool(error))


def _width() -> int:
    return max(60, min(100, shutil.get_terminal_size().columns))


# -- as text ------------------------------------------------------------------------------------


def text(report: dict[str, Any], width: int = 80) -> str:
    """Return the report as text of lines up to ``width``, the most important facts first."""
    about, host = report["collective"], report["network"]["name"]
    headline = textwrap.wrap(_headline(report), width)
    parts = [f"collective {about['version']} on {host}", *headline, ""]
    sections: list[tuple[str, Iterable[tuple[str, str]]]] = [
        ("Transports", _transports(report)),
        ("What a program takes", _choices(report)),
        ("Attention", _problems(report)),
        ("Host", _host(report)),
        ("MPI", _mpi(report)),
        ("NCCL", _nccl(report)),
        ("Network", _network(report)),
        ("Across hosts", _across_hosts(report["across_hosts"])),
        ("Versions", _versions(report)),
        ("Settings", _settings(report)),
    ]
    for title, rows in sections:
        rows = list(rows)
        if rows:
            shown = _aligned(rows, width)
            if title == "Transports":
                shown = [_VERDICT.sub(_in_colour, line) for line in shown]
            parts += [painted(title), *shown, ""]
    return "\n".join(parts[:-1])


# What a line says of a transport, and the colours: green, and red.
_VERDICT = re.compile(r"^(  \S+ +)(works|FAILS|no)\b")
_STYLES = {"works": "32", "FAILS": "31", "no": "31"}


def _in_colour(line: re.Match[str]) -> str:
    return line[1] + painted(line[2], _STYLES[line[2]])


def _aligned(rows: list[tuple[str, str]], width: int) -> list[str]:
    column = 4 + max(len(label) for label, _ in rows)
    lines = []
    for label, text in rows:
        # Each line of a text begins a new line of the report.
        for number, line in enumerate(text.splitlines() or ["-"]):
            lines += textwrap.wrap(
                line,
                width,
                initial_indent=f"  {label if number == 0 else '':<{column - 2}}",
                subsequent_indent=" " * column,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


def _headline(report: dict[str, Any]) -> str:
    if not report["choices"]:
        return "A setting is wrong."
    here = report["choices"][0]["backend"]
    transport = report["transports"].get(here)
    if transport is None:
        return "No transport for a program started here."
    if transport["works"] is False:
        return f"A program started here takes {here}, which does not work."
    if report["settings"]["launcher"]:
        return f"The ranks of this launch take {here}."
    taken = {choice["when"]: choice["backend"] for choice in report["choices"]}
    alone = taken["collective run"] or "not available"
    apart = taken["torchrun, 2 hosts of 2"] or "not available"
    return f"One host: {alone}. Several hosts: {apart}."


def _transports(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    order = {True: 0, None: 1, False: 2}
    for name, transport in sorted(report["transports"].items(), key=lambda i: order[i[1]["works"]]):
        yield name, _transport(transport)


def _transport(transport: dict[str, Any]) -> str:
    trial = transport.get("trial")
    if trial and trial["passed"] is None:
        return f"works; with two ranks not known: {trial['error']}"
    if trial and not trial["passed"]:
        return f"FAILS with two ranks: {trial['error']}"
    if trial:
        return (
            f"works; two ranks all-reduce {trial['small_bytes']} B in "
            f"{time_name(trial['latency_s'])}, {size_name(trial['large_bytes'])} at "
            f"{trial['bandwidth'] / 1e9:.2g} GB/s"
        )
    if transport["works"]:
        return "works"
    state = "no: " if transport["works"] is False else "not known: "
    fix = f"\n> {transport['fix']}" if transport["fix"] else ""
    return f"{state}{transport['reason']}{fix}"


def _choices(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    texts = {}
    for choice in report["choices"]:
        broken = report["transports"].get(choice["backend"], {}).get("works") is False
        taken = f"{choice['backend'] or 'no transport'}{', which does not work here' * broken}"
        texts[choice["when"]] = f"{taken}: {choice['reason']}"
    if len(set(texts.values())) == 1:
        texts = {"always": next(iter(texts.values()))}
    yield from texts.items()


def _problems(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for problem in report["problems"]:
        remedy = f"\n> {problem['remedy']}" if problem["remedy"] else ""
        yield "!" if problem["fatal"] else "-", f"{problem['problem']}{remedy}"


def _host(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    cores, memory = report["processors"], report["shared_memory"]
    yield "system", report["collective"]["system"]
    quota = f", limited to the time of {cores['quota']:.3g}" if cores["quota"] else ""
    others = ""
    if cores["others"] is not None:
        others = f"; other processes take {cores['others']:.1f}"
    yield "cores", f"{cores['usable']} of {cores['online']} may be used{quota}{others}"
    yield "topology", "\n".join(_topology(cores))
    limit = f"; this container {size_name(memory['limit'])}, {size_name(memory['left'])} of it free"
    yield (
        "memory",
        f"{size_name(memory['memory'])}, {size_name(memory['available'])} free"
        + (limit if memory["limit"] is not None else ""),
    )
    yield (
        "shared memory",
        f"{'memfd' if memory['memfd'] else 'files in ' + memory['directory']}; peers' arrays "
        f"{'are read with one copy' if memory['single_copy'] else 'take one copy more'}; "
        f"{size_name(memory['ranks_bytes'])} for {memory['ranks']} ranks",
    )
    if memory["dev_shm"] is not None:
        yield (
            str(platform.SHARED_MEMORY),
            f"{size_name(memory['dev_shm'])}, {size_name(memory['dev_shm_free'])} free "
            "(not used by shm; MPI and PyTorch do)",
        )
    yield "native core", report["collective"]["native"]
    gpus = report["gpus"]
    names = [f"{gpu['name']}, {size_name(gpu['memory_bytes'])}" for gpu in gpus["devices"]]
    for count, name in ((names.count(name), name) for name in dict.fromkeys(names)):
        driver = f"driver {gpus['driver']}, " if gpus["driver"] else ""
        yield "GPU", f"{count} × {name}; {driver}CUDA up to {gpus['cuda']}"
    if not names:
        told = gpus["reason"] == report["transports"].get("nccl", {}).get("reason")
        yield "GPU", "none; see nccl above" if told else f"none: {gpus['reason']}"


def _topology(found: dict[str, Any]) -> Iterable[str]:
    """Yield the lines about sockets, nodes and cores."""
    nodes = found["nodes"]
    if found["cores"] is None:
        yield "not known: this system does not show it"
    else:
        yield ", ".join(
            f"{count} {word}{'s' * (count > 1)}"
            for count, word in (
                (found["sockets"], "socket"), (len(nodes), "NUMA node"), (found["cores"], "core"),
                (found["threads"], "thread"),
            )
        ) + " each"  # fmt: skip
    for node in nodes:
        usable = node["usable"]
        if usable and (len(nodes) > 1 or usable != node["processors"]):
            yield f"node {node['node']}: {usable} of {node['processors']} may be used"


def _mpi(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    mpi = report["mpi"]
    library = mpi["library"]
    if library:
        aware = "CUDA-aware" if library["cuda_aware"] else "not CUDA-aware"
        level = f", thread level {library['thread_level']}" if library["thread_level"] else ""
        yield (
            "library",
            f"{library['vendor']} {library['version']}, MPI {library['standard']}{level}, {aware}"
            f"\n{library['path']}",
        )
    elif not mpi["error"].endswith(report["transports"]["mpi"]["reason"]):
        yield "library", f"none: {mpi['error']}"  # otherwise the row of the transport says it
    for one in mpi["mpiexec"]:
        who = f"{one['vendor']} {one['version']}" if one["vendor"] else one["error"]
        yield "mpiexec", f"{who}{'' if one['on_path'] else ', not on PATH'}\n{one['path']}"


def _nccl(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    nccl = report["nccl"]
    if nccl["error"]:
        why = nccl["error"].removeprefix("nccl: ")
        if report["gpus"]["devices"]:
            yield "library", f"none: {why}"
        return
    yield "library", f"{nccl['version']}\n{nccl['path']}"
    for label, wanted in (("has", True), ("lacks", False)):
        names = [name for name, there in nccl["features"].items() if there is wanted]
        if names:
            yield label, ", ".join(names)


def _network(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    network = report["network"]
    stands_for = ", ".join(network["addresses"]) or network["error"]
    yield "host name", f"{network['name']} ({stands_for})"
    yield "used across hosts", network["address"] or "none; see Attention"
    for one in network["interfaces"]:
        if one["addresses"]:
            yield one["name"], ", ".join(one["addresses"]) + ("" if one["up"] else " (down)")


def _across_hosts(found: dict[str, Any]) -> Iterable[tuple[str, str]]:
    rows: dict[str, list[str]] = {}
    for what, label in (("joining", "joining"), ("control", "control"), ("data", "data over tcp")):
        known, encrypted = found[what]["authenticated"], found[what]["encrypted"]
        # TLS also authenticates each byte that follows.
        when = " when connections are made" if known and what == "data" and not encrypted else ""
        text = (
            f"{'' if known else 'not '}authenticated{when}, {'' if encrypted else 'not '}encrypted"
        )
        rows.setdefault(text, []).append(label)
    for text, labels in rows.items():
        yield ", ".join(labels), text


def _versions(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    about = report["collective"]
    yield "Python", f"{about['python']}, {about['executable']}"
    yield "NumPy", about["numpy"]
    for name, found in report["packages"].items():
        broken = ", slow to import" if found["late"] else ", cannot be imported"
        broken *= bool(found["error"])
        through = f"; works through {found['through']}" if found.get("through") else ""
        yield name, f"{found['version'] or 'installed'}{broken}{through}"


def _settings(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    settings = report["settings"]
    launcher = settings["launcher"]
    if settings["error"]:
        return
    yield (
        "launcher",
        f"{launcher['launcher']}: rank {launcher['rank']} of {launcher['size']}" if launcher
        else "none",
    )  # fmt: skip
    defaults = []
    for key, found in settings["values"].items():
        value = "-" if found["value"] in (None, "") else found["value"]
        if found["origin"] == "default":
            defaults.append(f"{key} {value}")
        else:
            yield key, f"{value} ({found['origin']})"
    if defaults:
        yield "default", ", ".join(defaults)
