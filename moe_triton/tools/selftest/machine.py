"""What is installed, and the machine. Each fact is looked up separately: failures hide no others."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from moe_triton.backends.npu import toolchain

PACKAGES = ("moe_triton", "torch", "torch_npu", "triton-ascend", "ascendnpu-ir", "memfabric-hybrid", "numpy")
MISSING = "not installed"


def versions() -> dict[str, str]:
    """Names and versions, without the machine's name, users or addresses."""
    facts = {package: _package(package) for package in PACKAGES}
    cann, driver = toolchain.find_cann(), toolchain.driver_version()
    facts["CANN"] = MISSING if cann is None else cann.version.text if cann.version else "version unknown"
    facts["driver"] = driver.text if driver else MISSING
    facts["Python"] = platform.python_version()
    facts["OS"] = _distribution()
    facts["kernel"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    facts["CPU"] = cpu_model()
    facts["CPU cores"] = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    return facts


def cpu_model() -> str:
    """As the kernel names it."""
    text = _read(Path("/proc/cpuinfo"))
    found = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", text, flags=re.M)
    return found[1] if found else platform.machine()


def cpu_ghz() -> float | None:
    """The clock of the first core, if the kernel reports it."""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", _read(Path("/proc/cpuinfo")), flags=re.M)
    return float(found[1]) / 1000 if found and float(found[1]) > 0 else None


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return MISSING


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
