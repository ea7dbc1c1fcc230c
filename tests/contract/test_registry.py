"""Transports by name: built-in ones, third parties', and what is wrong with the others."""

from __future__ import annotations

import importlib
import sys

import pytest

from collective.backends.threads import ThreadsBackend
from collective.contract import registry
from collective.errors import BackendNotFoundError, BackendUnavailableError

MODULE = """
from collective.backends.threads import ThreadsBackend

class ThirdParty(ThreadsBackend):
    name = "third"

not_a_backend = 3
"""
METADATA = "Metadata-Version: 2.1\nName: some-distribution\nVersion: 1.0\n"


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a distribution with these entry points."""

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


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_built_in_transports_are_found_under_their_names(name):
    assert registry.find(name).name == name
    assert name in registry.names()


def test_a_third_partys_transport_is_found_by_its_entry_point(distribution):
    distribution(third="some_third_party:ThirdParty")
    assert registry.find("third").__name__ == "ThirdParty"
    assert registry.names() == sorted({*registry.BUILT_IN, "third"})


def test_nothing_of_a_third_party_is_imported_before_it_is_asked_for(distribution):
    distribution(third="some_third_party:ThirdParty")
    registry.names()
    registry.find("threads")
    assert "some_third_party" not in sys.modules


def test_a_third_party_cannot_take_the_name_of_a_built_in_transport(distribution):
    distribution(threads="some_third_party:ThirdParty", shm="some_third_party:ThirdParty")
    assert registry.find("threads") is ThreadsBackend
    assert registry.find("shm").__name__ == "ShmBackend"
    assert registry.names() == sorted(registry.BUILT_IN)


def test_a_third_partys_transport_that_cannot_be_imported_carries_the_remedy(distribution):
    distribution(third="some_third_party_that_is_not_there:X")
    with pytest.raises(BackendUnavailableError, match="pip install some-distribution") as caught:
        registry.find("third")
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_entry_point_that_is_no_transport_is_refused(distribution):
    distribution(third="some_third_party:not_a_backend")
    with pytest.raises(BackendUnavailableError, match="is no Backend"):
        registry.find("third")


def test_a_class_is_found_by_its_path():
    assert registry.find("collective.backends.threads:ThreadsBackend") is ThreadsBackend


@pytest.mark.parametrize(
    "path",
    ["no.such.module:X", "collective.backends.threads:Missing", "json:loads", ":X", "json:"],
)
def test_a_path_that_leads_nowhere_says_so(path):
    with pytest.raises(BackendUnavailableError, match=r"backend '.*'"):
        registry.find(path)


@pytest.mark.parametrize("name", ["treads", "smh", "", "nonsense"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(BackendNotFoundError) as caught:
        registry.find(name)
    assert "shm, threads" in str(caught.value)
    assert ("Did you mean" in str(caught.value)) == (name in ("treads", "smh"))
    assert isinstance(caught.value, LookupError)
