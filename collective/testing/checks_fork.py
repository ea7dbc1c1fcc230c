"""Checks of forked children: they are no ranks, and nothing that they do reaches the ranks."""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import CollectiveError
from collective.start import session

from .checks import on_each_rank
from .checks_broken import calls_of
from .samples import assert_same

_PARTNER = 11  # the tag of a message that is awaited meanwhile


#: What a child does, given its parent's communicator, a group of it and a call in the background.
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
    """A forked child's calls raise and say what to do, and the ranks do not notice it.

    Where ranks are threads of one process, rank 0 forks it.
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
    # Afterwards everything goes on, the call that was in the background as well.
    for each, name in ((comm, "the communicator"), (group, "a group")):
        assert_same(each.all_reduce(x), total, f"all_reduce in {name} after the fork")
    comm.send(x, right, tag=_PARTNER)
    assert_same(work.wait(), np.full(5, left + 1.0), "a message in the background")
    group.close()
    assert code == 0, f"rank {comm.rank}: the child that does {child} ended with {code}"
    assert not accepted, f"rank {comm.rank}: in a forked child {accepted}"


def _outcome(does: Callable[[], list[str]]) -> tuple[int, list[str]]:
    """Return how a forked child ended, and what it told."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of what is held here: that a process with threads is forked.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            found = does()
        except BaseException as error:  # nothing may leave the child
            found = [f"{type(error).__name__}: {error}"]
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(answer) if answer else []


def _accepted(calls: dict[str, Callable[[], Any]]) -> list[str]:
    """Make ``calls``; return those that did not raise what they should."""
    found = []
    for name, call in calls.items():
        try:
            result = call()
        except CollectiveError as error:
            # Of a GPU's array the driver may be the first to say it.
            if "fork" not in str(error) or "spawn" not in str(error):
                found.append(f"{name} raised {error}")
        except Exception as error:  # anything else is wrong, and told
            found.append(f"{name} raised {type(error).__name__}: {error}")
        else:
            found.append(f"{name} returned {result!r}")
    return found


def _leave(comm: Communicator, group: Communicator) -> list[str]:
    """End as a program does: out of the ``with`` body, at exit, and with all objects."""
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
