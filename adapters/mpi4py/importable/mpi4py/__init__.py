"""mpi4py over collective: programs of mpi4py run unmodified, and without MPI.

``collective run --mpi4py`` puts the folder of this package first on the path of the program.
"""

from __future__ import annotations

from typing import Any

__version__ = "4.1.2"
__all__ = ["MPI"]


class Rc:
    """Settings of mpi4py. They are accepted, and only ``initialize`` of a program can differ.

    Call it with keywords to set some.
    """

    initialize = True
    threads = True
    thread_level = "multiple"
    finalize: bool | None = None
    fast_reduce = True
    recv_mprobe = True
    irecv_bufsz = 32768
    errors = "exception"

    def __init__(self, **settings: Any) -> None:
        self(**settings)

    def __call__(self, **settings: Any) -> None:
        for name in settings:
            if not hasattr(self, name):
                raise TypeError(f"unexpected argument {name!r}")
        vars(self).update(settings)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{__name__}.rc({settings})"


rc = Rc()


def get_include() -> str:
    """Raise: there are no headers, as a module in C could not work over collective."""
    raise NotImplementedError(
        "mpi4py.get_include: mpi4py is collective.adapters.mpi4py here, which has no headers for "
        "modules in C or Cython. Run such a program over MPI, without --mpi4py."
    )


def get_config() -> dict[str, str]:
    """Return no settings of a build: there is no MPI."""
    return {}


def profile(name: str, *, path: Any = None) -> None:
    """Raise: there is no MPI library in which a profiler could be put."""
    raise ValueError(f"profiler {name!r}: there is no MPI. Use `collective profile`.")
