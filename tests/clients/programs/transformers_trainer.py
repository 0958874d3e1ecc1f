"""transformers: Trainer with an evaluation every 20 steps and a checkpoint."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 512, (length, 64), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="checkpoints",
        max_steps=60,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=30,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Sentences(480, seed=1),
    eval_dataset=Sentences(160, seed=2),
)
trainer.train()
