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
import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chopper.analyzers.causes import clock
from chopper.collectors import amd, knobs, nvml
from chopper.collectors.amd import _sources as amd_sources
from chopper.collectors.devices import Errors, columns_of
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

FIELDS = {
    "energy_j": ("TOTAL_ENERGY_CONSUMPTION",),
    "power_average_w": ("POWER_AVERAGE",),
    "memory_temperature_c": ("MEMORY_TEMP",),
    "pcie_tx_bytes": ("PCIE_COUNT_TX_BYTES",),
    "pcie_rx_bytes": ("PCIE_COUNT_RX_BYTES",),
    "link_tx_bytes": ("NVLINK_THROUGHPUT_DATA_TX", "NVLINK_COUNT_XMIT_BYTES"),
    "link_rx_bytes": ("NVLINK_THROUGHPUT_DATA_RX", "NVLINK_COUNT_RCV_BYTES"),
    "ecc_corrected_count": ("ECC_SBE_VOL_TOTAL",),
    "ecc_uncorrected_count": ("ECC_DBE_VOL_TOTAL",),
    "pcie_replay_count": ("PCIE_REPLAY_COUNTER",),
    "power_throttle_ns": ("PERF_POLICY_POWER",),
    "thermal_throttle_ns": ("PERF_POLICY_THERMAL",),
    "sync_boost_throttle_ns": ("PERF_POLICY_SYNC_BOOST",),
    "board_limit_throttle_ns": ("PERF_POLICY_BOARD_LIMIT",),
    "reliability_throttle_ns": ("PERF_POLICY_RELIABILITY",),
    "application_clock_ns": ("PERF_POLICY_TOTAL_APP_CLOCKS",),
    "software_thermal_ns": ("CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",),
    "hardware_thermal_ns": ("CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",),
    "power_brake_ns": ("CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",),
    "link_error_count": (
        "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
        "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    ),
}
METRICS = {
    "sm_utilization_ratio": "SM_UTIL",
    "sm_occupancy_ratio": "SM_OCCUPANCY",
    "tensor_utilization_ratio": "ANY_TENSOR_UTIL",
    "dram_utilization_ratio": "DRAM_BW_UTIL",
    "fp64_utilization_ratio": "FP64_UTIL",
    "fp32_utilization_ratio": "FP32_UTIL",
    "fp16_utilization_ratio": "FP16_UTIL",
    "pcie_tx_bytes_per_s": "PCIE_TX_PER_SEC",
    "pcie_rx_bytes_per_s": "PCIE_RX_PER_SEC",
    "link_rx_bytes_per_s": "NVLINK_TOTAL_RX_PER_SEC",
    "link_tx_bytes_per_s": "NVLINK_TOTAL_TX_PER_SEC",
}


def test_nvml_fields_and_metrics_are_the_headers(nvml_header: Path, tmp_path: Path) -> None:
    assert list(FIELDS) == [field.column for field in nvml_sources._FIELDS]
    assert METRICS.keys() == nvml_sources._ACTIVITIES.keys()
    used = {f"NVML_FI_DEV_{name}": field.field_id for name, field in fields()}
    used |= {
        f"NVML_GPM_METRIC_{name}": nvml_sources._ACTIVITIES[column][0]
        for column, name in METRICS.items()
    }
    agree(tmp_path, nvml_header, used)


def fields() -> list[tuple[str, nvml_sources.Field]]:
    """Every field that is read, by its name in the header."""
    return [
        (name, one)
        for field in nvml_sources._FIELDS
        for name, one in zip(FIELDS[field.column], (field, *field.alternatives), strict=True)
    ]


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
            r"\bNVML_(?:FI_DEV|GPM_METRIC)_(\w+)\b[^\n/]*//!<([^\n]*)", nvml_header.read_text()
        )
    )
    factors = [(name, field.unit.factor) for name, field in fields()]
    factors += [
        (name, nvml_sources._ACTIVITIES[column][1].factor) for column, name in METRICS.items()
    ]
    checked = []
    for name, factor in factors:
        says = [unit for unit, pattern in UNITS.items() if re.search(pattern, comments[name])]
        if says:
            assert says == [factor], f"{name}: {comments[name].strip()}"
            checked.append(name)
    assert len(checked) == 14
    nanoseconds = [name for name, _ in factors if comments[name].rstrip().endswith(" in ns")]
    assert nanoseconds == list(sum((FIELDS[c] for c in FIELDS if FIELDS[c][0][:6] == "CLOCKS"), ()))


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
    used[f"{REASONS['power cap']} + 0"] = amd_sources._REASON_POWER_CAP
    used[f"{REASONS['thermal']} + 0"] = amd_sources._REASON_THERMAL
    used[f"{REASONS['hardware thermal']} + 0"] = amd_sources._REASON_PROCHOT
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


OF_BINDING = {
    "nvmlFieldValue_t": "c_nvmlFieldValue_t",
    "nvmlGpmMetric_t": "c_nvmlGpmMetric_t",
    "nvmlGpmMetricsGet_t": "c_nvmlGpmMetricsGet_t",
    "nvmlGpmSupport_t": "c_nvmlGpmSupport_t",
    "nvmlMemory_v2_t": "c_nvmlMemory_v2_t",
    "nvmlPciInfo_t": "nvmlPciInfo_t",
    "nvmlSample_t": "c_nvmlSample_t",
}


def test_the_binding_lays_structures_out_as_nvml_h(nvml_header: Path, tmp_path: Path) -> None:
    import ctypes

    import pynvml

    used = {}
    for name, bound in OF_BINDING.items():
        structure = getattr(pynvml, bound)
        used[f"sizeof({name})"] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            used[f"offsetof({name}, {field})"] = getattr(structure, field).offset
    used["NVML_GPM_METRICS_GET_VERSION"] = pynvml.NVML_GPM_METRICS_GET_VERSION
    agree(tmp_path, nvml_header, used)


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
    "amdsmi_gpu_metrics_t": None,  # all of it: fields are found by their names
    "amdsmi_enumeration_info_t": ("hip_id", "hip_uuid"),
    "amdsmi_clk_info_t": ("min_clk", "max_clk"),
    "amdsmi_power_cap_info_t": (
        *("power_cap", "default_power_cap", "min_power_cap", "max_power_cap"),
    ),
    "amdsmi_vram_usage_t": ("vram_total", "vram_used"),
    "amdsmi_kfd_info_t": ("current_partition_id",),
}
AMD_CONSTANTS = {
    "AMDSMI_INIT_AMD_GPUS": amd._INIT_GPUS,
    "AMDSMI_CLK_TYPE_GFX": amd_sources._CLOCK_GFX,
    "AMDSMI_CLK_TYPE_SYS": amd_sources._CLOCK_GFX,
    "AMDSMI_XGMI_LINK_UP": amd_sources._LINK_UP,
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
        assert set(fields or ()) <= set(bound["layouts"][name]["at"]), name
    metrics = set(bound["layouts"]["amdsmi_gpu_metrics_t"]["at"])
    read = (
        set(
            re.findall(
                r'"((?:current|average|temperature|pcie|xgmi|energy|accumulation|ppt|socket|vr|hbm|'
                r'prochot)_\w+)"',
                Path(amd_sources.__file__).read_text(),
            )
        )
        - set(columns_of("device_counter"))
        - set(columns_of("device_limit"))
    )
    assert read <= metrics, f"no fields of amdsmi_gpu_metrics_t: {sorted(read - metrics)}"
    assert len(read) >= 20
    codes = set(bound["status"].values()) - {0}
    assert codes == set(amd.ERRORS)
    for name, loss in AMD_LOSSES.items():
        assert amd.ERRORS[bound["status"][f"AMDSMI_STATUS_{name}"]][0] == loss, name


@needs_amdsmi
def test_amdsmis_binding_lays_structures_out_as_amdsmi_h(
    amd_library: tuple[Path, dict[str, list[int]]], tmp_path: Path
) -> None:
    header = Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "include", "amd_smi", "amdsmi.h")
    if not header.is_file():
        pytest.skip(f"ROCm is not installed: no {header}, and no package of PyPI or Debian has it")
    bound = bound_of_amd(amd_library, tmp_path)
    used = dict(bound["constants"])
    for name, layout in bound["layouts"].items():
        used[f"sizeof({name})"] = layout["size"]
        named = {f: at for f, at in layout["at"].items() if not f.startswith("PADDING")}
        used |= {f"offsetof({name}, {field})": at for field, at in named.items()}
    used |= {name: code for name, code in bound["status"].items() if code < 1 << 31}
    agree(tmp_path, header, used)


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
