"""Programs that use only the backend's name: under launchers, compared with PyTorch's Gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from tests import warm
from tests.support.interpreter import run_python
from tests.support.launches import ROOT
from tests.support.torch_groups import installed

pytestmark = pytest.mark.whole

EXAMPLES = {
    "ddp.py": ["--epochs", "2"],
    "fsdp2.py": ["--steps", "10"],
    "dtensor.py": ["--steps", "20"],
    "checkpointing.py": [],
}
LAUNCHERS = {
    "collective run": ["-m", "collective", "run", "-n", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


# One launch runs all examples, because starting the processes takes longer than the examples.
# Each example has a separate store: torch's Gloo would mistake the addresses of the previous group
# for those of the next.
OVER_GLOO = """
import functools, os, runpy, sys
import torch.distributed as dist

init = dist.init_process_group
for example, arguments in {examples!r}.items():
    sys.argv = [example, *arguments, "--backend", "gloo"]
    dist.init_process_group = functools.partial(
        init, init_method="file://{folder}/" + example,
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )
    runpy.run_path("{examples_folder}/" + example, run_name="__main__")
    if os.environ["RANK"] == "0":
        print("end of", example)
"""


def printed(folder: Path, launcher: str, script: object, *arguments: str) -> list[str]:
    """Run a program on two ranks with the package importable as if installed.

    Return rank 0's output lines.
    """
    site = folder / "site"
    if not site.exists():
        installed(folder)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVE_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    done = run_python(
        *LAUNCHERS[launcher], script, *arguments, python=warm.python(), cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = (line.removeprefix("[0] ") for line in done.stdout.splitlines())
    return [line for line in lines if line and not line.startswith("[1]")]


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the lines that each example prints over PyTorch's Gloo."""
    folder = tmp_path_factory.mktemp("gloo")
    script = folder / "all.py"
    script.write_text(
        OVER_GLOO.format(folder=folder, examples_folder=ROOT / "examples", examples=EXAMPLES)
    )
    outputs: dict[str, list[str]] = {}
    current: list[str] = []
    for line in printed(folder, "torchrun", script):
        if line.startswith("end of "):
            outputs[line.removeprefix("end of ")], current = current, []
        else:
            current.append(line)
    return outputs


# One example also runs under torchrun, which imports PyTorch itself.
@pytest.mark.parametrize(
    ("example", "launcher"),
    [("ddp.py", "torchrun"), *((example, "collective run") for example in EXAMPLES)],
)
def test_example_prints_same_lines_as_over_gloo(
    over_gloo: dict[str, list[str]], example: str, launcher: str, tmp_path: Path
) -> None:
    script = ROOT / "examples" / example
    assert len(over_gloo[example]) >= 2
    assert printed(tmp_path, launcher, script, *EXAMPLES[example]) == over_gloo[example]
