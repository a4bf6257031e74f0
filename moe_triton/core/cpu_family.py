"""The name of this machine's CPU in tables of settings."""

from __future__ import annotations

import functools
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel", "HygonGenuine": "hygon"}


@functools.cache
def cpu_family() -> str:
    """Vendor, family and model with dashes between them, as ``amd-25-1``; or "unknown".

    Cores of one family and model have the same caches and vector units.
    """
    try:
        return family_of(CPUINFO.read_text(encoding="utf-8"))
    except OSError:
        return "unknown"


def family_of(cpuinfo: str) -> str:
    """`cpu_family` of the text of /proc/cpuinfo, of x86 or Arm."""
    fields = dict(re.findall(r"^([^\t:]+)\s*: (.*)$", cpuinfo, flags=re.M))
    vendor = fields.get("vendor_id", "")
    names = _VENDORS.get(vendor, vendor), fields.get("cpu family"), fields.get("model")
    if not vendor:
        names = "arm", fields.get("CPU implementer"), fields.get("CPU part")
    return "-".join(names).lower() if all(names) else "unknown"  # type: ignore[arg-type]
