"""Settings that pyproject.toml cannot express: the index description, and a build without C."""

import os
import re
from pathlib import Path

from setuptools import Distribution, setup

ROOT = Path(__file__).resolve().parent


def description(readme: str) -> str:
    """Return the README without links to the repository's files, for package indexes.

    A package index does not have these files. A link to one of them becomes the link's text, and a
    picture becomes its alternative text; other text does not change.
    """
    return re.sub(r"!?\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", readme)


class Pure(Distribution):
    """Distribution without the native core, whose wheel is for every platform."""

    def has_ext_modules(self) -> bool:
        """Return False: there is nothing to compile."""
        return False


setup(
    long_description=description((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
    # If COLLECTIVE_NATIVE=off is set during the build, the package has no native core. Set later,
    # the same variable keeps the package from using the core.
    distclass=Pure if os.environ.get("COLLECTIVE_NATIVE", "on") in ("off", "0") else Distribution,
)
