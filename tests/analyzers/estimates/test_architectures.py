from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chopper.errors import InputError, UsageError
from chopper.models.architectures import CATALOGUE, named
from chopper.models.configs import model_types, of_config, read_config


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2-7b", 7_615_616_512),
        ("gemma-2b", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("gemma2-9b", 9_241_705_984),
    ],
)
def test_parameters_as_published(name: str, parameters: int) -> None:
    assert CATALOGUE[name].parameters_count == parameters


FAMILIES: dict[str, Any] = json.loads((Path(__file__).parent / "families.json").read_text())
"""Parameters of transformers' own modules, as `python -m benchmarks.families` counted them."""


@pytest.mark.parametrize("name", FAMILIES["models"])
def test_parameters_as_the_modules_of_transformers_have_them(name: str) -> None:
    of = FAMILIES["models"][name]
    found = of_config(of["config"], name, "config.json")
    assert found.parameters_count == of["parameters_count"]
    assert (found.active_count < found.parameters_count) == (found.experts is not None)


def test_each_family_is_held_against_a_module() -> None:
    counted = {of["config"]["model_type"] for of in FAMILIES["models"].values()}
    # DeepSeek V3's module under another name, which transformers does not have.
    assert set(model_types()) - counted == {"kimi_k2"}


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("mixtral-8x7b", "Mixtral-8x7B"),
        ("mixtral-8x22b", "Mixtral-8x22B"),
        ("qwen3-8b", "Qwen3-8B"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
        ("qwen3-235b-a22b", "Qwen3-235B-A22B"),
        ("olmoe-1b-7b", "OLMoE-1B-7B"),
        ("deepseek-v2-lite", "DeepSeek-V2-Lite"),
        ("deepseek-v3", "DeepSeek-V3"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_the_catalogue_has_what_a_configuration_says(name: str, same: str) -> None:
    read = of_config(FAMILIES["models"][same]["config"], name, "config.json")
    assert msgspec.structs.replace(read, context_count=0) == msgspec.structs.replace(
        CATALOGUE[name], context_count=0
    )


def test_active_parameters_of_mixtral_by_hand() -> None:
    """Of 8 experts of 3 · 4096 · 14336 parameters, 6 are idle in each of 32 layers."""
    mixtral = CATALOGUE["mixtral-8x7b"]
    idle = 32 * 6 * 3 * 4096 * 14336
    assert mixtral.active_count == 46_702_792_704 - idle == 12_879_925_248
    assert CATALOGUE["deepseek-v3"].active_count / 1e9 == pytest.approx(37.6, abs=0.1)
    assert CATALOGUE["qwen3-30b-a3b"].active_count / 1e9 == pytest.approx(3.3, abs=0.1)


def test_rounded_totals() -> None:
    assert named("gpt3-175b").parameters_count / 1e9 == pytest.approx(174.6, abs=0.05)
    assert named("gemma3-12b").parameters_count / 1e9 == pytest.approx(11.8, abs=0.1)


@pytest.mark.parametrize("name", ["Llama 3 8B", "Meta-Llama-3-8B", "llama3-8b", "LLAMA3_8B"])
def test_a_name_is_understood(name: str) -> None:
    assert named(name).name == "llama3-8b"


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean llama3-8b"):
        named("lama3-8b")


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 14336,
    "vocab_size": 256000,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


def write(folder: Path, config: Any) -> Path:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return file


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (LLAMA, "llama3-8b"),
        (GEMMA, "gemma2-9b"),
        (GPT2, "gpt2"),
        (QWEN, "qwen2-7b"),
        ({**LLAMA, "model_type": "mistral", "vocab_size": 32000}, "mistral-7b"),
    ],
)
def test_config_json(tmp_path: Path, config: dict[str, Any], same: str) -> None:
    found = read_config(write(tmp_path, config))
    assert found.parameters_count == CATALOGUE[same].parameters_count
    assert read_config(tmp_path).parameters_count == found.parameters_count


@pytest.mark.parametrize(
    ("name", "key", "parameters"),
    [
        # Of transformers' modules of the same configurations without that key.
        ("Mistral-7B", "num_key_value_heads", 7_241_732_096),
        ("Qwen3-0.6B", "head_dim", 596_049_920),
        ("gemma-3-4b", "head_dim", 3_880_263_168),
        ("Seed-OSS-36B", "num_key_value_heads", 36_151_104_512),
        ("gpt-oss-20b", "head_dim", 20_914_757_184),
        ("DeepSeek-V3", "q_lora_rank", 671_026_404_352),
        ("DeepSeek-V2", "n_shared_experts", 235_741_434_880),
        ("GLM-4.5-Air", "num_key_value_heads", 106_852_245_504),
    ],
)
def test_what_is_left_out_is_what_transformers_takes(name: str, key: str, parameters: int) -> None:
    config = {k: v for k, v in FAMILIES["models"][name]["config"].items() if k != key}
    assert of_config(config, name, "config.json").parameters_count == parameters


def test_null_is_not_left_out() -> None:
    """DeepSeek V2 Lite says that queries are not made from a latent."""
    of = FAMILIES["models"]["DeepSeek-V2-Lite"]
    assert of["config"]["q_lora_rank"] is None
    read = of_config(of["config"], "lite", "config.json")
    assert read.latent is not None
    assert read.latent.q_rank == 0


def test_gemma_3_as_it_is_published() -> None:
    """Its config.json leaves heads, their width and the vocabulary out."""
    text = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "intermediate_size": 10240,
    }
    found = of_config({"model_type": "gemma3", "text_config": text}, "gemma", "config.json")
    assert found.parameters_count == FAMILIES["models"]["gemma-3-4b"]["parameters_count"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not a model's config.json .Input data was truncated"),
        ("[1]", "is not a model's config.json .Expected .object., got .array."),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({}, "model_type None is not supported"),
        ({**LLAMA, "hidden_size": 0}, "hidden_size is 0"),
        ({**LLAMA, "hidden_size": "big"}, "hidden_size is 'big'"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size is missing"),
        ({**LLAMA, "hidden_size": 4097}, "does not divide"),
        ({**LLAMA, "num_key_value_heads": 7}, "cannot share"),
        ({**LLAMA, "num_local_experts": 8}, "llama has no mixture of experts"),
        ({**LLAMA, "head_dim": "wide"}, "head_dim is 'wide'"),
        ({**LLAMA, "num_key_value_heads": -8}, "num_key_value_heads is -8"),
        ({**GPT2, "n_inner": 3.5}, "n_inner is 3.5"),
        ({"model_type": "mixtral"}, "num_hidden_layers is missing"),
        (
            {
                "model_type": "opt",
                "num_hidden_layers": 1,
                "hidden_size": 8,
                "num_attention_heads": 1,
            },
            "ffn_dim is missing",
        ),
        ({**LLAMA, "num_hidden_layers": 10**12}, "parameters, expected at most"),
        (
            {**LLAMA, "num_hidden_layers": 10**6, "hidden_size": 32},
            "1e\\+06 layers, expected at most 10000",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_config(write(tmp_path, config))


@pytest.mark.parametrize(
    ("file", "name"), [("tiny/config.json", "tiny"), ("mine.json", "mine"), ("a/b.json", "b")]
)
def test_a_configuration_is_named_by_its_file_or_the_folder_of_its_checkpoint(
    tmp_path: Path, file: str, name: str
) -> None:
    where = tmp_path / file
    where.parent.mkdir(exist_ok=True)
    where.write_text(json.dumps(LLAMA))
    assert read_config(where).name == name
