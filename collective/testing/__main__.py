"""``python -m collective.testing NAME``: run the conformance suite on a transport."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from collective import CollectiveError

from .checks import NO_ARRAYS, NO_TRANSPORT, OWN_ARRAYS
from .conformance import Result, chosen_checks, run_checks
from .kinds import NAMES
from .ranks import capabilities_of

_MARKS = {"passed": "pass", "failed": "FAIL", "skipped": "-"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, print a table and return the exit code: 0 if all is well."""
    parser = argparse.ArgumentParser(
        prog="python -m collective.testing",
        description="Run the conformance suite on a transport.",
    )
    parser.add_argument("name", help="a registered transport, or module:Class")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=(1, 2, 3, 4),
        metavar="N",
        help="numbers of ranks, with commas between them (default: 1,2,3,4)",
    )
    parser.add_argument(
        "--kind", choices=NAMES, default="numpy", help="kind of the arrays that calls get"
    )
    parser.add_argument(
        "--checks",
        nargs="+",
        metavar="CHECK",
        help="run only these checks, with spaces or commas between them",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the checks that would run, and run none"
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="seconds until a case counts as hung"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    checks = None if options.checks is None else _words(" ".join(options.checks))
    try:
        if options.list:
            print(listing(options.name, options.sizes, checks, options.kind))
            return 0
        results = run_checks(
            options.name,
            options.sizes,
            kind=options.kind,
            checks=checks,
            timeout=options.timeout,
            report=_show_last if sys.stderr.isatty() else lambda result: None,
        )
    except (CollectiveError, ValueError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        print(table(options.name, options.sizes, results))
    return 0 if _verdict(results)[0] else 1


def _show_last(result: Result) -> None:
    """Show on a terminal which check has just ended."""
    print(f"\r\x1b[K{result.size} ranks: {result.check}", end="\r", file=sys.stderr, flush=True)


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _sizes(text: str) -> tuple[int, ...]:
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}; expected positive integers, as 1,2,3,4")
    return tuple(map(int, words))


def listing(
    name: str, sizes: Sequence[int], checks: Sequence[str] | None, kind: str = "numpy"
) -> str:
    """Return the checks as text: a line each, with its number of cases and what it checks.

    Raises:
        CollectiveError: there is no such transport, or it cannot be used here.
        ValueError: no check has a name in ``checks``.
    """
    capabilities = capabilities_of(name)
    chosen = chosen_checks(checks)
    width = max(len(check.name) for check in chosen)
    lines = []
    for check in chosen:
        reasons = [check.skip_reason(capabilities, size, kind) for size in sizes]
        cases = sum(len(check.cases(size)) for size, why in zip(sizes, reasons) if why is None)
        what = (check.__doc__ or "").strip().splitlines()[0]
        skipped = f"skipped: {reasons[-1]}. " if not cases else ""
        lines.append(f"{check.name:<{width}}  {cases:>4}  {skipped}{what}")
    return "\n".join(lines)


def table(name: str, sizes: Sequence[int], results: Sequence[Result]) -> str:
    """Return the results as text: a line a check, a column a size, then the failures."""
    by_check = {(result.check, result.size): result for result in results}
    checks = list(dict.fromkeys(result.check for result in results))
    width = max(map(len, checks), default=0)
    lines = [f"{name:<{width}}  " + "".join(f"{size:>7}" for size in sizes)]
    for check in checks:
        marks = "".join(f"{_MARKS[by_check[check, size].outcome]:>7}" for size in sizes)
        reasons = {by_check[check, size].text for size in sizes} - {""}
        skipped = all(by_check[check, size].outcome == "skipped" for size in sizes)
        note = f"  ({'; '.join(sorted(reasons))})" if skipped else ""
        lines.append(f"{check:<{width}}  {marks}{note}")
    for result in results:
        if result.outcome == "failed":
            lines += ["", f"===== {result.size} ranks: {result.text}"]
    untested = _untested(results)
    if untested:
        lines += ["", "Not tested:"]
        lines += [f"  {why}: {', '.join(names)}" for why, names in untested.items()]
    seconds = sum(result.seconds for result in results)
    lines += ["", f"{_verdict(results)[1]} ({seconds:.0f} s)"]
    return "\n".join(lines)


def _untested(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return the reason for a skip -> names of the checks that were skipped with every size.

    The result excludes skips for reasons that do not concern the transport.
    """
    ran = {result.check for result in results if result.outcome != "skipped"}
    untested: dict[str, list[str]] = {}
    # The last size is the largest, as a rule: one rank is too few for most checks.
    last = {result.check: result.text for result in results if result.outcome == "skipped"}
    for check, why in last.items():
        if check not in ran and why not in (NO_ARRAYS, NO_TRANSPORT, OWN_ARRAYS):
            untested.setdefault(why, []).append(check)
    return untested


def _verdict(results: Sequence[Result]) -> tuple[bool, str]:
    """Return whether all is well, and a sentence about it."""
    count = {outcome: sum(r.outcome == outcome for r in results) for outcome in _MARKS}
    counted = ", ".join(f"{number} {outcome}" for outcome, number in count.items() if number)
    if count["failed"]:
        return False, f"does not conform: {counted}"
    # With one rank nothing is ever sent.
    if not any(result.size > 1 and result.outcome == "passed" for result in results):
        return False, f"nothing was communicated: {counted}; run it with 2 ranks or more"
    untested = sum(map(len, _untested(results).values()))
    if untested:
        return True, f"conforms in what was tested: {counted}; {untested} checks were not tested"
    return True, f"conforms: {counted}"


if __name__ == "__main__":
    sys.exit(main())
