"""transformers' Trainer: a small causal language model, trained, evaluated, saved and resumed."""

from __future__ import annotations

import outcome
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

LENGTH = 12


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers that count up from a random start."""

    def __init__(self, count: int, seed: int) -> None:
        start = torch.randint(32, (count, 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = (start + torch.arange(LENGTH)) % 32

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    """Train over the backend named on the command line."""
    options = outcome.options(__doc__)
    dist.init_process_group(options.backend)  # the line to add
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(options.out / "trained"), use_cpu=True, max_steps=8,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.01,
        eval_strategy="steps", eval_steps=4, save_steps=4, logging_steps=2,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip

    def trainer() -> Trainer:
        set_seed(0)
        return Trainer(
            LlamaForCausalLM(config), arguments,
            train_dataset=Sequences(64, 1), eval_dataset=Sequences(22, 2),
        )  # fmt: skip

    first = trainer()
    first.train()
    metrics = first.evaluate()
    answers = first.predict(Sequences(10, 3)).predictions
    again = trainer()
    again.train(resume_from_checkpoint=str(options.out / "trained" / "checkpoint-4"))
    outcome.save(
        options.out,
        weights=first.model.state_dict(),
        resumed=again.model.state_dict(),
        loss=metrics["eval_loss"],
        answers=torch.from_numpy(answers),
        logged=[entry["loss"] for entry in first.state.log_history if "loss" in entry],
        wrapper=type(first.model_wrapped).__name__,
        processes=arguments.world_size,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
