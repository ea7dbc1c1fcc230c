"""Libraries that stand on torch.distributed, over our process group and over PyTorch's Gloo.

``make clients`` installs them beside and runs this; docs/clients.md says what came of it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

import torch

from tests.support.interpreter import ROOT, printed
from tests.support.network_hosts import free_port

HERE = Path(__file__).parent
# Of a busy machine, whose imports alone can take a minute.
DEADLINE_S = 280.0
# Programs, what they need, and how they are started.
CLIENTS = {
    "ddp_tutorial": ("torch", "python"),
    "accelerate_loop": ("accelerate", "collective run"),
    "trainer": ("transformers", "torchrun"),
    "lightning_fit": ("lightning", "collective run"),
    "metrics": ("torchmetrics", "torchrun"),
    "deepspeed_zero": ("deepspeed", "collective run"),
}
if not any(
    importlib.util.find_spec(package) for package, _ in CLIENTS.values() if package != "torch"
):
    pytest.skip("no client is installed; `make clients` does that", allow_module_level=True)
LAUNCHERS = {
    "python": (),
    "collective run": ("-m", "collective", "run", "-n", "2"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
}


def outcomes(client: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    """Run a client's program and return what each rank found."""
    folder.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVE_")}
    printed(
        *LAUNCHERS[CLIENTS[client][1]], HERE / f"{client}.py", "--backend", backend,
        "--out", folder, cwd=folder, env=kept, timeout=DEADLINE_S,
        PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MASTER_PORT=str(free_port()),
    )  # fmt: skip
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def same(found: Any, wanted: Any, where: str) -> None:
    """Hold two outcomes to the same bits."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted:
            same(found[name], wanted[name], f"{where}: {name}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for index, pair in enumerate(zip(found, wanted)):
            same(*pair, f"{where}[{index}]")
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, where
        assert torch.equal(found, wanted), where
    else:
        assert found == wanted, where


@pytest.mark.timeout(2 * DEADLINE_S + 20)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_ends_as_over_gloo(client: str, tmp_path: Path) -> None:
    package = CLIENTS[client][0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make clients` does that")
    ours = outcomes(client, "collective", tmp_path / "ours")
    gloo = outcomes(client, "gloo", tmp_path / "gloo")
    assert [found.pop("over") for found in ours] == ["shm"] * 2
    assert [found.pop("over") for found in gloo] == ["gloo"] * 2
    assert ours[0]["processes"] == 2
    # Two ranks' numbers have one sum, whoever adds them: the same bits are right to ask for.
    same(ours, gloo, client)
    # A wrapper that reduced nothing would leave each rank with weights of its own.
    if "weights" in ours[0]:
        same(ours[1]["weights"], ours[0]["weights"], "rank 1 and rank 0")
