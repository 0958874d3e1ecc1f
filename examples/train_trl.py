"""Record TRL's SFTTrainer, with a LoRA model of PEFT, by the two marked lines.

    python examples/train_trl.py runs/mine

A small Llama learns random sentences, with two micro-steps of accumulated gradients in each step,
evaluations and checkpoints. TRL's other trainers take the same callback.
"""

from __future__ import annotations

import random
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from chopper.integrations.transformers import ChopperCallback  # chopper

WORDS = ["<pad>", "<unk>", "<eos>", *(f"word{number}" for number in range(200))]


def sentences(length: int) -> Dataset:
    return Dataset.from_dict(
        {"text": [" ".join(random.choices(WORDS, k=24)) for _ in range(length)]}
    )


def main(output: str | None) -> None:
    random.seed(0)
    torch.manual_seed(0)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), num_attention_heads=4, **size)),
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=12,
            max_length=32,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=6,
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=sentences(96),
        eval_dataset=sentences(16),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
        ),
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
    )
    trainer.add_callback(ChopperCallback(output))  # chopper
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
