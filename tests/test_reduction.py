"""The arithmetic of reductions, against torch, ml_dtypes and cases worked out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective import reduction
from collective.dtypes import BY_NAME, DType
from collective.errors import DtypeError, InvalidArgumentError
from collective.ops import NAMES, ReduceOp, as_op, premul_sum, user_op
from collective.reduction import bfloat16_to_float32, float32_to_bfloat16

torch = pytest.importorskip("torch") if False else None
Array = np.ndarray[Any, Any]
BF16, F16, F32 = BY_NAME["bfloat16"], BY_NAME["float16"], BY_NAME["float32"]
EVERY_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16)
