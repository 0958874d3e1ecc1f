"""The same products on random numbers or on zeros: the program of own/dvfs_random and dvfs_zeros.

python dvfs.py random|zeros RUN
"""

from __future__ import annotations

import sys

import torch

import chopper

kind, out = sys.argv[1:3]
torch.manual_seed(0)
make = torch.zeros if kind == "zeros" else torch.randn
a, b = (make(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
c = torch.empty_like(a)
with chopper.profile(out, steps=(100, 110)) as prof:
    for _ in range(150):
        for _ in range(40):
            torch.mm(a, b, out=c)
        torch.cuda.synchronize()
        prof.step()
