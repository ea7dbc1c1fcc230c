"""Tensor-parallel inference on CPUs: a small transformer with random weights, cut over the ranks.

Run: collective run -n 2 --backend shm examples/inference.py [--dtype bfloat16]

Each rank has some of the attention's heads and some of the MLP's hidden units. In both, the first
layer is cut by columns and the second one by rows (M. Shoeybi et al., "Megatron-LM", 2019, section
3). So one all-reduce assembles the result of each. The last layer is cut by words, and one
all-gather assembles the scores. The program ends with a comparison with the whole model.
"""

import argparse
import time

import torch
from torch.nn import functional as F

import collective

# Largest difference allowed from the scores of the whole model in float32, relative to the largest
# score.
ALLOWED = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}


class Joined:
    """Matrix products of which each rank computes a part.

    The sums lie in memory that the transport reduces without copies.

    Attributes:
        seconds: time in communication so far, including the wait for other ranks.
    """

    def __init__(self, comm, tokens, hidden, dtype):
        self.comm = comm
        like = torch.empty(0, dtype=dtype)
        self.memory = comm.empty((tokens, hidden), str(dtype).split(".")[1], like=like)
        self.seconds = 0.0

    def product(self, x, weight):
        """Return x @ weight; each rank has some columns of x and the matching rows of weight."""
        out = torch.mm(x, weight, out=self.memory[: len(x)])
        start = time.perf_counter()
        self.comm.all_reduce(out, out=out)
        self.seconds += time.perf_counter() - start
        return out

    def scores(self, x, weight):
        """Return one row per word and one column per token; each rank computes some of the rows."""
        mine = (x @ weight).T.contiguous()
        start = time.perf_counter()
        whole = self.comm.all_gather(mine)
        self.seconds += time.perf_counter() - start
        return whole


class Whole:
    """Replacement for :class:`Joined` in a process that has the whole model."""

    seconds = 0.0

    def product(self, x, weight):
        return x @ weight

    def scores(self, x, weight):
        return (x @ weight).T


class Model:
    """Blocks of attention and MLP, or one rank's part of them, with the keys and values so far."""

    def __init__(self, options, join, rank=0, size=1, dtype=torch.float32):
        self.width = options.hidden // options.heads
        self.join = join
        generator = torch.Generator().manual_seed(0)

        def drawn(rows, columns, axis=None):
            """Return a random matrix, the same on all ranks, or this rank's part of it."""
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
        """Return the scores of the words that may follow each token: one row per word."""
        x = F.embedding(tokens, self.words)
        for number, layer in enumerate(self.layers):
            x = x + self.join.product(self.attention(number, normal(x)), layer["out"])
            x = x + self.join.product(F.gelu(normal(x) @ layer["up"]), layer["down"])
        return self.join.scores(normal(x), self.last)

    def attention(self, number, x):
        layer = self.layers[number]
        # The axes of each are: heads, tokens, numbers of a head.
        q, k, v = ((x @ layer[n]).view(len(x), -1, self.width).transpose(0, 1) for n in "qkv")
        if self.past[number] is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(self.past[number], (k, v)))
        self.past[number] = k, v
        first = len(x) == k.shape[1]  # a prompt; later, each single token sees all tokens before it
        y = F.scaled_dot_product_attention(q, k, v, is_causal=first)
        return y.transpose(0, 1).reshape(len(x), -1)


def normal(x):
    """Return each token normalised to the mean and variance that layers expect."""
    return F.layer_norm(x, x.shape[-1:])


def generate(model, prompt, count):
    """Return the generated words, and the seconds for the prompt and for the other words."""
    start = time.perf_counter()
    words = [model(prompt)[:, -1].argmax()]
    middle = time.perf_counter()
    model.join.seconds = 0.0
    while len(words) < count:
        words.append(model(words[-1].view(1))[:, -1].argmax())
    return torch.stack(words), middle - start, time.perf_counter() - middle


def main():
    """Compare the cut model with the whole one, generate words, and print the speed."""
    parser = argparse.ArgumentParser(description="Tensor-parallel inference.")
    parser.add_argument("--dtype", choices=ALLOWED, default="float32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--words", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
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
        agree = all(words.tolist() == other for other in comm.all_gather_object(words.tolist()))
        comm.barrier()
        if rank == 0:
            rate = (options.tokens - 1) / rest
            print(f"{size} ranks, {options.dtype}, off the whole model by {off:.1e}")
            print(f"prompt {1e3 * first:.1f} ms, then {rate:.0f} tokens/s")
            print(f"share of communication {join.seconds / rest:.0%}")
            # The other ranks wait meanwhile, without using a core.
            alone = generate(Model(options, Whole(), dtype=dtype), prompt, options.tokens)
            print(f"one process alone: {(options.tokens - 1) / alone[2]:.0f} tokens/s")
        comm.barrier()
        if off > ALLOWED[options.dtype] or not agree:
            raise SystemExit(f"rank {rank}: off by {off:.1e}, words agree: {agree}")


if __name__ == "__main__":
    main()
