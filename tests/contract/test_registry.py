"""Transports by name: built-in transports, third parties' transports, and errors."""

from __future__ import annotations

import importlib
import sys

import pytest

from collective.backends.threads import ThreadsBackend
from collective.contract import registry
from collective.errors import BackendNotFoundError, BackendUnavailableError
from tests.support.selection import in_whole

pytestmark = pytest.mark.quick

MODULE = """
from collective.backends.threads import ThreadsBackend

class ThirdParty(ThreadsBackend):
    name = "third"

not_a_backend = 3
"""
METADATA = "Metadata-Version: 2.1\nName: some-distribution\nVersion: 1.0\n"


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Return a function that installs a distribution with the given entry points."""

    def install(**points: str) -> None:
        (tmp_path / "some_third_party.py").write_text(MODULE)
        info = tmp_path / "some_distribution-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA)
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[collective.backends]", *lines, ""]))
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield install
    sys.modules.pop("some_third_party", None)


@pytest.mark.parametrize(
    "name",
    # gloo imports PyTorch, which takes seconds.
    [in_whole(each) if each == "gloo" else each for each in sorted(registry.BUILT_IN)],
)
def test_built_in_transport_is_found_by_name(name):
    assert registry.find(name).name == name
    assert name in registry.names()


def test_third_party_transport_is_found_by_entry_point(distribution):
    distribution(third="some_third_party:ThirdParty")
    assert registry.find("third").__name__ == "ThirdParty"
    assert registry.names() == sorted({*registry.BUILT_IN, "third"})


def test_third_party_transport_is_imported_on_demand_only(distribution):
    distribution(third="some_third_party:ThirdParty")
    registry.names()
    registry.find("threads")
    assert "some_third_party" not in sys.modules


def test_third_party_cannot_replace_built_in_transport(distribution):
    distribution(threads="some_third_party:ThirdParty", shm="some_third_party:ThirdParty")
    assert registry.find("threads") is ThreadsBackend
    assert registry.find("shm").__name__ == "ShmBackend"
    assert registry.names() == sorted(registry.BUILT_IN)


def test_third_party_import_error_recommends_installation(distribution):
    distribution(third="some_third_party_that_is_not_there:X")
    with pytest.raises(BackendUnavailableError, match="pip install some-distribution") as caught:
        registry.find("third")
    assert isinstance(caught.value.__cause__, ImportError)


def test_third_party_that_fails_at_import_is_named_with_its_error(distribution, monkeypatch):
    monkeypatch.setitem(globals(), "MODULE", "raise RuntimeError('no driver.')")
    distribution(third="some_third_party:ThirdParty")
    text = r"RuntimeError: no driver\. `python -c 'import some_third_party'` shows where\."
    with pytest.raises(BackendUnavailableError, match=text) as caught:
        registry.find("third")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_entry_point_without_backend_raises_unavailable_error(distribution):
    distribution(third="some_third_party:not_a_backend")
    with pytest.raises(BackendUnavailableError, match="is no Backend"):
        registry.find("third")


def test_transport_is_found_by_path_of_class():
    assert registry.find("collective.backends.threads:ThreadsBackend") is ThreadsBackend


@pytest.mark.parametrize(
    "path",
    ["no.such.module:X", "collective.backends.threads:Missing", "json:loads", ":X", "json:"],
)
def test_transport_with_wrong_path_raises_unavailable_error(path):
    with pytest.raises(BackendUnavailableError, match=r"backend '.*'"):
        registry.find(path)


@pytest.mark.parametrize("name", ["treads", "smh", "", "nonsense"])
def test_unknown_transport_name_lists_known_names(name):
    with pytest.raises(BackendNotFoundError) as caught:
        registry.find(name)
    assert "shm, tcp, threads" in str(caught.value)
    assert ("Did you mean" in str(caught.value)) == (name in ("treads", "smh"))
    assert isinstance(caught.value, LookupError)
