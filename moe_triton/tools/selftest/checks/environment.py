"""What is installed, the back end's assumptions about it, the number of devices, and whether one works."""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from moe_triton.backends.cpu.triton.toolchain import distribution_version
from moe_triton.backends.npu import toolchain
from moe_triton.tools.selftest.check import Assumption, Check, Finding, Place, Settings

STAGE = "environment"
TOOLCHAIN, DEVICES, BACKEND = "toolchain", "devices", "back end"
ASSUMPTIONS_MODULE = "moe_triton.tools.selftest.npu_assumptions"
MIN_RANKS = 2
ON_BOTH = ("triton-ascend", "pybind11")  # of the components that the doctor knows


def environment_checks(settings: Settings) -> list[Check]:
    """Checks before anything else can run. Assumptions come before everything that uses a device."""
    return [
        Check("versions", STAGE, find_versions, on_device=False),
        Check(TOOLCHAIN, STAGE, find_toolchain, on_device=False),
        *(_assumptions() if settings.backend == "npu" else ()),
        Check(DEVICES, STAGE, count_devices, needs=(TOOLCHAIN,), on_device=False),
        Check(BACKEND, STAGE, use_device, needs=(TOOLCHAIN,)),
    ]


def find_versions(place: Place) -> Finding:
    """Versions of everything that matters."""
    return Finding(facts=versions())


def find_toolchain(place: Place) -> Finding:
    """Whether the back end's components are installed; for each missing one, how to get it."""
    from moe_triton.tools.cli.doctor import COPIES, components

    is_npu = place.settings.backend == "npu"
    wrong, facts = [], {}
    for name, present, detail, remedy in components():
        if is_npu != name.startswith("npu:") and not (is_npu and name in ON_BOTH):
            continue
        if present or name.startswith(COPIES):
            facts[name] = detail or ("present" if present else "none")
        else:
            wrong.append(f"{name.removeprefix('npu: ')} is missing: {remedy}")
    return Finding(wrong=tuple(wrong), facts=facts)


def count_devices(place: Place) -> Finding:
    """The number of devices, and of the group's ranks: the same, or the one in the settings."""
    asked = place.settings.ranks
    if place.settings.backend == "cpu":
        devices, name = len(os.sched_getaffinity(0)), cpu_model()
        ranks = asked or MIN_RANKS
    else:
        # torch_npu documentation, torch_npu.npu: device_count, get_device_name (as in torch.cuda)
        npu = importlib.import_module("torch_npu").npu
        devices = int(npu.device_count())
        name = str(npu.get_device_name(0)) if devices else "none"
        if (ranks := asked or devices) > devices:
            return Finding(wrong=(f"{ranks} ranks were asked for, but there are {devices} devices",))
    figures = {"devices": float(devices), "ranks": float(ranks)}
    facts = {"SoC": name}
    few = f"a group has at least {MIN_RANKS} ranks, each with a device of its own; here it gets {ranks}"
    return Finding(wrong=(few,) if ranks < MIN_RANKS else (), figures=figures, facts=facts)


def use_device(place: Place) -> Finding:
    """Whether the back end can be made, and memory of its device keeps what is written."""
    backend = place.backend
    sent = torch.arange(1 << 16, dtype=torch.int32)
    on_device = sent.to(backend.device)
    held = backend.empty(sent.shape, sent.dtype)
    held.copy_(on_device)
    backend.synchronize()
    facts = {**backend.identity(), "blocks for one rank": str(backend.num_blocks(1))}
    wrong = () if torch.equal(held.cpu(), sent) else ("numbers came back from the device changed",)
    return Finding(wrong=wrong, facts=facts)


def _assumptions() -> list[Check]:
    """A check for each assumption; a single failing one if there is no npu back end."""
    try:
        assumptions = _declared()
    except ImportError as error:
        return [Check("assumptions", STAGE, refuse, (f"there is no npu back end: {error}",), on_device=False)]
    own = partial(Check, stage=STAGE, function=check_assumption, needs=(TOOLCHAIN,), on_device=False)
    return [own(f"assumption: {each.name}", arguments=(each.name,), page=each.page) for each in assumptions]


def refuse(place: Place, reason: str) -> Finding:
    """Fails with a reason."""
    return Finding(wrong=(reason,))


def check_assumption(place: Place, name: str) -> Finding:
    """Whether one of the back end's assumptions holds, without making the back end, which needs them."""
    # torch_npu documentation, torch_npu.npu: set_device (as in torch.cuda)
    importlib.import_module("torch_npu").npu.set_device(0)
    assumption = next(known for known in _declared() if known.name == name)
    try:
        violation = assumption.check()
    except Exception as error:  # any error is a finding
        return Finding(wrong=(f"{type(error).__name__}: {error}",), left=True)
    return Finding(wrong=() if violation is None else (violation,))


def _declared() -> Sequence[Assumption]:
    declared: Sequence[Assumption] = importlib.import_module(ASSUMPTIONS_MODULE).ASSUMPTIONS
    return declared


PACKAGES = ("moe_triton", "torch", "torch_npu", "triton-ascend", "ascendnpu-ir", "memfabric-hybrid", "numpy")
MISSING = "not installed"


def versions() -> dict[str, str]:
    """Names and versions, without the machine's name, users or addresses."""
    facts = {package: distribution_version(package) or MISSING for package in PACKAGES}
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
    match = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), flags=re.M)
    return match[1] if match else platform.machine()


def cpu_ghz() -> float | None:
    """The clock of the first core, if the kernel reports it."""
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", _read(Path("/proc/cpuinfo")), flags=re.M)
    return float(match[1]) / 1000 if match and float(match[1]) > 0 else None


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
