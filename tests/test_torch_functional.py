"""Differentiable collectives: derivatives of the whole, of all ranks' results by all ranks' inputs.

The rows of the Jacobian come from backward passes, each from one element of one rank's result;
its columns from central differences, one element of one rank's input moved at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from collective import ANY_SOURCE, run_ranks_backend  # noqa: E402
