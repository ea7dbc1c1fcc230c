"""The error tree: base classes that other libraries' programs catch, and attributes of errors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from collective import errors

pytestmark = pytest.mark.quick

KINDS = [getattr(errors, name) for name in errors.__all__]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
# The attributes of errors beside their text.
CARRIED: dict[type[Exception], dict[str, Any]] = {
    errors.PeerLostError: {"ranks": (1, 2)},
    errors.PeerFailedError: {"rank": 1, "traceback": "Traceback …"},
    errors.CollectiveTimeoutError: {"ranks": (2,)},
    errors.BackendError: {"backend": "gloo", "code": 3},
    errors.BackendUnavailableError: {"name": "mpi4py"},
}
ALSO = {
    errors.InvalidArgumentError: ValueError,
    errors.ConfigError: ValueError,
    errors.AllocationError: MemoryError,
    errors.UnsupportedError: NotImplementedError,
    errors.BackendNotFoundError: LookupError,
    errors.BackendUnavailableError: ImportError,
    errors.CollectiveTimeoutError: TimeoutError,
}


@every_kind
def test_errors_derive_from_collective_error_and_runtime_error(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.CollectiveError)
    assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize(("kind", "other"), ALSO.items(), ids=lambda kind: kind.__name__)
def test_errors_derive_from_standard_class(kind: Any, other: Any) -> None:
    assert issubclass(kind, other)


@every_kind
def test_errors_survive_pickle(kind: type[Exception]) -> None:
    carried = CARRIED.get(kind, {})
    error = pickle.loads(pickle.dumps(kind("op: given; allowed", **carried)))
    assert type(error) is kind
    assert str(error) == "op: given; allowed"
    assert error.args == ("op: given; allowed",)
    assert {name: getattr(error, name) for name in carried} == carried


def test_import_error_has_message_attribute() -> None:
    assert errors.BackendUnavailableError("mpi: no MPI").msg == "mpi: no MPI"
