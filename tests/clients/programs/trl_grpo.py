"""TRL: GRPO, whose steps generate completions before they train on them."""

from __future__ import annotations

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = [f"word{i}" for i in range(200)]
vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
)

random.seed(0)
prompts = [" ".join(random.choices(words, k=8)) for _ in range(64)]


def many_different_words(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=2,
    )
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=many_different_words,
    args=GRPOConfig(
        output_dir="checkpoints",
        max_steps=12,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=tokenizer,
)
trainer.train()
