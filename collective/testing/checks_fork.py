"""Checks of forked children: they are not ranks, and their calls do not reach the ranks."""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from collective import CollectiveError, Communicator
from collective.inner import session

from .checks import on_each_rank
from .checks_broken import calls_of
from .samples import assert_same

_PARTNER = 11  # the tag of a message that each rank awaits during the fork


#: Actions of a child, given its parent's communicator, a group of it and a call in the background.
#: Each returns texts about the calls that did not fail as they should.
_DOES: dict[str, Callable[[Communicator, Communicator, Any], list[str]]] = {
    "nothing": lambda comm, group, work: [],
    "calls": lambda comm, group, work: _accepted(
        {
            **calls_of(comm, np.ones(4)),
            "all_reduce of a group": lambda: group.all_reduce(np.ones(4)),
            "wait": work.wait,
            "abort": comm.abort,
        }
    ),
    "leaves": lambda comm, group, work: _leave(comm, group),
}


@on_each_rank(
    lambda size: [{"child": child} for child in (_DOES if size == 2 else ("calls",))], at_least=2
)
def check_fork(comm: Communicator, child: str) -> None:
    """Check that a forked child's calls raise with a remedy, and the ranks are not affected.

    Where ranks are threads of one process, only rank 0 forks a child.
    """
    group = comm.dup()
    x = np.full(5, comm.rank + 1.0)
    total = np.full(5, comm.size * (comm.size + 1) / 2)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    work = comm.recv(None, left, tag=_PARTNER, async_op=True)
    assert_same(comm.all_reduce(x), total, "all_reduce before the fork")
    code, accepted = 0, list[str]()
    if comm.rank == 0 or not comm.capabilities.in_process:
        code, accepted = _outcome(lambda: _DOES[child](comm, group, work))
    # Afterwards all calls of the parents go on, also the call that was in the background.
    for communicator, name in ((comm, "the communicator"), (group, "a group")):
        assert_same(communicator.all_reduce(x), total, f"all_reduce in {name} after the fork")
    comm.send(x, right, tag=_PARTNER)
    assert_same(work.wait(), np.full(5, left + 1.0), "a message in the background")
    group.close()
    assert code == 0, f"rank {comm.rank}: the child that does {child} ended with {code}"
    assert not accepted, f"rank {comm.rank}: in a forked child {accepted}"


def _outcome(does: Callable[[], list[str]]) -> tuple[int, list[str]]:
    """Return the exit code of a forked child, and the texts that it sent."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns that a process with threads forks, which is the purpose of this check.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            texts = does()
        except BaseException as error:  # no exception may leave the child
            texts = [f"{type(error).__name__}: {error}"]
        os.write(writing, json.dumps(texts).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(answer) if answer else []


def _accepted(calls: dict[str, Callable[[], Any]]) -> list[str]:
    """Make ``calls``; return a text about each that did not raise the error for forked children."""
    texts = []
    for name, call in calls.items():
        try:
            result = call()
        except CollectiveError as error:
            # For an array on a GPU the driver may be the first to report the fork.
            if "fork" not in str(error) or "spawn" not in str(error):
                texts.append(f"{name} raised {error}")
        except Exception as error:  # any other error is wrong, too
            texts.append(f"{name} raised {type(error).__name__}: {error}")
        else:
            texts.append(f"{name} returned {result!r}")
    return texts


def _leave(comm: Communicator, group: Communicator) -> list[str]:
    """End as a program does: leave the ``with`` body, run the exit handler, drop all objects."""
    try:
        with comm, group:
            raise ValueError("the child's own")
    except ValueError:
        pass
    group.close()
    session._leave()
    del comm, group
    gc.collect()
    return []
