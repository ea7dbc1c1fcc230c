"""``collective profile``: the cost of a program's calls, and whether more ranks would pay."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from collective.errors import ConfigError
from collective.start.config import settings
from collective.start.keys import by_device
from collective.tools.show import console, count, counts, write

from .ending import Ended
from .outputs import check_directory, check_file, written
from .run import absent_script, add_program, add_ranks, program_of, refuse_transports, say_size

if TYPE_CHECKING:
    from collective.algorithms.model import Measured
    from collective.tools.profile.events import RankTrace
    from collective.tools.profile.measure import Profile
    from collective.tools.profile.predict import Outlook

__all__ = ["add_parser"]

# Width of the report if the output is not a terminal.
_WIDTH = 110
_EPILOG = """\
exit code: that of the program; 2 if the program could not be started, if it left no trace to
report, or if nothing could be predicted.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "profile",
        help="run a program and report what its calls cost, and whether more ranks pay",
        usage="collective profile [-n N] [--backend NAME] [--timeout S] [--verbose]\n"
        "           [--predict RANKS] [--link TIME,RATE] [--per-host N] [--from FILE]\n"
        "           [--json FILE] (SCRIPT | -m MODULE | --trace DIR) [ARG ...]",
        description="Run a Python program as N ranks, as `collective run` does, or read a trace "
        "of an earlier run. Report, for each operation, calls, bytes, time, waiting and the share "
        "hidden by computing; T_comp and T_sync of a training step; and whether the ranks pay.",
        epilog=_EPILOG,
    )
    add_ranks(parser)
    parser.add_argument("-m", action="store_true", dest="module", help="run a module, not a script")
    parser.add_argument(
        "--trace", type=Path, metavar="DIR",
        help="report on the traces in DIR (of COLLECTIVE_TRACE) and run nothing; with a program: "
        "keep its traces in DIR",
    )  # fmt: skip
    parser.add_argument(
        "--predict",
        type=counts,
        metavar="RANKS",
        help="numbers of ranks to extrapolate to, such as 8,64,1024",
    )
    parser.add_argument(
        "--link", type=_link, metavar="TIME,RATE",
        help="connection between hosts, for --predict: the time of an empty message and a rate, "
        "such as 10us,12GB/s",
    )  # fmt: skip
    parser.add_argument(
        "--per-host", type=count, metavar="N",
        help="ranks on each host, with --link (default: as many as were profiled)",
    )  # fmt: skip
    parser.add_argument(
        "--from", type=Path, dest="figures", metavar="FILE",
        help="fit the model to the results in FILE, of `collective bench --json`, instead of "
        "timing the transport",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    add_program(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the program, report, and return the exit code."""
    program = program_of(options)
    refusal = _refusal(options, program)
    if refusal:
        print(f"collective profile: {refusal}", file=sys.stderr)
        return 2
    check_file("--json", options.json)
    measured = _figures(options)
    if options.trace is not None and not program:
        return _report(options, options.trace, measured, 0)
    if options.trace is not None:
        check_directory("--trace", options.trace)
        return _report(options, options.trace, measured, _run(options, program, options.trace))
    with tempfile.TemporaryDirectory(prefix="collective-") as directory:
        code = _run(options, program, Path(directory))
        return _report(options, Path(directory), measured, code)


def _refusal(options: argparse.Namespace, program: list[str]) -> str:
    if not program and options.trace is None:
        return "no program given; name a script, -m and a module, or --trace and a directory"
    if absent := absent_script(options, program):
        return absent
    if options.link is None and options.per_host is not None:
        return "--per-host needs --link, which describes the connection between hosts"
    if options.predict is None and (options.link or options.figures):
        return "--link and --from need --predict, which is not given"
    return ""


def _figures(options: argparse.Namespace) -> list[Measured]:
    """Return the results of the file in ``--from``, before a program runs for hours."""
    if options.figures is None:
        return []
    from collective.tools.profile.calibrate import load

    return load(options.figures)


def _run(options: argparse.Namespace, program: list[str], directory: Path) -> int:
    """Run the program as `collective run` does, with traces in ``directory``."""
    # Imported here: the module imports more of the package.
    from collective.platform import die_with_parent

    refuse_transports(settings({"backend": options.backend, "timeout": options.timeout}))
    ranks = str(options.n or say_size("profile"))
    command = [sys.executable, "-m", "collective", "run", "-n", ranks]
    command += ["--backend", options.backend] if options.backend else []
    command += ["--timeout", options.timeout] if options.timeout else []
    command += ["--verbose"] if options.verbose else []
    command += ["-m"] if options.module else []
    variables = {**os.environ, "COLLECTIVE_TRACE": str(directory.absolute())}
    launcher = subprocess.Popen(
        [*command, "--", *program], env=variables, preexec_fn=die_with_parent()
    )
    while True:
        try:
            code = launcher.wait()
        except Ended as end:  # the launcher has not got this signal
            launcher.send_signal(end.number)
            continue
        except KeyboardInterrupt:  # the launcher got the interrupt, too, and ends its ranks
            continue
        return code if code >= 0 else 128 - code


def _report(
    options: argparse.Namespace, directory: Path, measured: list[Measured], code: int
) -> int:
    from collective.tools.profile.events import read
    from collective.tools.profile.measure import profile
    from collective.tools.profile.report import as_json, show

    try:
        traces = read(directory)
    except ConfigError as error:
        if not code:  # a program that failed has explained the missing trace itself
            print(f"collective profile: {error}", file=sys.stderr)
        return code or 2
    found = profile(traces)
    outlook, problem, well = None, "", True
    if options.predict is not None and found.steps is None:
        problem = (
            "profile --predict: nothing is predicted, since no training steps were found. Call "
            "collective.profile.step() once in each step."
        )
    elif options.predict is not None:
        try:
            outlook = _outlook(options, traces, found, measured)
        except ConfigError as error:  # report the measurements all the same
            problem = str(error)
    out = console(least=_WIDTH)
    out.rule(style="dim")
    show(out, found, outlook)
    if code:
        out.print(
            f"\nThe program ended with exit code {code}; the report covers its calls until then."
        )
    if options.json is not None:
        content = as_json(found, outlook) | {"prediction_error": problem}
        well = written("--json", options.json, lambda path: write(path, content))
    if problem:
        print(f"collective: {problem}", file=sys.stderr)
    return code or 2 * (bool(problem) or not well)


def _outlook(
    options: argparse.Namespace, traces: list[RankTrace], found: Profile, measured: list[Measured]
) -> Outlook:
    from collective.tools.profile import calibrate
    from collective.tools.profile.predict import predict

    assert found.steps is not None
    about = traces[0].about
    backend = str(about["backend"])
    if measured:
        # The file may have results of several transports; take those of this transport.
        measured = calibrate.load(options.figures, backend)
    else:
        local = max(2, int(about["local_size"]))
        sizes = sorted({2, local})
        print(f"collective profile: timing {backend} with {sizes} ranks", file=sys.stderr)
        measured = calibrate.run(sizes, options.backend or _host_backend(backend))
    try:
        return predict(
            found.steps, found.ranks, measured, sorted(options.predict), options.link,
            options.per_host or int(about["local_size"]),
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"profile: no model can be fitted: {error}.") from error


def _host_backend(backend: str) -> str:
    """Return the transport between the ranks of one host under ``backend``."""
    return "shm" if backend == "hierarchical" else by_device(backend).get("cpu", backend)


def _link(text: str) -> object:
    from collective.tools.profile.predict import to_link

    try:
        return to_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
