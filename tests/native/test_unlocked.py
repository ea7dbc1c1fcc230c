"""The table of calls that threads make without the interpreter lock: changes, and forks."""

from __future__ import annotations

import pytest

from collective import native
from tests.support.interpreter import printed

pytestmark = pytest.mark.skipif(
    native.chosen.extension is None, reason="the native core is not in use"
)

# The threads look into the table all the time, so that some of the forks find its lock taken.
_FORKS = """
import os, threading
from collective import native
from tests.native.unlocked_threads import _run

run, ends = _run(), threading.Event()

def look():
    while not ends.is_set():
        for _ in range(100):
            run(1, 2, None, None)

door = native.door(native.ring(["nowhere"]), [], 0, 2)
threads = [threading.Thread(target=look) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(200):
    child = os.fork()
    if child == 0:
        door.lock()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
ends.set()
print("all children ended")
"""


def test_calls_are_right_while_python_changes_the_table() -> None:
    words = ["--calls", "100", "--sanitizers"]
    shown = printed("-m", "tests.native.unlocked_threads", *words)
    assert shown.count("100 calls of") == 2


def test_child_process_shuts_doors_while_threads_of_the_parent_make_calls() -> None:
    assert printed("-c", _FORKS) == "all children ended\n"
