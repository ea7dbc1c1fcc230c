"""Part of ``pkg_resources`` that Chainer uses, to check whether requirements are installed.

The names are those of ``pkg_resources``, which setuptools no longer has.
"""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement


class ResolutionError(Exception):
    """Requirement that is not met."""


class DistributionNotFound(ResolutionError):
    """Requirement whose package is not installed."""


class VersionConflict(ResolutionError):
    """Requirement whose package is installed in another version."""


def get_distribution(name: str) -> importlib.metadata.Distribution:
    """Return the distribution that is installed under that name, with its ``version``.

    Raises:
        DistributionNotFound: there is none.
    """
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise DistributionNotFound(name) from error


def require(*requirements: str) -> None:
    """Check that each requirement is installed; pre-releases count.

    Raises:
        DistributionNotFound, VersionConflict: a requirement is not installed.
    """
    for text in requirements:
        requirement = Requirement(text)
        installed = get_distribution(requirement.name).version
        if not requirement.specifier.contains(installed, prereleases=True):
            raise VersionConflict(f"{text}: {installed} is installed")


class WorkingSet:
    """Set of the installed packages."""

    def require(self, *requirements: str) -> None:
        """Check the requirements in the same way as :func:`require`."""
        require(*requirements)
