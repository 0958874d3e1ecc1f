"""Texts of traces for tests of the scanner: plausible, odd, and damaged."""

from __future__ import annotations

import random
from typing import Any

from chopper.collectors.formats.kineto._events import MTIA, TARGETS, Args

ARGUMENTS = sorted(
    {*Args.__struct_fields__, *Args.__struct_encode_fields__, "blocks per SM", "Ev Idx"}
)
CATEGORIES = [*TARGETS, MTIA, "[memory]", "other", "Kernel ", ""]

WHOLE = ("0", "1", "7", "-1", "42", "4294967296", "1669783687464181", "9223372036854775807")
DECIMAL = ("0.5", "12.345", "1669783687464.181", "1669783687464181.123", "3.1000", "-0.250")
ODD = (
    "-0",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "123456789012345678901234567890",
    "18446744073709551.615",
    "9223372036854775.807",
    "9223372036854776.000",
    "100000000000000",
    "9200000000000000",
    "1e3",
    "1.5E-2",
    "0.0005",
    "1.23456",
    "1.2340000001",
    "8796093022208.001",
    "01",
    "1.",
    ".5",
    "+1",
    "--1",
    "NaN",
    "Infinity",
    "0x10",
    "true",
    "null",
    "[]",
    "{}",
)
STRINGS = (
    '"7"',
    '"stream 7"',
    '"-12"',
    '"12.5"',
    '"rank0_4711"',
    '"rank1_4711"',
    '"Spans"',
    '""',
    '" 5 "',
    '"1_000"',
    '"\\u0037"',
)
NAMES = (
    '"aten::mm"',
    '"gemm"',
    '"ProfilerStep#3"',
    '"[memory]"',
    '"process_name"',
    '"thread_name"',
    '"ncclDevKernel_AllReduce"',
    '"caf\u00e9 \u6f22 \U0001f600"',
    '"caf\\u00e9 \\ud83d\\ude00 \\n\\t\\"\\\\\\/"',
    '"\\ud83d"',
    '"\\u005bmemory]"',
    '"bad \\x escape"',
    '"tab\tinside"',
    "5",
    "1.5",
    "null",
)
VALUES = (
    "[[1, 2], [3]]",
    "[]",
    "[ [ 1 ,2],\n[3] ]",
    '["float", ""]',
    '"float"',
    '{"a": {"b": [1, {"c": null}]}}',
    "true",
    "false",
    "[1, 2",
    '"x" "y"',
    "[" * 80 + "]" * 80,
)


class Writer:
    """Writes random traces; the same seed gives the same text."""

    def __init__(self, rng: random.Random, odd: float) -> None:
        self.rng = rng
        self.odd = odd

    def pick(self, usual: Any, *others: Any) -> str:
        """Mostly one of the usual, now and then one of the others."""
        rng = self.rng
        chosen = rng.choice(others) if others and rng.random() < self.odd else usual
        found: str = rng.choice(chosen)
        return found

    def blank(self) -> str:
        """What may stand between two tokens."""
        return self.rng.choice(("", "", "", " ", "\n    ", "\t", "\r\n"))

    def members(self, pairs: list[tuple[str, str]]) -> str:
        """An object."""
        b = self.blank
        text = ",".join(f"{b()}{key}{b()}:{b()}{value}{b()}" for key, value in pairs)
        return "{" + text + b() + "}"

    def args(self) -> str:
        """Arguments of an event."""
        pairs = []
        for _ in range(self.rng.randrange(7)):
            key = self.rng.choice(ARGUMENTS)
            if key in ("Input Dims", "Input dims", "Input type", "grid", "block", "name", "dtype"):
                value = self.pick(VALUES[:5], VALUES, ODD, NAMES)
            elif key == "Collective name":
                value = self.pick(('"allreduce"', '"_allgather_base"'), NAMES, ODD)
            else:
                value = self.pick(WHOLE[:6], STRINGS, ODD, DECIMAL, VALUES)
            pairs.append((self.pick((f'"{key}"',), (f'"\\u0041{key}"', '"x\\ty"')), value))
        return self.members(pairs)

    def event(self) -> str:
        """An event, mostly a usable one."""
        rng = self.rng
        pairs = [("ph", self.pick(('"X"',), ('"i"', '"M"', '"C"', '"f"', '""', '"XX"', "null")))]
        pairs.append(("cat", f'"{rng.choice(CATEGORIES[:30])}"'))
        if rng.random() < self.odd:
            pairs[-1] = (
                "cat",
                self.pick([f'"{c}"' for c in CATEGORIES], ("null", '"\\u006bernel"')),
            )
        pairs.append(("name", self.pick(NAMES[:8], NAMES)))
        pairs.append(("pid", self.pick(("1", "2", "4711"), STRINGS, ODD)))
        pairs.append(("tid", self.pick(("1", "7", '"stream 7"'), STRINGS, ODD, WHOLE)))
        pairs.append(("ts", self.pick(WHOLE[:5] + DECIMAL[:3], ODD, STRINGS, WHOLE, DECIMAL)))
        pairs.append(("dur", self.pick(("5", "12.345", "0"), ODD, STRINGS, WHOLE, DECIMAL)))
        pairs.append(("args", self.pick((self.args(),), ("null", "{}", "[]", self.args()))))
        if rng.random() < self.odd:
            rng.shuffle(pairs)
        if rng.random() < self.odd:
            pairs.append(rng.choice(pairs))
        if rng.random() < self.odd:
            pairs.append((rng.choice(("id", "bp", "s", "more")), self.pick(VALUES)))
        if rng.random() < self.odd:
            del pairs[rng.randrange(len(pairs))]
        return self.members([(f'"{key}"', value) for key, value in pairs])

    def trace(self, events: int) -> bytes:
        """A file."""
        rng, b = self.rng, self.blank
        listed = ",".join(f"{b()}{self.event()}{b()}" for _ in range(events))
        if rng.random() < self.odd / 2:
            return f"{b()}[{listed}{b()}]{b()}".encode()
        pairs = [
            ('"schemaVersion"', "1"),
            ('"deviceProperties"', '[{"id": 0, "name": "V100"}]'),
            ('"traceEvents"', f"[{listed}{b()}]"),
        ]
        if rng.random() < 0.5:
            base = self.pick(("1751410836000000000",), ("0", "-1", '"x"', "null", "1e30"))
            pairs.append(('"baseTimeNanoseconds"', base))
        if rng.random() < self.odd:
            pairs.append(('"distributedInfo"', '{"rank": 1, "world_size": 2, "backend": "nccl"}'))
        rng.shuffle(pairs)
        return (b() + self.members(pairs) + b()).encode()


def mutated(text: bytes, rng: random.Random) -> bytes:
    """A text with a few bytes changed, dropped, doubled or moved."""
    damaged = bytearray(text)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(damaged) + 1)
        length = rng.choice((1, 1, 1, 2, 5, 40))
        kind = rng.randrange(5)
        if kind == 0:
            damaged[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del damaged[at : at + length]
        elif kind == 2:
            damaged[at:at] = rng.choice(b'"\\{}[]:,0-. e\n').to_bytes(1, "big")
        elif kind == 3:
            damaged[at:at] = damaged[at : at + length]
        else:
            del damaged[at:]
    return bytes(damaged)
