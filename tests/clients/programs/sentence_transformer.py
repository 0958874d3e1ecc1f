"""sentence-transformers: its Trainer and a contrastive loss on a small random BERT."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

words = [f"word{i}" for i in range(200)]
specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
vocabulary = {word: i for i, word in enumerate([*specials, *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    pad_token="[PAD]",
    unk_token="[UNK]",
    cls_token="[CLS]",
    sep_token="[SEP]",
)
torch.manual_seed(0)
Path("bert").mkdir(exist_ok=True)
BertModel(
    BertConfig(
        vocab_size=len(vocabulary), hidden_size=96, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=192, max_position_embeddings=64,
    )
).save_pretrained("bert")  # fmt: skip
tokenizer.save_pretrained("bert")
transformer = Transformer("bert", max_seq_length=32)
model = SentenceTransformer(modules=[transformer, Pooling(96)], device="cpu")

random.seed(0)
anchors = [" ".join(random.choices(words, k=20)) for _ in range(320)]
positives = [" ".join(reversed(text.split())) for text in anchors]
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="checkpoints",
        max_steps=30,
        per_device_train_batch_size=16,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Dataset.from_dict({"anchor": anchors, "positive": positives}),
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
