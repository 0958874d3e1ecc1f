"""Numbers of documents have ranges, and one that nobody measures is refused in one line."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chopper.analyzers.compare.history import PastRun
from chopper.collectors.host._processes import ProcessPart
from chopper.collectors.sampler._source import SamplerStatus
from chopper.errors import InputError, RunFormatError
from chopper.experiments.results import Plan
from chopper.hardware import calibration
from chopper.hardware.devices import Prices
from chopper.storage import files
from chopper.storage.manifest import RankManifest, RunManifest, Upload, decode_rank

DOCUMENTS = (
    *(RunManifest, RankManifest, Upload, PastRun, Plan, Prices, SamplerStatus, ProcessPart),
    calibration.Calibration,
)


def numbers(kind: Any, where: str) -> list[str]:
    """Names of the numbers of a type that have no range."""
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        low = kind.ge if kind.ge is not None else kind.gt
        high = kind.le if kind.le is not None else kind.lt
        return [] if low is not None and high is not None else [where]
    found = []
    if isinstance(kind, msgspec.inspect.StructType):
        found += [n for f in kind.fields for n in numbers(f.type, f"{where}.{f.name}")]
    for name in ("type", "key_type", "value_type", "item_type"):
        if isinstance(inner := getattr(kind, name, None), msgspec.inspect.Type):
            found += numbers(inner, where)
    for name in ("types", "item_types"):
        found += [n for inner in getattr(kind, name, ()) for n in numbers(inner, where)]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda kind: kind.__name__)
def test_every_number_of_a_document_has_a_range(document: type) -> None:
    assert numbers(msgspec.inspect.type_info(document), document.__name__) == []


@pytest.mark.parametrize("name", ["", "a\\u0000b", "x" * 5000])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(RunFormatError, match="damaged manifest"):
        decode_rank(b'{"schema_version": 1, "rank": 0, "traces": ["%b"]}' % name.encode(), "m")


def test_a_document_of_very_many_values_is_refused_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "DOCUMENT_MOST_VALUES", 1000)
    data = b'{"x": [' + b"{}," * 999 + b"{}]}"
    with pytest.raises(InputError, match=r"a: is none \(2001 values, expected at most 1000\)$"):
        files.decode_json(data, dict[str, Any], "a: is none", error=InputError)
