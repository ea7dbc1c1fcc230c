"""The transports that can be had here, and why others cannot, in the doctor's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collective.backends.hierarchical import HierarchicalBackend
from collective.contract import registry
from collective.contract.world import World
from collective.errors import BackendUnavailableError
from collective.testing.ranks import backend_class

__all__ = ["Transport", "TwoHosts", "survey"]

# One machine has one host, so hierarchical would not use the network at all.
_STAND_INS = {"hierarchical": f"{__name__}:TwoHosts"}


@dataclass(frozen=True)
class Transport:
    """One that was asked for.

    Attributes:
        name: as it was asked for.
        backend: what ranks are started with.
        on_host, on_gpu: whether it takes arrays there.
        reason: why it does not work here; empty if it does.
        fix: a command that mends it, if there is one.
    """

    name: str
    backend: str
    on_host: bool = True
    on_gpu: bool = True
    reason: str = ""
    fix: str = ""


class TwoHosts(HierarchicalBackend):
    """``hierarchical`` with the last rank on another host: the network has something to carry."""

    @classmethod
    def host_of(cls, world: World) -> str:
        return "other" if world.rank == world.size - 1 else "this"


def survey(
    names: Sequence[str] | None, progress: Callable[[str], None] = lambda text: None
) -> list[Transport]:
    """Return the transports called ``names``, or all that are known.

    Args:
        names: registered names, or ``module:Class``.
        progress: told what is looked at.

    Raises:
        BackendNotFoundError: there is none of that name.
    """
    chosen = registry.names() if names is None else list(dict.fromkeys(names))
    for name in chosen:
        try:
            registry.find(name)
        except BackendUnavailableError as error:
            if name not in registry.names():
                raise error
    ill: dict[str, tuple[str, str]] = {}
    doubtful = [name for name in chosen if name not in ("shm", "threads") and ":" not in name]
    if doubtful:
        from collective.tools.doctor import examine

        found = examine(progress=progress)["transports"]
        ill = {
            name: (found[name]["reason"], found[name]["fix"])
            for name in doubtful
            # One that did not answer in time may do so when it is used.
            if name in found and found[name]["works"] is False
        }
    return [_transport(name, *ill.get(name, ("", ""))) for name in chosen]


def _transport(name: str, reason: str, fix: str) -> Transport:
    backend = _STAND_INS.get(name, name)
    if reason:
        return Transport(name, backend, reason=reason, fix=fix)
    devices = backend_class(backend).capabilities.devices
    # Where there are no arrays on GPUs, the communicator takes them through the host.
    return Transport(name, backend, on_host="cpu" in devices, on_gpu=True)
