"""PyTorch's own pipelines (torch.distributed.pipelining) on MNIST digits, over any backend.

Run: collective run -n 2 examples/pipeline.py [--schedule gpipe]
 or: torchrun --nproc-per-node 2 examples/pipeline.py [--backend gloo]

A network is cut into stages, one on each rank, and each batch passes through them in
micro-batches. The stages take about equally long. Rank 0 then trains the whole network alone on
the same batches, and compares the gradients and weights: if they differ, the exit code is 1.

The program prints the share of time in which the ranks waited, and draws both losses and a step's
timeline; ``pipeline_report.py`` explains the figures. The network computes in double precision, so
the compared values differ by rounding alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mnist_sgd import Digits, load_digits
from pipeline_report import compare, idle_lines, plot, time_line
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from collective.adapters.torch import plugin  # noqa: F401  # registers the backend "collective"
from collective.training.pipelines import Span

PASSED = 64  # values per sample that a stage passes to the next one
SETTLING = 2  # first steps, not measured, in which memory is touched for the first time
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class TimedStage(PipelineStage):
    """Stage that records when it computes; torch's schedules wait outside of these methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spans: list[Span] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of a micro-batch."""
        start, cpu = time.perf_counter(), time.thread_time()
        outputs = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._note("forward", fwd_chunk_id, start, cpu)
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a micro-batch."""
        start, cpu = time.perf_counter(), time.thread_time()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._note("backward", bwd_chunk_id, start, cpu)

    def _note(self, kind: Any, microbatch: int, start: float, cpu: float) -> None:
        # All processes of a host share this clock.
        end = time.perf_counter()
        self.spans.append(Span(kind, microbatch, start, end, time.thread_time() - cpu))


def stages(size: int, width: int, seed: int) -> list[nn.Sequential]:
    """Return the network, cut into stages at its narrow layers, where little data passes.

    The stages take about equally long: the first one has one layer less than the others, but more
    inputs, the pixels.
    """
    random = torch.Generator().manual_seed(seed)
    networks = []
    for rank in range(size):
        widths = [PASSED, width, width, width, PASSED] if rank else [784, width, width, PASSED]
        layers: list[nn.Module] = [] if rank else [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [dense(inputs, outputs, random), nn.Tanh()]
        networks.append(layers)
    networks[-1].append(dense(PASSED, 10, random))
    return [nn.Sequential(*layers) for layers in networks]


def dense(inputs: int, outputs: int, random: torch.Generator) -> nn.Linear:
    """Return a layer whose initial weights keep the values' size; PyTorch's defaults reduce it."""
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    nn.init.normal_(layer.weight, std=inputs**-0.5, generator=random)
    nn.init.zeros_(layer.bias)
    return layer


def batches(digits: Digits, options: argparse.Namespace) -> Iterator[Digits]:
    """Yield each step's digits; omit digits that do not fill a batch.

    torch averages over micro-batches. The result is the batch's mean only if all micro-batches are
    equally long.
    """
    for epoch in range(options.epochs):
        order = np.random.default_rng((options.seed, epoch)).permutation(len(digits))
        for start in range(0, len(order) - options.batch + 1, options.batch):
            yield digits[order[start : start + options.batch]]


def optimizer_of(stage: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return the optimizer of a stage, or of the whole network."""
    return torch.optim.SGD(stage.parameters(), lr=options.lr, momentum=0.9)


def state_of(stage: nn.Module) -> dict[str, Any]:
    """Return the weights and gradients of a stage."""
    weights = {name: p.detach().clone() for name, p in stage.named_parameters()}
    gradients = {f"{name} grad": p.grad.clone() for name, p in stage.named_parameters()}
    return weights | gradients


def train(digits: Digits, options: argparse.Namespace) -> list[Any]:
    """Train this rank's stage; return its state, and each step's loss, timeline and seconds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = stages(size, options.width, options.seed)[rank]
    stage = TimedStage(module, rank, size, torch.device("cpu"))
    schedule = SCHEDULES[options.schedule](
        stage, options.microbatches, loss_fn=nn.functional.cross_entropy
    )
    optimizer = optimizer_of(module, options)
    losses, timelines, seconds = [], [], []
    for batch in batches(digits, options):
        start = time.perf_counter()
        optimizer.zero_grad()
        stage.spans = []
        batch_losses: list[torch.Tensor] = []
        inputs = (batch.images,) if rank == 0 else ()
        if rank == size - 1:
            schedule.step(*inputs, target=batch.labels, losses=batch_losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        losses.append(sum(loss.item() for loss in batch_losses) / options.microbatches)
        seconds.append(time.perf_counter() - start)
        timelines.append(stage.spans)
    return [state_of(module), losses, timelines, seconds]


def train_alone(size: int, digits: Digits, options: argparse.Namespace) -> list[Any]:
    """Train in this process on whole batches; return the stages' states, losses and seconds."""
    cut = stages(size, options.width, options.seed)
    network = nn.Sequential(*cut)
    optimizer, losses, seconds = optimizer_of(network, options), [], []
    for batch in batches(digits, options):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(batch.images), batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return [[state_of(stage) for stage in cut], losses, seconds]


def accuracy(states: Sequence[Any], digits: Digits, options: argparse.Namespace) -> float:
    """Return the share of digits that the stages with these states recognise."""
    cut = stages(len(states), options.width, options.seed)
    for stage, state in zip(cut, states):
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    with torch.no_grad():
        predicted = nn.Sequential(*cut)(digits.images).argmax(1)
    return (predicted == digits.labels).double().mean().item()


def report(
    everything: list[Any], digits: Digits, for_test: Digits, options: argparse.Namespace
) -> int:
    """Compare the pipeline with one process, print and draw; return the exit code."""
    states, losses, timelines, seconds = zip(*everything)
    together, steps = losses[-1], list(zip(*timelines))[SETTLING:]
    alone, losses_alone, seconds_alone = train_alone(len(states), digits, options)
    plot(options.output, together, losses_alone, steps)
    print(f"{len(states)} stage(s), {options.microbatches} micro-batches, {options.schedule}")
    print(f"loss           {together[0]:.4f} at first, {together[-1]:.4f} at last")
    print(f"test accuracy  {accuracy(states, for_test, options):.1%}")
    print(time_line(seconds[0][SETTLING:], seconds_alone[SETTLING:]))
    print(idle_lines(steps, options.microbatches))
    print(f"picture        {options.output}")
    return compare(states, alone, len(together))


def main() -> int:
    """Read the command line, join the other ranks and train; return the exit code."""
    parser = argparse.ArgumentParser(description="torch.distributed.pipelining over any backend.")
    parser.add_argument("--backend", default="collective")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=800, help="digits per step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="width of the hidden layers")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--limit", type=int, default=5000, help="number of digits to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="pipeline.png", help="file of the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    # Only rank 0 reads the data.
    read = [*load_digits(options.limit, options.seed)] if rank == 0 else [None, None]
    dist.broadcast_object_list(read)
    digits, for_test = read
    everything = [None] * size if rank == 0 else None
    dist.gather_object(train(digits, options), everything)
    dist.destroy_process_group()
    return 0 if everything is None else report(everything, digits, for_test, options)


if __name__ == "__main__":
    sys.exit(main())
