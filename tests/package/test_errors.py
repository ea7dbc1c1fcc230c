"""The error tree: what programs written for other libraries catch, and what an error carries."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from collective import errors

KINDS = [getattr(errors, name) for name in errors.__all__]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
# What an error carries beside its text.
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
def test_every_error_is_a_runtime_error_of_ours(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.CollectiveError)
    assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize(("kind", "other"), ALSO.items(), ids=lambda kind: kind.__name__)
def test_an_error_is_what_the_standard_library_calls_it(kind: Any, other: Any) -> None:
    assert issubclass(kind, other)


@every_kind
def test_an_error_survives_a_pipe(kind: type[Exception]) -> None:
    carried = CARRIED.get(kind, {})
    error = pickle.loads(pickle.dumps(kind("op: given; allowed", **carried)))
    assert type(error) is kind
    assert str(error) == "op: given; allowed"
    assert error.args == ("op: given; allowed",)
    assert {name: getattr(error, name) for name in carried} == carried


def test_an_error_of_import_knows_its_text() -> None:
    assert errors.BackendUnavailableError("mpi: no MPI").msg == "mpi: no MPI"
