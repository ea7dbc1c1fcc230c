"""What pyproject.toml cannot say: the description for package indexes, and a build without C."""

import os
import re
from pathlib import Path

from setuptools import Distribution, setup

ROOT = Path(__file__).resolve().parent


def description(readme: str) -> str:
    """Return the README as a package index shows it, which has none of the repository's files.

    Links to them become their words, and pictures what they show; the rest is as it was.
    """
    return re.sub(r"!?\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", readme)


class Pure(Distribution):
    """A package without the native core, whose wheel is for every platform."""

    def has_ext_modules(self) -> bool:
        """Say that there is nothing to compile."""
        return False


setup(
    long_description=description((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
    # COLLECTIVE_NATIVE=off leaves the core out where it is set while building, as it does later.
    distclass=Pure if os.environ.get("COLLECTIVE_NATIVE", "on") in ("off", "0") else Distribution,
)
