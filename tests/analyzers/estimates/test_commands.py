from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.errors import ChopperError, UsageError
from chopper.reports import to_text
from tests import command
from tests.kineto_writer import Trace

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = {
    "memory": ["llama3-8b", "--strategy", "fsdp2", "--ranks", "8", "--device", "h100-sxm"],
    "offload": ["llama2-13b", "--device", "v100-sxm2-32gb"],
    "network": ["--size", "1MiB", "--flows", "16"],
    "limits": ["--flop", "1e27", "--flop", "2e28"],
    "cost": ["--device", "h100-sxm", "--tokens-per-s", "728", "--against", "gb200"],
}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["estimate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


ANSWERED = [
    *((name, *options) for name, options in COMMANDS.items()),
    ("memory", "llama3-8b", "--sequence", "8192", "--device", "h100-sxm"),
    ("memory", "deepseek-v3", "--capacity", "80GB"),
    ("memory", "gpt2", "--sequence", "512"),
    ("offload", "deepseek-v3", "--host-memory", "500GB"),
    ("network", "--ranks", "1024", "--size", "1GiB"),
    ("network", "--size", "1KiB", "--ranks", "8"),
    ("limits", "--flop", "1e33"),
    ("limits", "--flop", "5e27"),
    ("cost", "--model", "llama3-70b", "--device", "h100-sxm"),
    ("cost", "--price", "1", "--tokens-per-s", "1e-3"),
]


@pytest.mark.parametrize("arguments", ANSWERED)
def test_five_lines_answer(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = to_text.render
    monkeypatch.setattr(to_text, "render", lambda page, **how: wide(page, **{**how, "width": 80}))
    lines = run(*arguments).splitlines()
    assert len(lines) == 5, lines
    assert any(character.isdigit() for character in lines[0])
    starts = ["- Limit: ", "- Assumes: ", "- Try: ", "- More: --details "]
    assert [line[: len(start)] for line, start in zip(lines[1:], starts, strict=True)] == starts


@pytest.mark.parametrize("name", COMMANDS)
def test_details_show_tables_and_assumptions(name: str) -> None:
    text = run(name, *COMMANDS[name], "--details")
    assert "\nAssumptions\n" in text
    assert max(map(len, text.splitlines())) <= 110
    # What is answered stands above.
    answer = run(name, *COMMANDS[name]).splitlines()
    assert all(line in text for line in answer[:4])


def test_the_rule_of_thumb_is_criticized_on_demand_only() -> None:
    assert "40 bytes" not in run("memory", "gpt2", "--sequence", "512")
    assert "About the rule of thumb" in run("memory", "gpt2", "--sequence", "512", "--details")


@pytest.mark.parametrize("name", COMMANDS)
def test_json_has_its_schema_and_every_field_is_documented(name: str) -> None:
    document = json.loads(run(name, *COMMANDS[name], "--json"))
    version = {"offload": 3, "network": 3, "limits": 2}.get(name, 1)
    assert document["schema"] == f"chopper.estimate.{name}/{version}"
    assert document["assumptions"]
    page = (ROOT / "docs" / "concepts" / "estimates" / f"{name}.md").read_text(encoding="utf-8")
    missing = [field for field in document if f"`{field}`" not in page]
    assert not missing


@pytest.mark.parametrize("name", COMMANDS)
def test_files_in_every_format(name: str, tmp_path: Path) -> None:
    for suffix in ("html", "md", "json", "txt"):
        file = tmp_path / f"{name}.{suffix}"
        run(name, *COMMANDS[name], "-o", str(file))
        text = file.read_text(encoding="utf-8")
        if suffix == "html":
            assert name not in ("memory", "offload") or f'data-figure="{name}"' in text
            assert "http://" not in text.partition('id="plotly"')[0]
        if suffix == "json":
            assert json.loads(text)["schema"].startswith("chopper.estimate.")
    with pytest.raises(ChopperError, match="exists"):
        run(name, *COMMANDS[name], "-o", str(tmp_path / f"{name}.md"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memry", "no estimate is called 'memry'; did you mean memory"),
        ("memory", "no model given"),
        ("memory lama3-8b", "did you mean llama3-8b"),
        ("memory gpt2 --config x.json", "MODEL and --config contradict"),
        ("memory gpt2 --device h100-sxm --capacity 80GB", "--device and --capacity contradict"),
        ("memory gpt2 --device h100-smx", "did you mean h100-sxm"),
        ("memory gpt2 --batch 0", "more than zero"),
        ("memory gpt2 --batch -2", "more than zero"),
        ("memory gpt2 --batch many", "is not a number"),
        ("memory gpt2 --batch 1.5", "is not whole"),
        ("memory gpt2 --batch 1e30", "64 bits"),
        ("memory gpt2 --capacity 80Gs", "unit 'Gs'"),
        ("memory gpt2 --capacity 80", "--capacity '80': no unit; 80GB or 80GiB?"),
        ("memory llama3-8b --tp 5", "does not divide"),
        ("memory llama3-8b --strategy ddp --ranks 1e11", "expected at most 10000000"),
        ("memory llama3-8b --offload none --offload optimizer", "none contradicts optimizer"),
        ("memory llama3-8b --fragmentation nan", "expected 0 to 1"),
        ("memory --module m:f --tp 2", "--tp contradicts --module"),
        ("memory --module m:f --device h100-sxm", "contradicts --module"),
        ("memory --module m:f --strategy zero1", "strategy is one of single, fsdp2"),
        ("memory --module m", "package.module:factory"),
        ("memory gpt2 --bucket 5M --sequence 512", "it contradicts --strategy single"),
        ("memory gpt2 --bucket 0 --strategy zero2", "more than zero"),
        ("memory --module m:f --bucket 5M", "contradicts --module"),
        ("memory --module :make", "package.module:factory"),
        ("memory --config /nowhere/config.json", "cannot be read"),
        ("memory --config /dev/full", "/dev/full: is not a regular file"),
        ("cost --tokens-per-s 1 --prices /dev/full", "/dev/full: is not a regular file"),
        ("offload", "no model given"),
        ("offload gpt2 --efficiency 2", "expected 0.001 to 1"),
        ("offload gpt2 --efficiency 1e-12", "expected 0.001 to 1"),
        ("offload gpt2 --link 1B/s", "link to device: found 1, expected 1000"),
        ("offload gpt2 --link 0.1B/s", "--link in B/s"),
        ("offload gpt2 --ranks 1e12", "expected 1 to 1024"),
        ("offload gpt2 --host-memory 80Gb", "unit 'Gb'"),
        ("offload gpt2 --host-bandwidth 200GB", "unit 'GB'"),
        ("offload gpt2 --device nvidia-gtz", "no device is called"),
        ("network --ranks 1", "expected 2 to 1e+07"),
        ("network --network-link 1e-300B/s", "too small"),
        ("network --node-latency 3.4", "no unit; expected a time"),
        ("network --node-latency 1e60s", "expected 1e-12 to"),
        ("network --ranks-per-node 9e18", "topology: ranks_per_node_count"),
        ("limits --time 90", "no unit; expected a time such as 90d"),
        ("limits --time 1e-9s", "time allowed in s"),
        ("limits --flop 1", "expected 1e+15 to 1e+40"),
        ("limits --peak 989", "expected a rate such as 989TFLOP/s"),
        ("network --collective allreduce", "did you mean all_reduce"),
        ("network --ranks 1e14", "expected 2 to 1e+07"),
        ("network --flows 1e9", "flows × queue pairs: found"),
        ("network --uplinks 1e9", "topology: uplinks_count"),
        ("network --size 2EB", "size in bytes: found 2e+18"),
        ("network --network-link 400", "no unit"),
        ("limits --flop 0", "more than zero"),
        ("limits --flop 1e50", "expected 1e+15 to 1e+40"),
        ("limits --device l4", "give --node-link as well"),
        ("cost", "no throughput"),
        ("cost --tokens-per-s 1 --model gpt2", "contradict"),
        ("cost --tokens-per-s 1", "has no price"),
        ("cost --tokens-per-s 1 --device a100-sxm4-80gb", "no price of"),
        ("cost --tokens-per-s 1e-12 --price 1", "tokens per second of a device"),
        ("cost --tokens-per-s 1 --price 1e60", "price: found 1e+60"),
        ("cost --tokens-per-s 1 --price 1 --tokens 1e60", "tokens: found 1e+60"),
        ("cost --tokens-per-s 1 --price 1 --power 700J", "unit 'J'"),
        ("cost --tokens-per-s 1 --price 1 --devices 9e18", "devices: found"),
        ("cost --tokens-per-s 1 --price 1 --utilization 0.5", "--utilization needs --model"),
        ("project absent.json --device mi300x --clock 1e60", "--clock in MHz"),
        ("cost --tokens-per-s 1 --price 1 --against l4", "no price of NVIDIA L4"),
        ("cost --model gpt2 --price 1", "needs a device"),
        ("cost --model gpt2 --device h100-sxm --utilization 1.5", "at most 1"),
    ],
)
def test_bad_input_is_one_line(line: str, message: str) -> None:
    with pytest.raises(ChopperError) as caught:
        run(*line.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_assumed_stands_beside_what_is_derived() -> None:
    options = ("gpt2", "--sequence", "512", "--strategy", "zero3", "--ranks", "4", "--bucket", "1M")
    text = run("memory", *options, "--details")
    assert "fragmentation is assumed" in text
    assert "DeepSpeed 0.19" in text
    assert "fragmentation is assumed" not in run(
        "memory", *options, "--fragmentation", "0", "--details"
    )
    assert json.loads(run("memory", *options, "--json"))["training"]["bucket_count"] == 10**6


def test_an_estimate_is_named_whatever_its_case() -> None:
    assert "per million tokens" in run("COST", "--price", "1", "--tokens-per-s", "10")
    with pytest.raises(UsageError):
        run("nothing")


@pytest.mark.parametrize("rate", ["0.001", "1e9"])
def test_money_is_short_whatever_the_throughput(rate: str) -> None:
    options = ("--device", "h100-sxm", "--tokens-per-s", rate, "--tokens", "1e12")
    text = run("cost", *options, "--details")
    amounts = [line.split("USD")[0].split()[-1] for line in text.splitlines() if "USD" in line]
    assert max(map(len, amounts)) <= 15
    assert "0.0000" not in amounts


def _tokens(path: Path, trace: Trace) -> str:
    """Write a trace of three steps in which tokens are looked up and a product is computed."""
    for step in range(3):
        at = step * 1_000_000
        trace.step(step, at, 1_000_000)
        for number, (name, shapes) in enumerate(
            (
                ("aten::embedding", [[1000, 64], [4, 512], []]),
                ("aten::mm", [[2048, 2048], [2048, 2048]]),
            )
        ):
            begins = at + 1_000 + 200_000 * number
            op = trace.op(name, begins, 90_000, shapes=shapes)
            if trace.platform != "cpu":
                trace.launch(
                    "k", begins + 1_000, 300, kernel_at=begins + 5_000, kernel_for=80_000, op=op
                )
    path.write_bytes(trace.encode())
    return str(path)


def test_a_device_is_not_priced_by_the_throughput_of_a_cpu(tmp_path: Path) -> None:
    run_on_cpu = _tokens(tmp_path / "cpu.json", Trace(platform="cpu"))
    price = ["--price", "2", "--json"]
    with pytest.raises(UsageError, match=r"was measured on CPU.*--tokens-per-s") as caught:
        run("cost", run_on_cpu, "--device", "h100-sxm", *price)
    assert "\n" not in str(caught.value)
    assert json.loads(run("cost", run_on_cpu, *price))["tokens_per_s_per_device"] > 0


def test_a_device_is_not_priced_by_the_throughput_of_another(tmp_path: Path) -> None:
    measured = _tokens(tmp_path / "a100.json", Trace(device_name="NVIDIA A100-SXM4-40GB"))
    price = ["--price", "2", "--json"]
    here = json.loads(run("cost", measured, "--device", "a100-sxm-40gb", *price))
    assert here["throughput_source"].startswith("measured in")
    assert here["throughput_source"].endswith("mean of 1 rank")
    # The power of the board, where none was measured.
    assert here["power_source"].startswith("the board's limit")
    with pytest.raises(UsageError, match=r"was measured on NVIDIA A100.*--tokens-per-s"):
        run("cost", measured, "--device", "h100-sxm", *price)


def test_a_family_of_devices_is_taken_for_its_usual_board_and_said() -> None:
    said = command.run("estimate", "cost", "--device", "H100", "--model", "gpt2", "--json")
    assert json.loads(said.out)["device"] == "NVIDIA H100 SXM 80 GB"
    assert "--device H100: taken as h100-sxm" in said.err


def test_a_layout_stands_in_place_of_ranks_of_each_dimension() -> None:
    laid = run("memory", "mixtral-8x7b", "--strategy", "fsdp2", "--layout", "tp=2,dp=8,ep=4")
    named = ("--tp", "2", "--ranks", "8", "--ep", "4")
    assert laid == run("memory", "mixtral-8x7b", "--strategy", "fsdp2", *named)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "tp=2,pp=2"], "memory is estimated without pipeline parallelism"),
        (["--layout", "tp=2", "--tp", "4"], "--layout and --tp contradict each other"),
        (["--layout", "tp"], "--layout 'tp': 'tp' is no size"),
    ],
)
def test_a_layout_that_memory_cannot_be_estimated_of(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run("memory", "gpt2", *options)
