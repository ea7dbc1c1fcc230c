"""Wrong arguments to everything in ``_core``: they raise exceptions and never crash.

Each test runs a separate program, because a crash would also end the test process.
"""

from __future__ import annotations

import pytest

from collective import native
from tests.support.interpreter import printed

pytestmark = pytest.mark.skipif(
    native.chosen.extension is None, reason="the native core is not in use"
)

START = """
import gc, random, sys, warnings
warnings.simplefilter('ignore')
import numpy as np
from collective.native import _core

def refuses(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (TypeError, ValueError, OverflowError, RuntimeError, MemoryError) as error:
        assert not isinstance(error, SystemError), error
    else:
        raise AssertionError(f"{function} took {arguments} {options}")
"""

DOOR_REFERENCES = """
ring, queue = _core.Ring(["x"]), []
for wrong in (("ring", [], 0, 2), (ring, (), 0, 2), (ring, [], 2, 2), (ring, [], 0, 0),
              (ring, [], -1, 2), (ring, [], "0", 2), (ring, queue, 0)):
    before = [sys.getrefcount(each) for each in (ring, queue, *wrong)]
    refuses(_core.Door, *wrong)
    assert before == [sys.getrefcount(each) for each in (ring, queue, *wrong)], wrong
refuses(_core.Door, ring, [], 0, 2, rank=0)
"""

UNFINISHED = """
segment = bytearray(1 << 20)
made = {
    _core.Ring: (["x"],), _core.Door: (_core.Ring(["x"]), [], 0, 2), _core.InThread: (),
    _core.Shared: (segment, 0, 2, 1024, 1 << 19, 8192, 65536, 4096, False, object()),
}
for kind, arguments in made.items():
    if arguments:
        refuses(kind)
        refuses(kind.__new__, kind)
    again = kind(*arguments)
    again.__init__(*arguments)  # it is made already, and stays as it is
    again.__init__("wrong", 1)
refuses(_core.Plan)
# What is wrong with a segment is found before anything of it is used.
shared = _core.Shared.__new__(_core.Shared, *made[_core.Shared])
refuses(shared.plan, 1, 0, 0, None, None, 8, False, "request", b"", print)  # no operator
refuses(shared.plan, 5, 0, 0, [1 << 63, 1 << 63], "sum", 11, False, "request", b"", print)
refuses(_core.Shared, bytearray(64), *made[_core.Shared][1:])
"""

METHODS = """
names = ("all_reduce reduce scan reduce_scatter broadcast scatter all_gather gather all_to_all "
         "barrier send recv sendrecv").split()
def named(name, answer=None):
    def function(self, *arguments, **options):
        return self.answer if answer is None else answer
    function.__name__ = name
    return function
class Kind:
    pass
class First(_core.Handle):
    answer = 1
class Second(_core.Handle):
    answer = 2
for name in names:
    for owner in (First, Second):
        setattr(owner, name, _core.Method(named(name), Kind))
    refuses(_core.Method, named(name))
    refuses(_core.Method, 3, Kind)
assert (First().all_reduce(3), Second().all_reduce(3)) == (1, 2)
for name in ("shrink", "_all_reduce", ""):
    refuses(_core.Method, named(name), Kind)
x = np.ones(3)
class Anything:
    answer = 3
assert First.all_reduce(Anything(), x) == 3  # of no handle: Python says what is wrong
refuses(First.all_reduce)
class Path(_core.Gate):
    @staticmethod
    def explain(function, error):
        return error
for wrong in (None, 0, "path", [], {}, object(), _core.Ring(["x"]), _core.Gate.__new__(_core.Gate)):
    one = First()
    one._path = wrong
    assert one.all_reduce(x) == one.broadcast(x) == one.send(x, 1) == 1
for wrong in (None, 0, "door", [], {}, object(), _core.Ring(["x"])):
    for attribute in ("door", "door_of_pieces", "door_of_scatter", "lanes", "timeout"):
        one = First()
        one._path = Path()
        setattr(one._path, attribute, wrong)
        assert one.all_reduce(x) == one.broadcast(x) == one.send(x, 1) == 1
"""

RANDOM = """
from itertools import chain
seed = SEED
random.seed(seed)
names = "all_reduce all_gather scatter broadcast gather barrier send recv sendrecv door".split()
ring = _core.Ring(["x"])
def values():
    x = np.ones(random.choice([0, 1, 7, 5000]), random.choice("?bhilBHILefdFD"))
    yield from (None, True, 0, 1, -1, 2, 7, 64, 1024, 1 << 20, 1 << 31, 1 << 63, -(1 << 63))
    yield from (0.0, -1.5, float("inf"), float("nan"), "", "sum", "x", "é", b"", b"sum", [], (), {})
    yield from ([1, 2], ["a"], [1 << 70], (0, 0), {"all_reduce": repr}, repr, object(), type, int)
    yield from (x, x[::2], x.astype(">i4"), np.ones((2, 3, 4)), np.array("text"), np.float64(3))
    yield from (bytearray(100), bytearray(1 << 16), memoryview(b"abc"), ring, _core.InThread())
    yield from (lambda *_: 1, lambda *_: None, names, 1 << 70)
def garbage():
    return [random.choice(list(values())) for _ in range(random.randrange(11))]
made = [
    _core, ring, _core.InThread(), _core.Door(ring, [], 0, 2),
    _core.Shared(bytearray(1 << 20), 0, 2, 1024, 1 << 19, 8192, 65536, 4096, False, object()),
]
made.append(made[-1].plan(0, 0, 0, None, None, 11, False, "request", b"", repr))
callables = list(chain.from_iterable(
    [getattr(each, name) for name in dir(each) if callable(getattr(each, name))
     and not name.startswith("__") or name in ("__init__", "__call__")] for each in made))
callables += [_core.make_fold(op, dtype, lambda *_, **__: None) for op, dtype in
              (("sum", 11), ("min", 3), ("land", 0))]
callables.append(_core.make_schedule("sum", 11, 2, 0, 1, b"\\0\\0\\0\\0\\1\\0\\0\\0\\2\\0\\0\\0"))
callables.append(
    _core.make_messages(bytearray(1 << 20), 0, 2, 8192, 8192, 10, False, None))
assert len(callables) > 20, callables
# Every function gets the arguments that it takes, each of them replaced by something else, too.
right = {
    "Shared": [bytearray(1 << 20), 0, 2, 1024, 1 << 19, 8192, 65536, 4096, 10, object()],
    "Door": [ring, [], 0, 2], "Method": [print, type], "Ring": ["x"], "view": [np.ones(3)],
    "make_messages": [bytearray(1 << 20), 0, 2, 8192, 8192, 10, False, None, 1024],
    "make_fold": ["sum", 11, repr, 0], "know": [1, 64, [0, 0]],
    "plan": [5, 0, 0, [1, 2], "sum", 11, True, "request", b"", repr],
    "nap": [bytearray(1 << 12), 128, 0.001, lambda: True], "wake": [bytearray(1 << 12), [128]],
    "exchange": [None, -2, None, -2, 0, 0.1, True], "begin": ["request", False], "kept": [1],
    "write_head": [np.ones(3), np.zeros(1024, np.uint8)], "room_in": [np.ones(3)],
    "read_head": [np.zeros(1024, np.uint8), np.ones(3)],
    "fold": [np.ones(3), np.ones(3)], "see_tensors": [object(), type, int, 0],
    "make_schedule": ["sum", 11, 2, 0, 1, bytes(12)], "run": [[np.ones(3)] * 2, [np.ones(3)]],
    "see_frozen": [dict, repr, repr, "place"],
}
for turn in range(4000):
    function = random.choice(callables)
    name = getattr(function, "__name__", "")
    arguments = garbage()
    if name in right and random.random() < 0.7:
        arguments = list(right[name])
        arguments[random.randrange(len(arguments))] = random.choice(list(values()))
    options = {random.choice(["out", "rank", "level"]): random.choice(list(values()))
               } if random.random() < 0.2 else {}
    try:
        kept = function(*arguments, **options)
    except SystemError as error:
        raise AssertionError(f"{function} {arguments} {options}") from error
    except Exception:
        pass
    if turn % 500 == 0:
        gc.collect()
"""


def ends_well(program: str) -> None:
    assert printed("-X", "faulthandler", "-c", START + program + "\nprint('all right')") == (
        "all right\n"
    )


def test_door_with_wrong_arguments_drops_no_reference() -> None:
    ends_well(DOOR_REFERENCES)


def test_core_types_are_made_completely_or_not_at_all() -> None:
    ends_well(UNFINISHED)


def test_methods_of_two_classes_keep_their_functions() -> None:
    ends_well(METHODS)


@pytest.mark.parametrize("seed", range(4))
def test_random_arguments_raise_exceptions(seed: int) -> None:
    ends_well(RANDOM.replace("SEED", str(seed)))
