"""Record transformers' Trainer: the two marked lines are all that chopper needs.

    python examples/train_transformers.py runs/mine

A small GPT-2 learns random sentences by heart, with two micro-steps of accumulated gradients in
each step, evaluations and checkpoints.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from chopper.integrations.transformers import ChopperCallback  # chopper


class Sentences(torch.utils.data.Dataset):
    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 128, (length, 32), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(output: str | None) -> None:
    torch.manual_seed(0)
    size = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=0, eos_token_id=0, **size)),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=20,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=5,
            save_steps=10,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=Sentences(160, seed=1),
        eval_dataset=Sentences(64, seed=2),
    )
    trainer.add_callback(ChopperCallback(output))  # chopper
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
