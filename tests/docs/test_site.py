"""The documentation site: it builds, documents every public name and loads nothing external."""

from __future__ import annotations

import html
import importlib
import importlib.util
import json
import re
import zlib
from pathlib import Path

import pytest

import collective
from tests.support.interpreter import ROOT, printed

pytestmark = pytest.mark.whole

pytest.importorskip("mkdocs", reason="building the site needs the group 'docs'")

PUBLIC = """
    collective
    collective.adapters.chainer
    collective.adapters.chainer.chainermn
    collective.adapters.chainer.functional
    collective.adapters.jax
    collective.adapters.jax.xla
    collective.adapters.torch
    collective.adapters.torch.functional
    collective.adapters.torch.plugin
    collective.compression
    collective.contract
    collective.elastic
    collective.errors
    collective.gradients
    collective.profile
    collective.testing
    collective.testing.faults
    collective.training.pipelines
""".split()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does: a broken link is an error."""
    target = tmp_path_factory.mktemp("site")
    printed("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", target, merged=True)
    return target


@pytest.fixture(scope="module")
def names(site: Path) -> set[str]:
    """Return the names that the reference documents, read from its link inventory."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}


@pytest.mark.parametrize("module", PUBLIC)
def test_reference_has_every_public_name(module: str, names: set[str]) -> None:
    framework = module.split(".")[2] if module.startswith("collective.adapters.") else "numpy"
    needs_framework = module != "collective.adapters.jax.xla"  # it must be imported before JAX
    if needs_framework and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    offered = importlib.import_module(module).__all__
    # A function can have the name of its module, under which the reference then lists it.
    listed = {name for name in offered if {f"{module}.{name}", f"{module}.{name}.{name}"} & names}
    assert listed == set(offered)


def test_reference_has_every_communicator_call(names: set[str]) -> None:
    calls = [name for name in collective.__all__ if hasattr(collective.Communicator, name)]
    assert len(calls) > 25
    assert [name for name in calls if f"collective.Communicator.{name}" not in names] == []


def test_reference_shows_types_that_checkers_see(site: Path) -> None:
    page = (site / "reference/communicator/index.html").read_text()
    blocks = re.findall(r'<div class="doc-signature[^>]*>(.*?)</div>', page, re.DOTALL)
    bare = re.compile(r"[\s\"']|<[^>]+>")
    shown = {bare.sub("", html.unescape(block)) for block in blocks}
    assert (
        "all_reduce(x:T,*,op:Op|ReduceOp=sum,out:T|None=None,order:Literal[rank]|Shards|None=None,"
        "timeout:float|None=None,async_op:bool=False,)->T|Work[T]"
    ) in shown
    assert "barrier(*,timeout:float|None=None,async_op:bool=False)->Work[None]|None" in shown
    assert "barrier(*,timeout:float|None=...,async_op:Literal[True])->Work[None]" in shown
    untyped = {signature.partition("(")[0] for signature in shown if "Any" in signature}
    # In these calls another rank decides the type, or any type is possible.
    assert untyped <= {"adopt", "broadcast", "broadcast_object", "empty", "plan", "recv", "scatter",
                       "recv_object", "scatter_object"}  # fmt: skip


def test_site_pages_load_nothing_external(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    loads = re.compile(
        r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//"
    )
    loaded = [f"{page.name}: {url}" for page in pages for url in loads.findall(page.read_text())]
    assert loaded == []


def test_search_finds_no_decisions_or_measurements(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = [entry["location"] for entry in index["docs"]]
    assert len(found) > 500
    assert [page for page in found if page.startswith(("decisions/", "measurements/"))] == []


def test_site_links_to_the_repository_only_if_it_has_an_owner(site: Path) -> None:
    (address,) = re.findall(
        r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    page = (site / "index.html").read_text()
    linked = re.search(rf"<a href=\"?{re.escape(address)}\"? ", page) is not None
    assert linked == ("__OWNER__" not in address)
    assert not [page for page in site.rglob("*.html") if "__OWNER__" in page.read_text()]
    # The theme's script asks api.github.com about the repository that such a component names.
    assert not re.search(r"data-md-component=\"?source\b", page)


def test_every_page_of_the_site_shows_the_version(site: Path) -> None:
    version = f"collective {collective.__version__}"
    assert [page for page in site.rglob("*.html") if version not in page.read_text()] == []


def test_site_styles_load_nothing_external(site: Path) -> None:
    styles = sorted(site.rglob("*.css"))
    assert styles
    loads = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*")
    assert [url for style in styles for url in loads.findall(style.read_text())] == []


def test_reference_contains_no_sphinx_roles(site: Path) -> None:
    pages = (site / "reference").rglob("*.html")
    marks = re.compile(r":(?:meth|class|func|mod|attr|data):")
    assert [page.parent.name for page in pages if marks.search(page.read_text())] == []


def test_figures_are_what_their_program_draws(tmp_path: Path) -> None:
    program = ROOT / "docs" / "hooks" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", program)
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    figures.draw(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "docs" / "figures").iterdir()}
    assert drawn == committed
    assert len(drawn) == 8


def test_copied_console_blocks_leave_out_prompts_and_output(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert '<span class="gp">$ </span>' in page
    assert '<span class="go">[0] rank 0 of 4' in page
    style = (site / "site.css").read_text()
    assert "[data-md-copying] :is(.gp, .go) { display: none; }" in style
