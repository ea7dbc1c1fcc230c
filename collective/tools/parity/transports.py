"""The transports that work here, and why others do not, in the doctor's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collective import BackendUnavailableError
from collective.backends.hierarchical import HierarchicalBackend
from collective.inner import World, registry
from collective.testing.ranks import backend_class

# hierarchical on a single host would not use the network at all, so a stand-in simulates two hosts.
_STAND_INS = {"hierarchical": f"{__name__}:TwoHosts"}


@dataclass(frozen=True)
class Transport:
    """Transport to compare.

    Attributes:
        name: name in the user's request.
        backend: name of the transport that the ranks use.
        on_host: whether the transport takes arrays on the CPU.
        reason: why the transport cannot be used here; "" if it can.
        fix: command that mends the fault, or "".
    """

    name: str
    backend: str
    on_host: bool = True
    reason: str = ""
    fix: str = ""


class TwoHosts(HierarchicalBackend):
    """``hierarchical`` that takes the last rank for one on another host, to use the network."""

    @classmethod
    def host_of(cls, world: World) -> str:
        return "other" if world.rank == world.size - 1 else "this"


def survey(
    names: Sequence[str] | None, progress: Callable[[str], None] = lambda text: None
) -> list[Transport]:
    """Return the transports called ``names``, or all registered transports.

    Args:
        names: registered names, or ``module:Class``.
        progress: called with a text about the current examination.

    Raises:
        BackendNotFoundError: there is no transport of that name.
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
            # A transport that did not answer in time may still work.
            if name in found and found[name]["works"] is False
        }
    return [_transport(name, *ill.get(name, ("", ""))) for name in chosen]


def _transport(name: str, reason: str, fix: str) -> Transport:
    backend = _STAND_INS.get(name, name)
    on_host = bool(reason) or "cpu" in backend_class(backend).capabilities.devices
    return Transport(name, backend, on_host, reason, fix)
