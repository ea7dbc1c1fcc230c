"""What Chainer asks of ``pkg_resources``: whether requirements are installed.

The names are those of ``pkg_resources``, which setuptools no longer has.
"""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

__all__ = [
    "DistributionNotFound",
    "ResolutionError",
    "VersionConflict",
    "WorkingSet",
    "get_distribution",
    "require",
]


class ResolutionError(Exception):
    """A requirement is not met."""


class DistributionNotFound(ResolutionError):
    """The package is not installed."""


class VersionConflict(ResolutionError):
    """The package is installed in another version."""


def get_distribution(name: str) -> importlib.metadata.Distribution:
    """Return what is installed under that name, with its ``version``.

    Raises:
        DistributionNotFound: nothing is.
    """
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise DistributionNotFound(name) from error


def require(*requirements: str) -> None:
    """Check that each requirement is installed; pre-releases count.

    Raises:
        DistributionNotFound, VersionConflict: one is not.
    """
    for text in requirements:
        requirement = Requirement(text)
        found = get_distribution(requirement.name).version
        if not requirement.specifier.contains(found, prereleases=True):
            raise VersionConflict(f"{text}: {found} is installed")


class WorkingSet:
    """The packages that are installed."""

    def require(self, *requirements: str) -> None:
        """As :func:`require`."""
        require(*requirements)
