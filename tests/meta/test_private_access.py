"""A name that begins with an underscore is used only in the folder that defines it.

A syntax tree has no types, so the test compares names: if code uses a private name on anything but
``self``, ``cls`` and ``super()``, some class or module of the same folder must define the name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.interpreter import ROOT

#: Private names of other packages, by the folder that uses them and the reason.
THIRD_PARTY = {
    ("", "documented functions of os and sys"): "_current_frames _exit _getframe",
    ("", "documented methods of NamedTuple"): "_asdict _make _replace",
    ("", "types for annotations, without a public name"): "_Pointer _SubParsersAction",
    ("backends/gloo", "Gloo's options and a message's source have no public name in PyTorch"): (
        "_Options _devices _source_rank _threads _timeout"
    ),
    ("backends/mpi", "mpi4py has no public name for a handle's address as a pointer"): "_handleof",
    ("adapters/chainer", "Chainer is complete, and has no public names for this state"): (
        "_call_converter _comm _config_use_ideep _done _extensions _fp32_param "
        "_get_reporters _global_except_hook _highprec_dtype _hookable _IteratorProgressBar "
        "_iterators _local _loss_scale _not_empty_cond _observer_names _orig_except_hook "
        "_persistent _post_update_hooks _pre_update_hooks _progress_bar _reduce "
        "_retained_output_data _snapshot_elapsed_time _start_at _state _task _w_dtype"
    ),
    ("adapters/chainer/compatibility", "state that multiprocessing's own join() reads"): (
        "_is_zero _semlock _unfinished_tasks"
    ),
    ("adapters/torch", "the state of a backward pass is in PyTorch's C module alone"): (
        "_C _are_functorch_transforms_active _autograd _current_graph_task_id _current_level "
        "_execution_engine _get_current_graph_task_keep_graph _is_tracing "
        "_top_saved_tensors_default_hooks _will_engine_execute_node"
    ),
    ("adapters/torch", "a module's parts and a tensor's memory, as PyTorch's wrappers see them"): (
        "_BatchNorm _LazyNormBase _backward_hooks _cdata _cuda_getCurrentRawStream "
        "_lazy_clone _modules _share_fd_cpu_ _values"
    ),
    ("adapters/torch", "the count of a tensor's writes has no public name"): "_version",
    ("adapters/torch", "torch.distributed registers external backends and works by these"): (
        "_create_internal _create_work_from_future _distributed_c10d "
        "_register_backend _rendezvous_handlers _set_default_backend"
    ),
    ("collective/start", "functions of atexit run only after all threads have ended"): (
        "_register_atexit"
    ),
    ("collective/start", "Ray's key-value store has no public functions"): (
        "_internal_kv_del _internal_kv_get _internal_kv_put"
    ),
    ("collective/testing", "a plugin of pytest that runs tests itself has to end their fixtures"): (
        "_setupstate _tmp_path_factory"
    ),
    ("collective/launch/ray", "Ray registers a backend once, and tells nowhere else whether"): (
        "_global_registry"
    ),
    ("adapters/torch", "only these names exclude a function from Dynamo's traces"): (
        "_FrameAction _FrameExecStrategy"
    ),
}  # fmt: skip


class Use(NamedTuple):
    """Use of a private name on anything but ``self``.

    Attributes:
        place: file and line.
        room: folder of the file; for a module directly in the package, the module.
        text: the expression.
        name: the private name.
        origin: "house" if the expression begins with a name imported from this package, "others"
            if the name comes from another package, else "".
    """

    place: str
    room: str
    text: str
    name: str
    origin: str


class Rooms:
    """The private names in the files under a folder.

    Attributes:
        uses: all uses on anything but ``self``.
        members: for each room, the names that its classes define.
        globals: for each room, the names that its modules define.
    """

    def __init__(self, root: Path) -> None:
        self.uses: list[Use] = []
        self.members: dict[str, set[str]] = defaultdict(set)
        self.globals: dict[str, set[str]] = defaultdict(set)
        for folder in ("collective", "backends", "adapters"):
            for path in sorted((root / folder).rglob("*.py")):
                # collective/backends and collective/adapters are links to folders of the root.
                if not any(parent.is_symlink() for parent in path.parents):
                    self._read(path.relative_to(root), ast.parse(path.read_text()))

    def _read(self, path: Path, tree: ast.Module) -> None:
        room = str(path if str(path.parent) == "collective" else path.parent)
        self.members[room].update(_members(tree))
        self.globals[room].update(_defined(tree.body))
        origins = _origins(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node):
                origin = origins.get(_root(node), "")
                place = f"{path}:{node.lineno}"
                self.uses.append(Use(place, room, ast.unparse(node), node.attr, origin))

    def reaches(self) -> list[Use]:
        """Return the uses of names that the room does not define."""
        return [use for use in self.uses if not self._defines(use)]

    def _defines(self, use: Use) -> bool:
        if use.origin == "others":
            return False
        in_module = use.origin == "house" and use.name in self.globals[use.room]
        return in_module or use.name in self.members[use.room]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_own(node: ast.Attribute) -> bool:
    """Return whether a method uses the name on its own object or class."""
    value = node.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _root(node: ast.expr) -> str:
    """Return the name at the start of an expression, or an empty text."""
    while not isinstance(node, ast.Name):
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def _origins(tree: ast.Module) -> dict[str, str]:
    """Return for each imported name "house" if it is from this package, or else "others"."""
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = "collective" if node.level else str(node.module).partition(".")[0]
            packages = [source] * len(node.names)
        else:
            continue
        for alias, package in zip(node.names, packages):
            name = alias.asname or alias.name.partition(".")[0]
            origins[name] = "house" if package == "collective" else "others"
    return origins


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that the body of a class or module defines, also under ``if`` and ``try``."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for each in _walk(targets) if isinstance(each, ast.Name)]
            yield from names
            if "__slots__" in names and node.value is not None:
                slots = _walk([node.value])
                yield from (str(each.value) for each in slots if isinstance(each, ast.Constant))
        else:
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from _defined(getattr(node, part, []))


def _members(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the classes of a file define, in their bodies and on ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            yield node.attr


def _walk(nodes: list[ast.expr]) -> Iterator[ast.AST]:
    for node in nodes:
        yield from ast.walk(node)


@pytest.fixture(scope="module")
def house() -> Rooms:
    """Return the rooms of this repository. Reading them takes seconds, so tests share them."""
    return Rooms(ROOT)


def _exempt(use: Use) -> bool:
    return any(
        use.room.startswith(part) and use.name in names.split()
        for (part, _), names in THIRD_PARTY.items()
    )


def test_private_names_are_used_only_in_their_room(house: Rooms) -> None:
    reaches = [use for use in house.reaches() if not _exempt(use)]
    assert not reaches, "\n".join(f"{use.place}: {use.text}" for use in reaches)


@pytest.mark.parametrize("part", THIRD_PARTY, ids=lambda part: part[1])
def test_third_party_exceptions_are_all_needed(part: tuple[str, str], house: Rooms) -> None:
    needed = {use.name for use in house.reaches() if use.room.startswith(part[0])}
    assert set(THIRD_PARTY[part].split()) <= needed


_OWNER = """
class Owner:
    __slots__ = ("_slot",)
    _field: int = 0

    def __init__(self, other):
        self._attribute = other._attribute

def _function():
    pass
"""
_USER = """
import os
from collective.owner import owner
from . import helper

def use(thing):
    thing.%s

helper._local()
"""


@pytest.mark.parametrize("name", ["_slot", "_field", "_attribute", "_function"])
def test_private_name_of_other_room_is_reported(name: str, tmp_path: Path) -> None:
    for room in ("owner", "user"):
        (tmp_path / "collective" / room).mkdir(parents=True)
    (tmp_path / "collective/owner/owner.py").write_text(_OWNER)
    (tmp_path / "collective/user/helper.py").write_text("def _local():\n    pass\n")
    user = tmp_path / "collective/user/user.py"
    user.write_text(_USER % name)
    assert [use.text for use in Rooms(tmp_path).reaches()] == [f"thing.{name}"]
    user.rename(tmp_path / "collective/owner/user.py")
    (tmp_path / "collective/user/helper.py").rename(tmp_path / "collective/owner/helper.py")
    # A module's function is not an attribute of an object.
    remaining = ["thing._function"] if name == "_function" else []
    assert [use.text for use in Rooms(tmp_path).reaches()] == remaining
