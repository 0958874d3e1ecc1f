"""Identifiers and layouts against the vendors' own headers, which packages of the dev extra bring.

Nothing of a vendor is kept in this repository: ``nvml.h`` comes with nvidia-nvml-dev, CUPTI's and
rocprofiler-sdk's headers with triton, amdsmi's structures with its own binding, and ``amdsmi.h``
with ROCm where that is installed.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from chopper.analyzers.causes import clock
from chopper.collectors import amd, knobs, nvml
from chopper.collectors.devices import Errors
from chopper.collectors.formats import nsys, rocpd
from chopper.collectors.nvml import _sources as nvml_sources
from chopper.reports import live
from tests.collectors.amd_player import ONE as ONE_AMD
from tests.collectors.amd_player import Player as AmdPlayer
from tests.collectors.amd_player import needs_amdsmi

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]


def header_of(package: str, name: str) -> Path:
    """Where an installed package has a header; skips where it is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed, which brings {name}: pip install {package}")
    found = [Path(str(file.locate())) for file in files if file.name == name]
    assert len(found) == 1, f"{package} has {len(found)} files named {name}"
    return found[0]


def evaluated(
    folder: Path, header: Path, expressions: Iterable[str], *includes: Path, before: str = ""
) -> dict[str, int]:
    """The value of each C expression, by a program that includes a header."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to read the vendors' headers with")
    wanted = list(dict.fromkeys(expressions))
    prints = "".join(f'    printf("%lld\\n", (long long)({one}));\n' for one in wanted)
    source = folder / "facts.c"
    source.write_text(
        f'{before}#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\n'
        f"int main(void) {{\n{prints}    return 0;\n}}\n"
    )
    options = [f"-I{path}" for path in (header.parent, *includes)]
    program = folder / "facts"
    subprocess.run([compiler, "-w", *options, "-o", program, source, "-lm"], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(zip(wanted, map(int, printed.split()), strict=True))


def agree(folder: Path, header: Path, used: dict[str, int], *includes: Path, **more: str) -> None:
    """What the code uses is what the header says."""
    assert used == evaluated(folder, header, used, *includes, **more)


@pytest.fixture(scope="module")
def nvml_header() -> Path:
    return header_of("nvidia-nvml-dev", "nvml.h")


def triton_header(vendor: str, name: str) -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip(f"triton is not installed, which brings {name}: pip install triton")
    return Path(spec.origin).parent / "backends" / vendor / "include" / name


# ---------------------------------------------------------------- NVML

SLOWDOWNS = {
    "software_thermal_ns": "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "hardware_thermal_ns": "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "power_brake_ns": "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}
"""Fields that older releases of the binding do not name."""


def named(prefix: str, number: int) -> str:
    """The binding's name of a number, without its prefix; some have two."""
    names: list[str] = [
        n for n, value in vars(pynvml).items() if n.startswith(prefix) and value == number
    ]
    return min(names, key=len).removeprefix(prefix)


def factors() -> dict[str, tuple[int, float]]:
    """Every field and metric by its name in the header: its number, and the factor of its unit."""
    found: dict[str, tuple[int, float]] = {}
    for field in nvml_sources._FIELDS:
        for one in (field, *field.alternatives):
            name = SLOWDOWNS.get(field.column) or named("NVML_FI_DEV_", one.field_id)
            found[f"FI_DEV_{name}"] = one.field_id, one.unit.factor
    for number, unit in nvml_sources._ACTIVITIES.values():
        found[f"GPM_METRIC_{named('NVML_GPM_METRIC_', number)}"] = number, unit.factor
    return found


def test_nvml_fields_and_metrics_are_the_headers(nvml_header: Path, tmp_path: Path) -> None:
    agree(
        tmp_path, nvml_header, {f"NVML_{name}": number for name, (number, _) in factors().items()}
    )


UNITS = {
    1e-3: r"\bmJ\b|[Mm]illiwatts",
    nvml_sources._KIB: r"\bKiB\b",
    float(1 << 20): r"\bMiB/sec\b",
    0.01: r"Percentage of",
}


def test_units_are_those_that_nvml_documents(nvml_header: Path) -> None:
    """Where the header names a unit beside the identifier, the factor is that unit's."""
    comments = dict(
        re.findall(
            r"\bNVML_((?:FI_DEV|GPM_METRIC)_\w+)\b[^\n/]*//!<([^\n]*)", nvml_header.read_text()
        )
    )
    checked = []
    for name, (_, factor) in factors().items():
        says = [unit for unit, pattern in UNITS.items() if re.search(pattern, comments[name])]
        if says:
            assert says == [factor], f"{name}: {comments[name].strip()}"
            checked.append(name)
    assert len(checked) == 14
    nanoseconds = {name for name in factors() if comments[name].rstrip().endswith(" in ns")}
    assert nanoseconds == {f"FI_DEV_{name}" for name in SLOWDOWNS.values()}


REASONS = {
    "idle": "nvmlClocksEventReasonGpuIdle",
    "application clock": "nvmlClocksEventReasonApplicationsClocksSetting",
    "power cap": "nvmlClocksEventReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "sync boost": "nvmlClocksEventReasonSyncBoost",
    "thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hardware thermal": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}
LABELS = {
    clock._POWER: ("power cap", "power brake"),
    clock._THERMAL: ("thermal", "hardware thermal"),
    clock._APPLICATION: ("application clock", "sync boost"),
}
UNNAMED = {
    clock._POWER: "nvmlClocksEventReasonBoardLimit",
    clock._THERMAL: "0",
    clock._APPLICATION: "nvmlClocksEventReasonDisplayClockSetting",
}


def test_reasons_of_clocks_are_nvmls_bits(nvml_header: Path, tmp_path: Path) -> None:
    used = {REASONS[name]: bit for bit, name in live._REASONS}
    assert len(used) == len(REASONS)
    for label, names in LABELS.items():
        parts = [REASONS[name] for name in names] + [UNNAMED[label]]
        used[" | ".join(parts)] = clock._BITS[label]
    used[f"{REASONS['idle']} + 0"] = clock._IDLE_BIT
    used[f"{REASONS['application clock']} + 0"] = clock._SET_BIT
    used[f"{REASONS['power cap']} + 0"] = amd._REASON_POWER_CAP
    used[f"{REASONS['thermal']} + 0"] = amd._REASON_THERMAL
    used[f"{REASONS['hardware thermal']} + 0"] = amd._REASON_PROCHOT
    agree(tmp_path, nvml_header, used)


def test_nvmls_errors_are_all_explained(nvml_header: Path, tmp_path: Path) -> None:
    names = set(re.findall(r"^\s*(NVML_ERROR_\w+)\s*=", nvml_header.read_text(), re.MULTILINE))
    codes = evaluated(tmp_path, nvml_header, sorted(names))
    assert set(codes.values()) == set(Errors("NVML"))
    for name, loss in {
        "NOT_SUPPORTED": "sensor",
        "NO_PERMISSION": "sensor",
        "ARGUMENT_VERSION_MISMATCH": "sensor",
        "GPU_IS_LOST": "device",
        "RESET_REQUIRED": "device",
        "DRIVER_NOT_LOADED": "library",
        "LIBRARY_NOT_FOUND": "library",
        "TIMEOUT": "moment",
        "NO_DATA": "moment",
    }.items():
        assert nvml.ERRORS[codes[f"NVML_ERROR_{name}"]][0] == loss, name
    assert codes["NVML_ERROR_ARGUMENT_VERSION_MISMATCH"] == nvml._VERSION_MISMATCH
    assert codes["NVML_ERROR_NO_PERMISSION"] == knobs._NVML_NO_PERMISSION


def test_nvmls_structures_lie_where_they_are_read(nvml_header: Path, tmp_path: Path) -> None:
    """The patterns by which fields and metrics are taken apart, against nvml.h."""
    assert nvml._FIELD.format == "<4x4x8x8xIi8s"
    assert nvml._METRIC.format == "<4xid24x"
    agree(
        tmp_path,
        nvml_header,
        {
            "sizeof(nvmlFieldValue_t)": nvml._FIELD.size,
            "offsetof(nvmlFieldValue_t, valueType)": 24,
            "offsetof(nvmlFieldValue_t, nvmlReturn)": 28,
            "offsetof(nvmlFieldValue_t, value)": 32,
            "sizeof(nvmlGpmMetric_t)": nvml._METRIC.size,
            "offsetof(nvmlGpmMetric_t, nvmlReturn)": 4,
            "offsetof(nvmlGpmMetric_t, value)": 8,
            "NVML_VALUE_TYPE_COUNT": len(nvml._TYPES),
        },
    )


VALUES = ["dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"]
TYPES = [
    *("DOUBLE", "UNSIGNED_INT", "UNSIGNED_LONG", "UNSIGNED_LONG_LONG"),
    *("SIGNED_LONG_LONG", "SIGNED_INT", "UNSIGNED_SHORT"),
]


def test_values_are_decoded_by_nvmls_types(nvml_header: Path, tmp_path: Path) -> None:
    """Each member of nvmlValue_t, as C stores 7 in it, is read as 7 by its type's number."""
    used = {f"NVML_VALUE_TYPE_{name}": number for number, name in enumerate(TYPES)}
    agree(tmp_path, nvml_header, used)
    raw = evaluated(
        tmp_path,
        nvml_header,
        [f"((union {{ nvmlValue_t v; long long n; }}){{.v.{m} = 7}}).n" for m in VALUES],
    )
    for kind, number in enumerate(raw.values()):
        assert nvml.decoded(kind, number.to_bytes(8, "little")) == 7, VALUES[kind]


def test_the_call_of_fields_has_nvmls_signature(nvml_header: Path, tmp_path: Path) -> None:
    """The one function that is called without the binding's own."""
    # &nvmlX must not be linked: _Generic does not evaluate its argument.
    prototype = (
        "_Generic(&nvmlDeviceGetFieldValues, "
        "nvmlReturn_t (*)(nvmlDevice_t, int, nvmlFieldValue_t *): 1, default: 0)"
    )
    agree(tmp_path, nvml_header, {prototype: 1})


# ---------------------------------------------------------------- AMD

USED_OF_AMD = {
    "amdsmi_gpu_metrics_t": (),
    "amdsmi_enumeration_info_t": ("hip_id", "hip_uuid"),
    "amdsmi_clk_info_t": ("min_clk",),
    "amdsmi_power_cap_info_t": ("min_power_cap",),
    "amdsmi_vram_usage_t": (),
    "amdsmi_kfd_info_t": (),
}
AMD_CONSTANTS = {
    "AMDSMI_INIT_AMD_GPUS": amd._INIT_GPUS,
    "AMDSMI_CLK_TYPE_GFX": amd._CLOCK_GFX,
    "AMDSMI_CLK_TYPE_SYS": amd._CLOCK_GFX,
    "AMDSMI_XGMI_LINK_UP": amd._LINK_UP,
    "AMDSMI_STATUS_NO_PERM": knobs._AMDSMI_NO_PERMISSION,
}
AMD_LOSSES = {
    "NOT_SUPPORTED": "sensor",
    "NO_PERM": "sensor",
    "NOT_FOUND": "device",
    "DRIVER_NOT_LOADED": "library",
    "BUSY": "moment",
    "NO_DATA": "moment",
}


def bound_of_amd(library: tuple[Path, dict[str, list[int]]], folder: Path) -> dict[str, Any]:
    """What amdsmi's binding, which AMD generates of its header, says."""
    code = f"""
    w = amd.load()
    layouts = {{name: {{"size": ctypes.sizeof(getattr(w, name)), "at": {{
        f: getattr(getattr(w, name), f).offset for f, *_ in getattr(w, name)._fields_}}}}
        for name in {list(USED_OF_AMD)!r}}}
    print(json.dumps({{
        "layouts": layouts,
        "constants": {{name: getattr(w, name) for name in {list(AMD_CONSTANTS)!r}}},
        "status": {{name: code for code, name in w.amdsmi_status_t__enumvalues.items()}},
        "version": __import__("amdsmi")._version.__version__
            if hasattr(__import__("amdsmi"), "_version") else "",
    }}))
    """
    found: dict[str, Any] = AmdPlayer(*library, folder)([ONE_AMD], code)
    return found


@needs_amdsmi
def test_what_is_used_of_amdsmi_is_its_bindings(
    amd_library: tuple[Path, dict[str, list[int]]], tmp_path: Path
) -> None:
    bound = bound_of_amd(amd_library, tmp_path)
    assert bound["constants"] == AMD_CONSTANTS
    for name, fields in USED_OF_AMD.items():
        assert set(fields) <= set(bound["layouts"][name]["at"]), name
    metrics = set(bound["layouts"]["amdsmi_gpu_metrics_t"]["at"])
    sources = (amd.ClockSource, amd.CounterSource, amd.LimitSource)
    read = {name for source in sources for _, names in source.fields.values() for name in names}
    assert read | set(amd._RESIDENCIES) <= metrics
    for source in (*sources, amd.PartitionSource):
        for _, call, member in source.answers.values():
            assert member in bound["layouts"][amd._CALLS[call][0]]["at"], member
    codes = set(bound["status"].values()) - {0}
    assert codes == set(amd.ERRORS)
    for name, loss in AMD_LOSSES.items():
        assert amd.ERRORS[bound["status"][f"AMDSMI_STATUS_{name}"]][0] == loss, name


# ---------------------------------------------------------------- profilers


def test_copies_of_nsys_are_cuptis_kinds(tmp_path: Path) -> None:
    header = triton_header("nvidia", "cupti_activity.h")
    used = {
        f"CUPTI_ACTIVITY_MEMCPY_KIND_{name.upper()}": kind
        for kind, name in nsys._COPIES.items()
        if kind <= 10
    }
    assert len(used) == 10
    agree(tmp_path, header, used)
    # nsys names its tables after them.
    kinds = header.read_text()
    tables = (nsys._KERNEL, nsys._MEMCPY, nsys._MEMSET, nsys._RUNTIME, nsys._GRAPH)
    for table in tables:
        assert re.search(rf"^\s*{table}\s*=", kinds, re.MULTILINE), table


def test_kinds_are_those_that_a_real_export_lists(traces_dir: Path, tmp_path: Path) -> None:
    """An export of nsys holds its enumerations: copies (unified memory too) and kinds of memory."""
    packed = traces_dir / "pipit-nsys" / "nsys-export-a100.sqlite.gz"
    database = tmp_path / "export.sqlite"
    database.write_bytes(gzip.decompress(packed.read_bytes()))
    with sqlite3.connect(database) as db:
        copies = dict(db.execute("SELECT id, name FROM ENUM_CUDA_MEMCPY_OPER"))
        memory = dict(db.execute("SELECT id, label FROM ENUM_CUDA_MEM_KIND"))
    assert {
        kind: f"{name[-4]}to{name[-1]}" for kind, name in copies.items() if kind
    } == nsys._COPIES
    assert nsys._MEMORY.items() <= memory.items()


def test_copies_of_rocprofv3_are_rocprofiler_sdks(tmp_path: Path) -> None:
    header = triton_header("amd", "rocprofiler-sdk/fwd.h")
    names = re.findall(r"\bROCPROFILER_(MEMORY_COPY_\w+_TO_\w+)\b", header.read_text())
    assert {name.removeprefix("MEMORY_COPY_") for name in names} == set(rocpd._COPY_NAMES)
    for name in names:
        assert "Memcpy (" not in rocpd.copy_name(name)
    assert json.dumps(sorted(set(names))).count("MEMORY_COPY") == 4
