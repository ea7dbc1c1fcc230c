"""Tensor-parallel inference on CPUs: a small transformer on random weights, cut over the ranks.

Run: collective run -n 2 --backend shm examples/inference.py [--dtype bfloat16]

Each rank has some of the attention's heads and some of the MLP's hidden units: the first layer of
either is cut by columns and the second by rows (M. Shoeybi et al., "Megatron-LM", 2019, section
3), so that one all-reduce puts the result of each together. The last layer is cut by words, and
one all-gather puts the scores together. Ends with a check against the whole model.
"""

import argparse
import time

import torch
from torch.nn import functional as F

import collective

# Largest difference from the whole model in float32, of the largest score.
ALLOWED = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}


class Joined:
    """Sums of the ranks' parts, in memory that the transport reduces without copies.

    Attributes:
        seconds: in calls so far, waiting for the others included.
    """

    def __init__(self, comm, tokens, hidden, dtype):
        self.comm = comm
        like = torch.empty(0, dtype=dtype)
        self.memory = comm.empty((tokens, hidden), str(dtype).split(".")[1], like=like)
        self.seconds = 0.0

    def product(self, x, weight):
        """Return x @ weight, of which each rank has some of the columns and of the rows."""
        out = torch.mm(x, weight, out=self.memory[: len(x)])
        start = time.perf_counter()
        self.comm.all_reduce(out, out=out)
        self.seconds += time.perf_counter() - start
        return out

    def scores(self, x, weight):
        """Return one row a word, of which each rank has some; one column a token."""
        mine = (x @ weight).T.contiguous()
        start = time.perf_counter()
        whole = self.comm.all_gather(mine)
        self.seconds += time.perf_counter() - start
        return whole


class Whole:
    """What stands for :class:`Joined` where one process has it all."""

    seconds = 0.0

    def product(self, x, weight):
        return x @ weight

    def scores(self, x, weight):
        return (x @ weight).T


class Model:
    """Blocks of attention and MLP, or a rank's part of them, with the keys and values so far."""

    def __init__(self, options, join, rank=0, size=1, dtype=torch.float32):
        self.width = options.hidden // options.heads
        self.join = join
        generator = torch.Generator().manual_seed(0)

        def drawn(rows, columns, axis=None):
            """Return a matrix, or this rank's part of it. The same numbers on all ranks."""
            whole = torch.randn(rows, columns, generator=generator) / rows**0.5
            part = whole if axis is None else whole.chunk(size, axis)[rank]
            return part.to(dtype).contiguous()

        hidden = options.hidden
        self.words = drawn(options.words, hidden)
        self.layers = [
            {
                "q": drawn(hidden, hidden, 1),  # columns: by heads
                "k": drawn(hidden, hidden, 1),
                "v": drawn(hidden, hidden, 1),
                "out": drawn(hidden, hidden, 0),  # rows
                "up": drawn(hidden, 4 * hidden, 1),
                "down": drawn(4 * hidden, hidden, 0),
            }
            for _ in range(options.layers)
        ]
        self.last = drawn(hidden, options.words, 1)
        self.past = [None] * options.layers

    def __call__(self, tokens):
        """Return the scores of the words that may follow each token: one row a word."""
        x = F.embedding(tokens, self.words)
        for number, layer in enumerate(self.layers):
            x = x + self.join.product(self.attention(number, normal(x)), layer["out"])
            x = x + self.join.product(F.gelu(normal(x) @ layer["up"]), layer["down"])
        return self.join.scores(normal(x), self.last)

    def attention(self, number, x):
        layer = self.layers[number]
        # One row a head, its tokens, its numbers.
        q, k, v = ((x @ layer[n]).view(len(x), -1, self.width).transpose(0, 1) for n in "qkv")
        if self.past[number] is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(self.past[number], (k, v)))
        self.past[number] = k, v
        first = len(x) == k.shape[1]  # a prompt; after it, one token sees all
        y = F.scaled_dot_product_attention(q, k, v, is_causal=first)
        return y.transpose(0, 1).reshape(len(x), -1)


def normal(x):
    """Return each token with the mean and the size that layers expect."""
    return F.layer_norm(x, x.shape[-1:])


def generate(model, prompt, count):
    """Return the words that the model goes on with, and seconds: the prompt's, the others'."""
    start = time.perf_counter()
    found = [model(prompt)[:, -1].argmax()]
    middle = time.perf_counter()
    model.join.seconds = 0.0
    while len(found) < count:
        found.append(model(found[-1].view(1))[:, -1].argmax())
    return torch.stack(found), middle - start, time.perf_counter() - middle


def main():
    """Check the cut model against the whole one, then generate, and print how fast."""
    parser = argparse.ArgumentParser(description="Tensor-parallel inference.")
    parser.add_argument("--dtype", choices=ALLOWED, default="float32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--words", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=32, help="to generate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(options.words, (options.prompt,), generator=generator)

    with collective.init() as comm, torch.inference_mode():
        rank, size = comm.rank, comm.size
        if options.heads % size or options.words % size or options.hidden % options.heads:
            parser.error(f"--heads and --words must divide among {size} ranks")
        join = Joined(comm, options.prompt, options.hidden, dtype)

        scores = Model(options, join, rank, size, dtype)(prompt).float()
        expected = Model(options, Whole())(prompt)
        off = ((scores - expected).abs().max() / expected.abs().max()).item()

        words, first, rest = generate(
            Model(options, join, rank, size, dtype), prompt, options.tokens
        )
        agree = all(words.tolist() == theirs for theirs in comm.all_gather_object(words.tolist()))
        comm.barrier()
        if rank == 0:
            rate = (options.tokens - 1) / rest
            print(f"{size} ranks, {options.dtype}, off the whole model by {off:.1e}")
            print(f"prompt {1e3 * first:.1f} ms, then {rate:.0f} tokens/s")
            print(f"share of communication {join.seconds / rest:.0%}")
            # The others wait meanwhile, without using a core.
            alone = generate(Model(options, Whole(), dtype=dtype), prompt, options.tokens)
            print(f"one process alone: {(options.tokens - 1) / alone[2]:.0f} tokens/s")
        comm.barrier()
        if off > ALLOWED[options.dtype] or not agree:
            raise SystemExit(f"rank {rank}: off by {off:.1e}, words agree: {agree}")


if __name__ == "__main__":
    main()
