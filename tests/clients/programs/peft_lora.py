"""PEFT: LoRA adapters on a frozen model, in a loop written by hand."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=3, n_head=4))
model = get_peft_model(
    model,
    LoraConfig(
        r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    ),
)
model.print_trainable_parameters()

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(torch.randint(0, 512, (320, 64)), batch_size=8, shuffle=True)
model.train()
for step, tokens in enumerate(loader):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}")
