"""Conversion of this project's docstrings to the Markdown that the site generator reads.

The docstrings follow Google's style, with four additions: roles (``:meth:`send```), blocks of
code after two colons, comments ``#:`` above attributes, and sections *Raises* that refer in words
to another call's section. Each addition is from Sphinx or of this project.
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:meth|class|func|mod|attr|data):`~?([^`]+)`")
_BLOCK = re.compile(r"(?m)^(.*?) *::$")
_NAMES = re.compile(r"(?m)^    \w+(?:, \*{0,2}\w+)+(?=:)")
_RAISES = re.compile(r"(?m)^Raises:\n((?:    .*(?:\n|\Z))+)")
_ENTRY = re.compile(r"    [A-Z]\w+(?:, [A-Z]\w+)*(?:,\n    (?! ).*?)*: ")


class HouseStyle(griffe.Extension):
    """Extension that converts the docstrings of all loaded objects to Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value, obj)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the package's docstring, for which griffe does not call :meth:`on_object`."""
        self.on_object(obj=pkg)
        typed = pkg["communicator.signatures.Communicator"]
        for name, overloads in typed.overloads.items():
            method = next(base.members[name] for base in typed.mro() if name in base.members)
            _show_types(method, overloads or [typed.members[name]])
        for name in list(typed.members):  # These members hide the methods with docstrings.
            typed.del_member(name)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Document an attribute: a module-level call by its method, others by ``#:`` comments."""
        call = re.fullmatch(r"_of_current\(\w+\.(\w+)\)", str(attr.value))
        shared = re.fullmatch(r"_calls\.(\w+)", str(attr.value))
        if shared:
            method = f"Differentiable.{shared[1]}"
            text = _reference(f"collective.training.differentiable.{method}", method)
            attr.docstring = griffe.Docstring(f"The call {text}.", parent=attr)
            attr.value = None
            attr.labels.clear()
        elif call:
            method = f"Communicator.{call[1]}"
            text = f"{_reference(f'collective.{method}', method)} of the current communicator."
            attr.docstring = griffe.Docstring(text, parent=attr)
            attr.value = None
            attr.labels.clear()
        elif attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            above = attr.filepath.read_text().splitlines()[: attr.lineno - 1]
            count = len(above) - len(list(takewhile(_is_comment, reversed(above))))
            text = "\n".join(line.strip().removeprefix("#:").strip() for line in above[count:])
            attr.docstring = griffe.Docstring(text, parent=attr) if text else None


def _show_types(function: griffe.Function, overloads: list[griffe.Function]) -> None:
    """Give ``function`` the types of its overloads, of which the last one is the most general.

    The function keeps its defaults, because overloads have ``...`` instead.
    """
    function.overloads = overloads if len(overloads) > 1 else []
    for parameter in function.parameters:
        if parameter.name in overloads[-1].parameters:
            parameter.annotation = overloads[-1].parameters[parameter.name].annotation
    function.returns = overloads[-1].returns


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#:")


def as_markdown(text: str, obj: griffe.Object) -> str:
    """Return a docstring of ``obj`` as Markdown."""
    text = _ROLE.sub(lambda role: _reference(_path(role[1], obj), role[1]), text)
    text = _BLOCK.sub(lambda block: block[1] + ":" if block[1].strip() else "", text)
    # An entry for several names gets no-break spaces, because a plain space would end the name.
    text = _NAMES.sub(lambda several: several[0].replace(", ", ",\N{NO-BREAK SPACE}"), text)
    return _RAISES.sub(_raises, text)


def _raises(section: re.Match[str]) -> str:
    if _ENTRY.match(section[1]):
        return section[0]
    return "**Raises:** " + " ".join(section[1].split()) + "\n"


def _path(name: str, obj: griffe.Object) -> str:
    """Return the full path of the object that ``name`` means in the scope of ``obj``."""
    try:
        return obj.resolve(name)
    except griffe.NameResolutionError:
        owner: griffe.Object | griffe.Alias = obj.parent or obj
        return f"{owner.path}.{name}" if name in owner.all_members else name


def _reference(path: str, words: str) -> str:
    """Return ``words`` as code, with a link to ``path`` if that has a page."""
    return f'<autoref identifier="{path}" optional><code>{words}</code></autoref>'
