"""``collective profile``, the cost of a program's calls, and ``trace``, its traces as one file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from collective import ConfigError
from collective.inner import settings
from collective.tools.show import Console, check_directory, check_file, width, write, written

from .ending import EndedBySignal
from .run import absent_script, add_program, add_ranks, program_of, refuse_transports, say_size

# Width of the report if the output is not a terminal.
_WIDTH = 110
_EPILOG = """\
exit code: that of the program; 2 if the program could not be started, or if it left no trace to
report.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the two subcommands."""
    parser = subparsers.add_parser(
        "profile",
        help="run a program and report what its calls cost, and whether more ranks pay",
        usage="collective profile [-n N] [--backend NAME] [--timeout S] [--verbose]\n"
        "           [--json FILE] (SCRIPT | -m MODULE | -c TEXT | --trace DIR) [ARG ...]",
        description="Run a Python program as N ranks, as `collective run` does, or read a trace "
        "of an earlier run. Report, for each operation, calls, bytes, time, waiting and the share "
        "hidden by computing; T_comp and T_sync of a training step; and whether the ranks pay.",
        epilog=_EPILOG,
    )
    add_ranks(parser)
    parser.add_argument(
        "--trace", type=Path, metavar="DIR",
        help="report on the traces in DIR (of COLLECTIVE_TRACE) and run nothing; with a program: "
        "keep its traces in DIR",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    add_program(parser)
    parser.set_defaults(execute=execute)
    parser = subparsers.add_parser(
        "trace",
        help="join the ranks' traces into one file",
        description="Join the traces that the ranks of a program wrote with COLLECTIVE_TRACE=DIR "
        "into one file, for https://ui.perfetto.dev or chrome://tracing.",
    )
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="directory of the ranks' traces")
    add("-o", type=Path, dest="output", metavar="FILE", help="(default: DIR/all.json)")
    parser.set_defaults(execute=_join)


def execute(options: argparse.Namespace) -> int:
    """Run the program, report, and return the exit code."""
    program = program_of(options)
    refusal = absent_script(options, program)
    if not program and options.trace is None:
        refusal = "no program given; name a script, -m and a module, or --trace and a directory"
    if refusal:
        print(f"collective profile: {refusal}", file=sys.stderr)
        return 2
    check_file("--json", options.json)
    if options.trace is not None and not program:
        return _report(options, options.trace, 0)
    if options.trace is not None:
        check_directory("--trace", options.trace)
        return _report(options, options.trace, _run(options, program, options.trace))
    with tempfile.TemporaryDirectory(prefix="collective-") as directory:
        code = _run(options, program, Path(directory))
        return _report(options, Path(directory), code)


def _run(options: argparse.Namespace, program: list[str], directory: Path) -> int:
    """Run the program as `collective run` does, with traces in ``directory``."""
    # Imported here: the module imports more of the package.
    from collective.inner import platform

    refuse_transports(settings({"backend": options.backend, "timeout": options.timeout}))
    ranks = str(options.n or say_size("profile"))
    command = [sys.executable, "-m", "collective", "run", "-n", ranks]
    command += ["--backend", options.backend] if options.backend else []
    command += ["--timeout", options.timeout] if options.timeout else []
    command += ["--verbose"] if options.verbose else []
    command += [options.form] if options.form else []
    variables = {**os.environ, "COLLECTIVE_TRACE": str(directory.absolute())}
    launcher = subprocess.Popen(
        [*command, "--", *program], env=variables, preexec_fn=platform.die_with_parent()
    )
    while True:
        try:
            code = launcher.wait()
        except EndedBySignal as end:  # the launcher has not got this signal
            launcher.send_signal(end.number)
            continue
        except KeyboardInterrupt:  # the launcher got the interrupt, too, and ends its ranks
            continue
        return code if code >= 0 else 128 - code


def _report(options: argparse.Namespace, directory: Path, code: int) -> int:
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
    out = Console(_WIDTH)
    out.quote("─" * width(_WIDTH))
    show(out, found)
    if code:
        out.say(
            f"\nThe program ended with exit code {code}; the report covers its calls until then."
        )
    well = True
    if options.json is not None:
        well = written("--json", options.json, lambda path: write(path, as_json(found)))
    return code or 2 * (not well)


def _join(options: argparse.Namespace) -> int:
    """Write the traces of all ranks as one file; return the exit code."""
    from collective.tools.profile.events import merge

    output, ranks, events = merge(options.directory, options.output)
    print(f"{output}: {events:,} events of {ranks} rank(s). Open it with https://ui.perfetto.dev.")
    return 0
