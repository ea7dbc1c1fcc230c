"""Nested lists, tuples and dicts of arrays, as a flat list of leaves and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from collective.errors import InvalidArgumentError


def is_tree(x: Any) -> bool:
    """Tell whether ``x`` is a container of arrays."""
    return isinstance(x, (list, tuple, dict))


def flatten(tree: Any) -> list[Any]:
    """Return the leaves; those of a dict are in the order of the text of their keys.

    Raises:
        InvalidArgumentError: a dict's keys cannot be sorted, or the structure contains itself.
    """
    leaves: list[Any] = []
    try:
        _walk(tree, leaves.append)
    except RecursionError:
        raise _endless() from None
    return leaves


def _walk(tree: Any, visit: Callable[[Any], Any]) -> None:
    if isinstance(tree, dict):
        for key in _keys(tree):
            _walk(tree[key], visit)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _walk(item, visit)
    else:
        visit(tree)


def rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return a container like ``tree``, with ``leaves`` in the places of the leaves of ``tree``.

    The containers are lists, tuples, named tuples and dicts, also where ``tree`` has others that
    derive from these classes.
    """
    if isinstance(tree, dict):
        built = {key: rebuild(tree[key], leaves) for key in _keys(tree)}
        return {key: built[key] for key in tree}
    if isinstance(tree, tuple):
        items = [rebuild(item, leaves) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [rebuild(item, leaves) for item in tree]
    return next(leaves)


def is_plain(tree: Any) -> bool:
    """Tell whether :func:`rebuild` makes containers of the same classes as those of ``tree``."""
    if isinstance(tree, dict):
        return type(tree) is dict and all(map(is_plain, tree.values()))
    if isinstance(tree, (list, tuple)):
        kept = type(tree) in (list, tuple) or hasattr(tree, "_fields")
        return kept and all(map(is_plain, tree))
    return True


def skeleton(tree: Any) -> Any:
    """Return only the nesting, in a form for JSON; all ranks must have the same.

    Raises:
        InvalidArgumentError: as :func:`flatten`; or two keys of a dict have the same text.
    """
    try:
        return _skeleton(tree)
    except RecursionError:
        raise _endless() from None


def _skeleton(tree: Any) -> Any:
    if isinstance(tree, dict):
        nesting = {str(key): _skeleton(tree[key]) for key in _keys(tree)}
        if len(nesting) < len(tree):  # ranks without a template would miss a leaf
            raise InvalidArgumentError(
                f"structure: two of the keys {list(tree)[:4]} have the same text, by which ranks "
                "tell keys apart; use strings."
            )
        return nesting
    if isinstance(tree, (list, tuple)):
        return [_skeleton(item) for item in tree]
    return 0


def _endless() -> InvalidArgumentError:
    return InvalidArgumentError(
        "structure: it contains itself, or is nested too deeply. Remove the reference to itself, "
        "or pass the nested parts one by one."
    )


def _keys(tree: dict[Any, Any]) -> list[Any]:
    try:
        keys = sorted(tree)
    except TypeError:
        raise InvalidArgumentError(
            f"structure: the keys {list(tree)[:4]} cannot be sorted, so ranks could not agree "
            "on their order; use strings."
        ) from None
    # Sort keys by their text (10 before 2): a skeleton from another rank has only the texts.
    return sorted(keys, key=str)
