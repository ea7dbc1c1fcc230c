"""Compare the transports between hosts with PyTorch's Gloo and MPI, all over TCP, as root.

::

    python benchmarks/between_hosts.py                  # on loopback, then between two namespaces
    python benchmarks/between_hosts.py --namespaces 2 --ranks 4 --operations all_reduce --quick
    python benchmarks/between_hosts.py --plugin --against torch   # also torch.distributed over tcp
    python benchmarks/between_hosts.py --tls --namespaces 2       # also tcp with certificates
    python benchmarks/between_hosts.py --namespaces 2 --link 10gbit     # a link that is the bound

Hosts are network namespaces. The ranks of a single host speak over its loopback interface. Shared
memory is off for every contestant except ``hierarchical``. Before the turns begin, each contestant
makes every operation, and the network interfaces must count the bytes that the operation has to
move. So a contestant that goes past TCP is noticed. Namespaces share the processors, so their link
costs processor time alone. With ``--link`` each host sends at most at that rate (a token bucket of
tc), as over a real network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import sittings
from promises import MIB, Bound, Judged, hold

from collective.contract import registry
from collective.launch.command_starter import Command
from collective.platform import usable_cores
from collective.tools.bench.arena import Arena, ArenaError
from collective.tools.bench.contestants import Contestant, named
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.measure import Pace, Record, Task
from collective.tools.bench.run import Results
from collective.tools.show import add_sizes, count, microseconds, print_table, size_name

_ROOT = Path(__file__).resolve().parent.parent
_OPERATIONS = "send_recv sendrecv all_reduce broadcast all_gather reduce_scatter all_to_all".split()
# Measured only if they are named.
_FURTHER = "reduce gather scatter".split()
_SIZES = "4 1K 4K 16K 64K 256K 1M 4M 16M 64M"
# The flat transports, each with its counterpart that keeps to shared memory inside a host.
_FLAT = ("tcp", "gloo")
_LEVELS = ("hierarchical/tcp", "hierarchical/gloo")
# torch.distributed over our plug-in, which takes tcp.
_PLUGIN = "torch-plugin"
# tcp with certificates, which encrypts the arrays between hosts.
_ENCRYPTED = "tcp/tls"
# Each is compared with the second.
_PAIRS = (
    (_LEVELS[0], "tcp"), (_LEVELS[1], "gloo"), _LEVELS, (_PLUGIN, "torch"), (_ENCRYPTED, "tcp"),
)  # fmt: skip
_OTHERS = ("mpi4py", "torch")
# Promised: times as fast as the fastest other library, and the aim. A tenth is noise.
_MUST, _AIM = 0.9, 1.0
# Promised for hierarchical over tcp: times as fast as tcp at these sizes, in the operations of
# which two levels send fewer bytes between the hosts.
_LEVELS_MUST, _LEVELS_AT = 1.5, (MIB, 16 * MIB)
_FEWER = ("all_reduce", "all_gather", "reduce_scatter", "reduce")
_PORT = 29600
# A bucket holds what a card sends at once. The queue is long enough that it drops nothing here.
_BURST, _QUEUED = "256kb", "1s"
# The check of the interfaces: bytes of a call's larger array, and number of calls.
_CHECKED, _CALLS = MIB, 4


def _switches(vendor: str, device: str, ranks: int) -> dict[str, str]:
    """Return the variables with which an MPI library uses TCP over an interface, and only TCP."""
    if vendor == "openmpi":
        mca = {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": device}
        # With named hosts, Open MPI does not notice that ranks have to share a core.
        mca["mpi_yield_when_idle"] = str(int(ranks > usable_cores()))
        return {f"OMPI_MCA_{name}": value for name, value in mca.items()}
    libfabric = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": device}
    if vendor == "mpich":
        # The default netmod, UCX, takes shared memory in spite of NOLOCAL. UCX_TLS=tcp prevents
        # that, but refuses the loopback interface, and took three times as long as libfabric for
        # 1 MiB.
        return {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", **libfabric}
    return {"I_MPI_FABRICS": "ofi", **libfabric}


def _placement(vendor: str, places: str, shell: str) -> list[str]:
    """Return the options of mpiexec that name the hosts, and the remote shell."""
    if vendor == "openmpi":
        # The hosts share their cores, but each daemon would bind its first rank to the first core.
        return ["--host", places, "--mca", "plm_ssh_agent", shell, "--bind-to", "none"]
    return ["-hosts", places, "-launcher", "ssh", "-launcher-exec", shell]


def _limit(hosts: Any, rate: str | None) -> None:
    """Let each host send at most at a rate, in the units of tc; None: as fast as it can."""
    bucket = ["tbf", "rate", str(rate), "burst", _BURST, "latency", _QUEUED]
    for host in hosts.hosts if rate else ():
        command = host.entering("tc", "qdisc", "add", "dev", "eth0", "root", *bucket)
        subprocess.run(command, check=True)


def _protection(folder: Path) -> dict[str, str]:
    """Return the settings of a job with a secret and with a certificate in ``folder``."""
    certificate, key = str(folder / "tls.crt"), str(folder / "tls.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command = ["openssl", "req", "-x509", *curve, "-subj", "/CN=rank", "-out", certificate]
    subprocess.run([*command, "-keyout", key], check=True, capture_output=True)
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    return {"COLLECTIVE_TLS": str(folder), "COLLECTIVE_SECRET": "0f" * 32}


@dataclass(frozen=True)
class _Spread(Contestant):
    """Contestant whose ranks are spread evenly over hosts.

    Attributes:
        hosts: the ``Hosts``.
        port: port of the ranks' rendezvous.
    """

    hosts: Any = None
    port: int = 0

    def commands(self, folder: Path, address: str) -> list[Command]:
        hosts, (library, _, detail) = self.hosts, self.name.partition("/")
        device = "eth0" if len(hosts.hosts) > 1 else "lo"
        each = self.ranks // len(hosts.hosts)
        if self.python is not None:
            (((program, *words), _),) = super().commands(folder, address)
            places = ",".join(f"{host.name}:{each}" for host in hosts.hosts)
            options = _placement(detail, places, str(hosts.remote_shell()))
            started = [(0, [program, *options, *words], _switches(detail, device, self.ranks))]
        else:
            module = [sys.executable, "-m", "collective.tools.bench.worker"]
            own = {"GLOO_SOCKET_IFNAME": device, "COLLECTIVE_INTERFACE": device}
            own |= {"COLLECTIVE_ACROSS": detail} if library == "hierarchical" else {}
            own |= _protection(folder) if self.name == _ENCRYPTED else {}
            own |= {"COLLECTIVE_BACKEND": "tcp"} if library == _PLUGIN else {}
            spread = [rank // each for rank in range(self.ranks)]
            arguments = [library, str(folder), address]
            started = hosts.ranks(spread, [*module, *arguments], MASTER_PORT=str(self.port), **own)
        return [
            (hosts.hosts[at].entering(*command), hosts.environment(hosts.hosts[at], variables))
            for at, command, variables in started
        ]

    def least(self, operation: str) -> float:
        """Return how many times its array's bytes the interfaces carry at least in a call."""
        parts = len(self.hosts.hosts) if self.library == "hierarchical" else self.ranks
        if operation in ("gather", "scatter"):
            return (parts - 1) / parts  # the root keeps its part
        if self.library != "hierarchical":
            return self.ranks - 1
        return 0 if operation == "send_recv" else len(self.hosts.hosts) - 1

    def check(self, arena: Arena, operation: str) -> None:
        """Check that an operation moves its bytes over the network interfaces.

        Raises:
            ArenaError: it does not, or the contestant failed.
        """
        array = {"operation": operation, "nbytes": _CHECKED, "memory": "ordinary"}
        arena.ask(self.name, "prepare", side="bytes", **array)
        before = _sent(self.hosts)
        arena.ask(self.name, "measure", side="bytes", iterations=_CALLS, warmup=0, each=False)
        moved, least = _sent(self.hosts) - before, self.least(operation) * _CALLS * _CHECKED
        arena.ask(self.name, "release", side="bytes")
        if moved < least:
            raise ArenaError(
                self.name,
                f"{operation}: the interfaces sent {size_name(moved)} in {_CALLS} calls (expected "
                f"at least {size_name(least)}), so the ranks do not speak over TCP only",
            )


def _sent(hosts: Any) -> int:
    """Return the number of bytes that the interfaces of all hosts have sent."""
    total = 0
    for host in hosts.hosts:
        command = host.entering("cat", "/proc/net/dev")
        table = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        total += sum(int(line.split(":")[1].split()[8]) for line in table.splitlines()[2:])
    return total


def _contestants(
    options: argparse.Namespace, ranks: int, hosts: Any
) -> tuple[list[_Spread], dict[str, str]]:
    """Return the contestants that may work here, and why the others do not."""
    ours = [*_FLAT, *(_LEVELS if 1 < len(hosts.hosts) < ranks else ())]
    known = [name for name in ours if name.rpartition("/")[2] in registry.names()]
    names = [*known, *peers.rivals(options)]
    able, missing = named(names, peers.environments(options.mpi_envs), ranks, ["ordinary"])
    absent = [name for name in ours if name not in known]
    missing |= dict.fromkeys(absent, "this version does not have it")
    if options.plugin:
        able.append(Contestant(_PLUGIN, ranks))
    if options.tls and len(hosts.hosts) > 1:
        able.append(Contestant(_ENCRYPTED, ranks))
    return [
        _Spread(**vars(contestant), hosts=hosts, port=_PORT + number)
        for number, contestant in enumerate(able)
    ], missing


def _check(
    session: sittings.Sittings, able: Sequence[_Spread], operations: Sequence[str], arena: Arena
) -> None:
    """Check that the contestants move their bytes over TCP; a failure makes the command fail."""
    running = {contestant.name for contestant in arena.contestants}
    for contestant in able:
        if contestant.name in running:
            with session.noting_failures():
                for operation in operations:
                    contestant.check(arena, operation)


@contextlib.contextmanager
def hosts_of(number: int) -> Iterator[Any]:
    """Yield ``Hosts`` with a number of hosts; end the command if this machine cannot have them."""
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    network_hosts = importlib.import_module("tests.support.network_hosts")
    reason = network_hosts.refusal()
    if reason is not None:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        network_hosts.Hosts(number, Path(folder)) as hosts,
    ):
        yield hosts


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything in one place after the other; return the data for the JSON file."""
    peers.prepare_environment()
    tasks = [Task(operation, size) for operation in options.operations for size in options.sizes]
    places = []
    for namespaces in options.namespaces:
        session = sittings.Sittings(options)
        for ranks in options.ranks:
            with hosts_of(namespaces) as hosts:
                _limit(hosts, options.link)
                able, missing = _contestants(options, ranks, hosts)
                session.missing |= missing
                check = partial(_check, session, able, options.operations)
                session.play(able, tasks, Pace.of(options.quick), check)
        where = f"{namespaces} hosts" if namespaces > 1 else "loopback"
        where += f" at {options.link}" if options.link else ""
        places.append({"where": where, **session.as_json()})
    return {"places": places}


# -- output ---------------------------------------------------------------------------------------


def _seconds(record: Record) -> float:
    """Return the lower quartile of a contestant's turns, which load from others hardly moves."""
    return float(np.quantile(record.turns, 0.25))


def _compare(seconds: dict[str, float]) -> dict[str, float]:
    """Return how many times as fast ours are, by what is compared.

    Args:
        seconds: time of each contestant at one size.
    """
    others = [time for name, time in seconds.items() if name.partition("/")[0] in _OTHERS]
    ratios = {f"{name}: × other": min(others) / seconds[name] for name in _FLAT if name in seconds
              and others}  # fmt: skip
    for name, other in _PAIRS:
        if name in seconds and other in seconds:
            ratios[f"{name}: × {other}"] = seconds[other] / seconds[name]
    return ratios


def _by_size(records: Sequence[Record]) -> dict[int, dict[str, float]]:
    """Return the seconds of each contestant, by size."""
    sizes: dict[int, dict[str, float]] = {}
    for record in records:
        sizes.setdefault(record.nbytes, {})[record.contestant] = _seconds(record)
    return sizes


def _show(title: str, sizes: dict[int, dict[str, float]]) -> None:
    """Print the figures of one operation of a number of ranks in one place."""
    ratios = {nbytes: _compare(seconds) for nbytes, seconds in sizes.items()}
    names = list(dict.fromkeys(name for seconds in sizes.values() for name in seconds))
    compared = list(dict.fromkeys(what for here in ratios.values() for what in here))
    rows = []
    for nbytes, seconds in sizes.items():
        times = [microseconds(seconds[name]) if name in seconds else "" for name in names]
        here = ratios[nbytes]
        cells = [f"{here[what]:.2f}" if what in here else "" for what in compared]
        rows.append([size_name(nbytes), *times, *cells])
    print_table(title, ["size", *(f"{name} µs" for name in names), *compared], rows)


def _judge(title: str, fewer: bool, sizes: dict[int, dict[str, float]]) -> Iterator[Judged]:
    """Return the promises for one operation; ``fewer``: whether it is one of :data:`_FEWER`."""

    def bound(unit: str, what: str, must: float, aim: float | None, *at: int) -> Bound:
        ratios = {n: _compare(seconds) for n, seconds in sizes.items() if not at or n in at}
        values = {size_name(n): here[what] for n, here in ratios.items() if what in here}
        return Bound(unit, values, must, aim)

    others = bound("× the fastest other", "tcp: × other", _MUST, _AIM)
    yield hold(f"tcp, {title}", f"{_MUST:g} ×", f"{_AIM:g} ×", [others])
    flat = bound("× tcp", f"{_LEVELS[0]}: × tcp", _LEVELS_MUST, None, *_LEVELS_AT)
    gloo = bound("× over gloo", f"{_LEVELS[0]}: × {_LEVELS[1]}", 1.0, None)
    must, bounds = (f"{_LEVELS_MUST:g} × tcp, ", [flat, gloo]) if fewer else ("", [gloo])
    yield hold(f"{_LEVELS[0]}, {title}", f"{must}1 × gloo", "", bounds)


def show(run: dict[str, Any]) -> None:
    """Print the figures of a run, and whether the promises are kept."""
    verdicts: list[Judged] = []
    for place in run["places"]:
        records = Results.from_json({**place, "machine": run["machine"]}).records
        for ranks, operation in dict.fromkeys((r.ranks, r.operation) for r in records):
            title = f"{operation}, {ranks} ranks, {place['where']}"
            sizes = _by_size([r for r in records if (r.ranks, r.operation) == (ranks, operation)])
            _show(title, sizes)
            verdicts += _judge(title, operation in _FEWER, sizes)
        sittings.show_contestants(place)
    header = ["to reach", "must", "aim", "the worst measured", "verdict"]
    rows = [[*astuple(verdict)] for verdict in verdicts if verdict.verdict != "not measured"]
    print_table(headline(run["machine"]), header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Compare transports between hosts, over TCP.")
    sittings.add_options(parser)
    add_sizes(parser, _SIZES)
    parser.add_argument("--ranks", nargs="+", type=count, default=[2, 4], metavar="N")
    parser.add_argument(
        "--operations", nargs="+", choices=[*_OPERATIONS, *_FURTHER], default=_OPERATIONS,
        metavar="NAME", help="%(choices)s (default: all but the last three)",
    )  # fmt: skip
    parser.add_argument(
        "--namespaces", nargs="+", type=count, default=[1, 2], metavar="N",
        help="numbers of hosts, over which the ranks are spread; 1: loopback (default: 1 2)",
    )  # fmt: skip
    parser.add_argument(
        "--plugin", action="store_true", help="measure torch.distributed over our tcp, too"
    )
    parser.add_argument("--tls", action="store_true", help="measure tcp with certificates, too")
    parser.add_argument(
        "--link", metavar="RATE", help="limit what each host sends, for example to 10gbit"
    )
    options = parser.parse_args(arguments)
    if options.link and 1 in options.namespaces:
        parser.error("--link needs several hosts: --namespaces 2")
    if any(ranks % hosts for ranks in options.ranks for hosts in options.namespaces):
        parser.error("each of --ranks has to be a multiple of each of --namespaces")
    run = measured(options, lambda: measure(options))
    show(run)
    return max(sittings.exit_code("between_hosts", place) for place in run["places"])


if __name__ == "__main__":
    sys.exit(main())
