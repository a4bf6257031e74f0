"""What is installed and what it runs on. Each fact is looked up by itself: none may keep the others away."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

PACKAGES = ("moe_triton", "torch", "torch_npu", "triton-ascend", "ascendnpu-ir", "memfabric-hybrid", "numpy")
# CANN documentation, "Querying software versions": a file of the toolkit, and one of the driver.
DRIVER_VERSION = Path("/usr/local/Ascend/driver/version.info")
TOOLKIT_VERSIONS = ("version.cfg", "ascend_toolkit_install.info", "*/ascend_toolkit_install.info")
MISSING = "not installed"


def versions() -> dict[str, str]:
    """Names and versions, without any of the machine's own name, its users or its addresses."""
    facts = {package: _package(package) for package in PACKAGES}
    facts["CANN"] = _toolkit()
    facts["driver"] = _version_in(DRIVER_VERSION) or MISSING
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
    """The clock that the kernel reports for the first core, where it does."""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", _read(Path("/proc/cpuinfo")), flags=re.M)
    return float(found[1]) / 1000 if found and float(found[1]) > 0 else None


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return MISSING


def _toolkit() -> str:
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        return MISSING
    for pattern in TOOLKIT_VERSIONS:
        for path in sorted(Path(home).glob(pattern)):
            if version := _version_in(path):
                return version
    return "version unknown"


def _version_in(path: Path) -> str | None:
    """The value of a line like ``Version=8.2`` or ``[runtime_running_version=[8.2]]``."""
    found = re.search(r"version\w*\s*=\s*\[?([\w.:\-]+)", _read(path), flags=re.I)
    return found[1] if found else None


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
