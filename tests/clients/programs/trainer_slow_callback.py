"""transformers: Trainer with a callback that looks at every weight after every step."""

from __future__ import annotations

import torch
from stopwatch import Stopwatch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

watch = Stopwatch()


class Sentences(torch.utils.data.Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 512, (length, 64), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class WatchWeights(TrainerCallback):
    """Keeps the quartiles of each weight, to decide later what could be pruned."""

    def __init__(self):
        self.quartiles = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with watch:
            for name, weight in model.named_parameters():
                sizes = sorted(abs(value) for value in weight.detach().flatten().tolist())
                self.quartiles[name] = [sizes[len(sizes) * i // 4] for i in (1, 2, 3)]
        watch.lap()


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="checkpoints",
        max_steps=60,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Sentences(480, seed=1),
    callbacks=[WatchWeights()],
)
trainer.train()
watch.report()
