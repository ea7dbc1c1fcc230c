"""Libraries built on torch.distributed, over this package's process group and PyTorch's Gloo.

``make test-in ENV=clients`` installs these libraries and runs this file. docs/clients.md lists the
results.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

import torch

from tests.support.interpreter import ROOT, printed
from tests.support.network_hosts import free_port

HERE = Path(__file__).parent
# For a busy machine, where the imports alone can take a minute.
DEADLINE_S = 280.0
COMPILING_S = 600.0
# DeepSpeed compiles a part of itself, with the ninja of its environment.
EXTENSIONS = ROOT / ".clients" / "extensions"
COMPILER = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
}
# For each program: the package that it needs, and its launcher.
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
    pytest.skip(
        "no client is installed; `make test-in ENV=clients` does that", allow_module_level=True
    )
LAUNCHERS = {
    "python": (),
    "collective run": ("-m", "collective", "run", "-n", "2"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
}


def outcomes(client: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    """Run a client's program and return each rank's results."""
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVE_")}
    printed(
        *LAUNCHERS[CLIENTS[client][1]], HERE / f"{client}.py", "--backend", backend,
        "--out", folder, cwd=folder, env=environment, timeout=DEADLINE_S,
        **COMPILER,
        PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MASTER_PORT=str(free_port()),
    )  # fmt: skip
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def same(outcome: Any, wanted: Any, where: str) -> None:
    """Check that two outcomes have the same bits."""
    assert type(outcome) is type(wanted), where
    if isinstance(wanted, dict):
        assert outcome.keys() == wanted.keys(), where
        for name in wanted:
            same(outcome[name], wanted[name], f"{where}: {name}")
    elif isinstance(wanted, (list, tuple)):
        assert len(outcome) == len(wanted), where
        for index, pair in enumerate(zip(outcome, wanted)):
            same(*pair, f"{where}[{index}]")
    elif isinstance(wanted, torch.Tensor):
        assert outcome.dtype == wanted.dtype, where
        assert torch.equal(outcome, wanted), where
    else:
        assert outcome == wanted, where


def compile_for_deepspeed() -> None:
    """Compile what DeepSpeed needs on a CPU, which it would do at its first use."""
    # A compilation that was interrupted leaves a lock for which the next one would wait.
    for lock in EXTENSIONS.rglob("lock"):
        lock.unlink()
    printed(
        "-c",
        "from deepspeed.accelerator import get_accelerator as get;"
        "get().create_op_builder('ShareMemCommBuilder').load(verbose=False)",
        timeout=COMPILING_S,
        **COMPILER,
    )


@pytest.mark.timeout(2 * DEADLINE_S + COMPILING_S + 20)
@pytest.mark.parametrize("client", CLIENTS)
def test_client_has_same_outcome_as_over_gloo(client: str, tmp_path: Path) -> None:
    package = CLIENTS[client][0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test-in ENV=clients` does that")
    if package == "deepspeed":
        compile_for_deepspeed()
    over_collective = outcomes(client, "collective", tmp_path / "ours")
    over_gloo = outcomes(client, "gloo", tmp_path / "gloo")
    assert [outcome.pop("over") for outcome in over_collective] == ["shm"] * 2
    assert [outcome.pop("over") for outcome in over_gloo] == ["gloo"] * 2
    assert over_collective[0]["processes"] == 2
    # The sum of two numbers does not depend on their order, so with two ranks the bits are equal.
    same(over_collective, over_gloo, client)
    # With a wrapper that reduces nothing, the ranks' weights would differ.
    if "weights" in over_collective[0]:
        same(over_collective[1]["weights"], over_collective[0]["weights"], "rank 1 and rank 0")
