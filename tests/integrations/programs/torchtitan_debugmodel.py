"""torchtitan's debug model on two processes without devices, with a validation and a checkpoint.

torchtitan 0.3 is for devices, and for a torch that is newer than 2.13. What follows stands in for
what it lacks here; the trainer and its components are its own.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchtitan.tools import utils

utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=torch.cpu.set_device,
    current_device=lambda: 0,
    device_count=lambda: 1,
    synchronize=torch.cpu.synchronize,
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1 << 30),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda *_: {},
)
if not hasattr(dist, "set_timeout"):  # torch 2.13
    dist.set_timeout = distributed_c10d._set_pg_timeout

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from chopper.integrations.torchtitan import ChopperProfiler  # chopper

WORDS = ["<unk>", "<s>", "</s>", *(f"word{number}" for number in range(200))]


def load(path: str) -> Dataset:
    random.seed(0)
    return Dataset.from_dict({"text": [" ".join(random.choices(WORDS, k=100)) for _ in range(500)]})


directory = Path(tempfile.mkdtemp())
tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.save(str(directory / "tokenizer.json"))
special = {"bos_token": "<s>", "eos_token": "</s>"}
(directory / "tokenizer_config.json").write_text(json.dumps(special))
for name in ("c4_test", "c4_validation"):
    text_datasets.DATASETS[name] = DatasetConfig(name, load, lambda sample: sample["text"])

config = llama3_debugmodel()
config.hf_assets_path, config.dump_folder = str(directory), str(directory / "outputs")
config.training.local_batch_size, config.training.global_batch_size = 2, 8
config.training.seq_len, config.training.steps = 64, 12
config.training.disable_cuda_graphs = True
config.parallelism.spmd_backend = "partial_dtensor"  # torch 2.13's FSDP2 knows no other
config.checkpoint.enable, config.checkpoint.interval = True, 6
config.validator.enable, config.validator.freq, config.validator.steps = True, 5, 2
for layer in config.model_spec.model.layers:  # its own attentions have no backward pass on CPUs
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
config.profiler = ChopperProfiler.Config(output=sys.argv[1])  # chopper
trainer = config.build()
for module in trainer.model_parts[0].modules():
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo scales nothing
trainer.train()
trainer.close()
dist.destroy_process_group()
