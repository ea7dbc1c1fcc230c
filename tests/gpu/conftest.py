"""Tests that need a GPU, NCCL and a framework; skipped elsewhere.

``make test-gpu`` runs them (run.py). ``GPU_TESTS_NCCL_LIBRARY`` and ``GPU_TESTS_CUDA_LIBRARY`` name
other libraries than those that are found: the ABI fake's, say (../test_gpu_suite.py).
"""

from __future__ import annotations

import os

for _name in ("NCCL_LIBRARY", "CUDA_LIBRARY"):
    if os.environ.get(f"GPU_TESTS_{_name}"):
        os.environ[f"COLLECTIVE_{_name}"] = os.environ[f"GPU_TESTS_{_name}"]
