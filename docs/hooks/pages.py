"""Pages of the site from elsewhere in the repository, and links that also work on GitHub.

People also read the documents in the repository, where documents link to each other and to the
sources by relative paths. On the site the files of :data:`PAGES` are pages. Other files outside
``docs`` are named without a link.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]

#: Path of a file in the repository -> name of its page on the site.
PAGES = {
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
}
_ON_SITE = {page: path for path, page in PAGES.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_CODE = re.compile(r"<code>[^<]*</code>")
_OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Take the version from the package, and the repository's address from ``pyproject.toml``."""
    package = (ROOT / "collective/__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    if version is None:
        raise ValueError('collective/__init__.py: no line __version__ = "..."')
    config.copyright = f"collective {version[1]}"  # the footer of each page
    address = re.search(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if address is None:
        raise ValueError('pyproject.toml: no line Source = "..." in [project.urls]')
    if "__OWNER__" not in address[1]:  # until the repository has an owner
        config.repo_url = address[1]
        config.repo_name = address[1].partition("github.com/")[2] or address[1]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose files are outside the folder of the documentation."""
    for path, page in PAGES.items():
        if (ROOT / path).exists():
            files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of ``page`` to their targets on the site, without the owner's placeholder."""
    markdown = markdown.replace("__OWNER__", "OWNER")
    here = page.file.src_uri
    if here.startswith(("decisions/", "measurements/")):  # a reader who searches wants the manual
        page.meta.setdefault("search", {"exclude": True})
    source = _ON_SITE.get(here, f"docs/{here}")
    done, end = [], 0
    for fence in _FENCE.finditer(markdown):  # Programs stay unchanged.
        done += [_relinked(markdown[end : fence.start()], source, here), fence[0]]
        end = fence.end()
    return "".join([*done, _relinked(markdown[end:], source, here)])


def on_page_content(html: str, **_: Any) -> str:
    """Mark the options in code, which must not break after their hyphens."""
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def _relinked(text: str, source: str, here: str) -> str:
    """Return ``text`` of the file ``source`` with links that work on the page ``here``."""

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or ":" in target:
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        in_docs = path.startswith("docs/") and (ROOT / path).is_file()
        on_site = PAGES.get(path, path.removeprefix("docs/") if in_docs else None)
        if on_site is None:
            return words
        # A file name as the text of a link becomes the title.
        if words.removeprefix("docs/") in (path.removeprefix("docs/"), target):
            words = _title(ROOT / path)
        relative = os.path.relpath(on_site, os.path.dirname(here) or ".")
        return f"{picture}[{words}]({relative}{anchor})"

    return _LINK.sub(link, text)


def _title(document: Path) -> str:
    """Return the heading of a document."""
    return document.read_text().partition("\n")[0].removeprefix("# ")
