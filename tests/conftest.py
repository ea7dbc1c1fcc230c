"""What holds for all tests: they run as if no launcher and no setting were there."""

from __future__ import annotations

import os

_PREFIXES = ("COLLECTIVE_", "HYDRA_", "I_MPI_", "MPI_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
_NAMES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES |= {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}

for _name in list(os.environ):
    if _name in _NAMES or _name.startswith(_PREFIXES):
        del os.environ[_name]
