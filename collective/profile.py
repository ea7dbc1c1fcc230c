"""What programs mark for ``collective profile``."""

from collective.tools.profile import step

__all__ = ["step"]
