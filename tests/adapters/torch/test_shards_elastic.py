"""Virtual shards through a kill and the join of a replacement: the bits of one process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.interpreter import run_python

pytestmark = [
    pytest.mark.whole,
]

FAR_S = 120
# Rank 0 kills itself in the middle of a step. The other ranks wait for its replacement before a
# later step, so that steps are made by three ranks, by two, and by three again.
PROGRAM = """
import hashlib, os, signal, sys, time
import torch
from torch import nn
import collective
from collective import elastic
from collective.adapters.torch import DistributedDataParallel

torch.set_num_threads(1)
killing = "kill" in sys.argv
comm = collective.init()
first = None if comm.membership.joins else comm.rank
torch.manual_seed(3)
front = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2)
net = nn.Sequential(*front, nn.Linear(16, 2))
model = DistributedDataParallel(net, comm, shards=4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
state = elastic.State(comm, model=model, optimizer=optimizer, step=0)
sizes = set()
for generation in elastic.generations(comm, state):
    with generation as comm:
        while state.step < 9:
            if killing and state.step == 6 and comm.size < 3:
                time.sleep(0.02)
                state.commit()
                continue
            sizes.add(comm.size)
            for shard in model.each_shard():
                torch.manual_seed(model.shards.seed(shard, state.step))
                x, y = torch.randn(8, 6), torch.randn(8, 2)
                loss = ((model(x) - y) ** 2).mean()
                if killing and first == 0 and state.step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
            optimizer.step()
            state.step += 1
            state.commit()
bits = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
print(hashlib.sha256(bits).hexdigest(), sorted(sizes))
"""


def launched(program: Path, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
    done: subprocess.CompletedProcess[str] = run_python(
        "-m", "collective", "run", *options, program, *arguments, timeout=2 * FAR_S,
        COLLECTIVE_SHRINK_GRACE="0.5", COLLECTIVE_TIMEOUT=str(FAR_S),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return sorted(line.partition("] ")[2] for line in done.stdout.splitlines())


def test_training_through_kill_and_join_has_the_bits_of_one_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (alone,) = launched(program, "-n", "1")
    digest = alone.split()[0]
    elastic = ["-n", "3", "--min-ranks", "2", "--replace"]
    lines = launched(program, *elastic, arguments=("kill",))
    assert lines == sorted([f"{digest} [2, 3]", f"{digest} [2, 3]", f"{digest} [3]"])
