"""Line of a ``.pth`` file that repairs Chainer in every program of an environment.

::

    python -m collective.adapters.chainer.compatibility.startup > …/collective_chainer.pth

Python runs this line at every start. So the line only puts a finder in front of the others. This
finder imports this package when Chainer is about to be imported.
"""

from __future__ import annotations

import inspect

__all__ = ["Later", "line"]


class Later:
    """Finder that repairs Chainer when Chainer is about to be imported."""

    # A line of a .pth file has neither types nor globals.
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in ("chainer", "chainermn", "chainerx"):
            return None
        import importlib.util
        import sys

        import collective.adapters.chainer  # noqa: F401

        if self in sys.meta_path:
            sys.meta_path.remove(self)
        return importlib.util.find_spec(name)


def line() -> str:
    """Return the line, for a file in a ``site-packages`` directory."""
    program = f"{inspect.getsource(Later)}sys.meta_path.insert(0, Later())\n"
    return f"import sys; exec({program!a})"


if __name__ == "__main__":
    print(line())
