"""The training that `make demo` records: FSDP2 on two processes, with ordinary faults in it.

    torchrun --standalone --nproc-per-node 2 examples/demo.py
    torchrun --standalone --nproc-per-node 2 examples/demo.py --fixed

A small transformer learns Python from the standard library's source. Its data set tokenizes a
whole text for each window of it, and its loop reads the loss in every step. With --fixed the texts
are tokenized once, before the training, and the loss stays on the device until it is printed. Both
learn the same.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH = 64
VOCABULARY = 2048


class Sources(Dataset):
    """Windows of the standard library's source: tokens, and the tokens that follow them."""

    def __init__(self, length: int, *, tokenize_once: bool) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        words = collections.Counter(re.findall(r"\w+|\s+|[^\w\s]", text))
        known = [chr(code) for code in range(32, 127)] + [word for word, _ in words.most_common()]
        self.ids = {token: i for i, token in enumerate(dict.fromkeys(known)) if i < VOCABULARY}
        self.longest = max(map(len, self.ids))
        self.texts = [text[start : start + 16384] for start in range(0, 32 * 16384, 16384)]
        self.tokens = [self.tokenize(t) for t in self.texts] if tokenize_once else None
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        which = index % len(self.texts)
        tokens = self.tokens[which] if self.tokens else self.tokenize(self.texts[which])
        start = index * LENGTH % (len(tokens) - LENGTH)
        return tokens[start : start + LENGTH], tokens[start + 1 : start + LENGTH + 1]

    def tokenize(self, text: str) -> torch.Tensor:
        """Split a text into the longest tokens that the vocabulary has."""
        tokens, position = [], 0
        while position < len(text):
            for size in range(self.longest, 0, -1):
                token = self.ids.get(text[position : position + size])
                if token is not None or size == 1:
                    tokens.append(token or 0)
                    position += size
                    break
        return torch.tensor(tokens)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer with FSDP2.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="texts per process and step")
    parser.add_argument("--fixed", action="store_true", help="tokenize once, read the loss rarely")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    model = Transformer(width=192, layers=4).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    data = Sources(args.steps * args.batch * dist.get_world_size(), tokenize_once=args.fixed)
    loader = DataLoader(data, batch_size=args.batch, sampler=DistributedSampler(data))
    total, printed = torch.zeros((), device=device), 10
    for step, (tokens, following) in enumerate(loader, start=1):
        loss = model(tokens.to(device), following.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if not args.fixed or step % printed == 0:
            mean = total.item() / step
            if dist.get_rank() == 0 and step % printed == 0:
                print(f"step {step:3d}   mean loss {mean:.4f}", flush=True)
    # Gloo's threads need Python's lock to let go of the last tensors. Waiting here leaves it
    # to them; at the interpreter's end, wanting it would abort the process (torch 2.13).
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
