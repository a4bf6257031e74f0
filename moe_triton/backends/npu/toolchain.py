"""CANN, its compiler, the driver and the processor: locations, versions, and whether they fit together.

Nothing here needs an NPU or torch_npu. kernels_ascendc/cmake/npu.cmake reads the same files
when CMake runs alone; tests/build keeps the two in step.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import NamedTuple

from moe_triton.core.errors import ToolchainError
from moe_triton.core.soc import Soc, soc_of

# With 8.0 to 8.2, bisheng takes kernels as -xcce only. Their type is then a macro that stands for nothing
# unless CANN's own build plugin reads it ("Setting the Kernel Type"); without the mixed type SyncAll hangs.
# The options that the plugin passes for vector cores would be missing too.
OLDEST_CANN = (8, 3)
WHY_OLDEST_CANN = (
    "before that, bisheng by itself makes no kernel whose blocks can meet in SyncAll: they would hang"
)
# CANN's release notes ("CANN and Ascend HDK Version Compatibility", 8.5.0 and 9.1.0): drivers of 25.0 on for
# 8.5 and 9.0, of 25.2 on for 9.1. For 8.0: "Installing the NPU Driver, Firmware, and CANN" of mxIndex.
OLDEST_DRIVERS = {(8, 0): (24, 1), (8, 5): (25, 0), (9, 1): (25, 2)}
HOMES = (Path("/usr/local/Ascend/cann"), Path("/usr/local/Ascend/ascend-toolkit/latest"))
DRIVER_INFO = Path("/usr/local/Ascend/driver/version.info")
_SMI_SECONDS = 20
# "Querying the Software Package Version" has it in <arch>-linux, arch being aarch64 or x86_64.
_OF_MACHINE = "-linux"

# ascend_toolkit_install.info: "Querying the Software Package Version". version.cfg, which older packages
# have, is on no page that was found: toolkit_running_version=[7.7.0.1.238:8.2.RC1].
_VERSION = re.compile(r"^version=(\d+\.\d+.*)$|^toolkit_running_version=.*:(\d+\.\d+[^\]\n]*)", re.M)


class Version(NamedTuple):
    """A version, compared by its first two numbers."""

    numbers: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Cann:
    """An installation of CANN.

    Attributes:
        home: its folder, ``ASCEND_HOME_PATH``.
        version: read from its files; None if they do not have it.
        bisheng: the compiler; None if the package has none.
        machines: architectures that it is for; none if its folders do not say.
    """

    home: Path
    version: Version | None
    bisheng: Path | None
    machines: tuple[str, ...] = ()

    def why_not_here(self) -> str:
        """Why its programs do not run on this machine; empty if nothing says so."""
        here = platform.machine()
        if not self.machines or here in self.machines:
            return ""
        return f"it is for {' and '.join(self.machines)}, and this machine is {here}"


@dataclass(frozen=True)
class Versions:
    """What an NPU back end runs on."""

    cann: Cann
    driver: Version
    soc: Soc


def find_cann(home: Path | None = None) -> Cann | None:
    """CANN in a folder; by default that of ``ASCEND_HOME_PATH``, or else the default installation."""
    named = [Path(value) for value in (os.environ.get("ASCEND_HOME_PATH"),) if value]
    candidates = [home] if home else named or list(HOMES)
    folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
    if folder is None:
        return None
    return Cann(folder, cann_version(folder), find_bisheng(folder), cann_machines(folder))


def cann_machines(home: Path) -> tuple[str, ...]:
    """The architectures that a CANN is for, as `platform.machine` calls them; none if no folder says."""
    folders = (folder.name for folder in home.glob(f"*{_OF_MACHINE}") if folder.is_dir())
    return tuple(sorted(name.removesuffix(_OF_MACHINE) for name in folders))


def cann_version(home: Path) -> Version | None:
    """The version in the files of a CANN; those for another architecture than this machine's are left out."""
    files = [
        home / f"{platform.machine()}{_OF_MACHINE}" / "ascend_toolkit_install.info",
        home / "ascend_toolkit_install.info",
        home / "version.cfg",
    ]
    for file in files:
        if file.is_file() and (match := _VERSION.search(file.read_text(errors="replace"))):
            return parse_version(match[1] or match[2])
    return None


def find_bisheng(home: Path) -> Path | None:
    """The compiler of a CANN; or one on the PATH."""
    # "BiSheng Compiler: Heterogeneous Compilation" names the second folder; some packages have the first.
    for folder in (home / "bin", home / "compiler" / "ccec_compiler" / "bin"):
        if os.access(folder / "bisheng", os.X_OK):
            return folder / "bisheng"
    on_path = shutil.which("bisheng")
    return Path(on_path) if on_path else None


def parse_version(text: str) -> Version | None:
    """``8.2.RC1`` -> ((8, 2), "8.2.RC1"); None if it is no version."""
    numbers = re.match(r"\s*(\d+)\.(\d+)", text)
    return Version((int(numbers[1]), int(numbers[2])), text.strip()) if numbers else None


def driver_version(info: Path | None = None) -> Version | None:
    """The driver's version, ``Version=`` in its ``version.info``; None without a driver."""
    file = info or DRIVER_INFO
    match = re.search(r"^Version=(.*)$", file.read_text(errors="replace"), re.M) if file.is_file() else None
    return parse_version(match[1]) if match else None


def soc_name() -> str | None:
    """The processor's name by torch_npu, or else by ``npu-smi``; None if neither knows it."""
    return _soc_of_torch_npu() or _soc_of_npu_smi()


def check_cann(home: Path | None = None) -> Cann:
    """A CANN that can build the kernels.

    Raises:
        ToolchainError: there is none, it is for other machines, has no compiler, or is too old.
    """
    if (cann := find_cann(home)) is None:
        where = home or os.environ.get("ASCEND_HOME_PATH") or f"not in {' or '.join(map(str, HOMES))}"
        raise ToolchainError(
            f"CANN is missing ({where}), but the kernels for the NPU need it. "
            "Install CANN's toolkit package and source its set_env.sh, or pass --cann PATH."
        )
    if why := cann.why_not_here():
        raise ToolchainError(
            f"CANN in {cann.home} does not run here: {why}. "
            f"Install the {platform.machine()} package of CANN's toolkit and source its set_env.sh."
        )
    if cann.bisheng is None:
        raise ToolchainError(
            f"bisheng is missing: neither {cann.home} nor the PATH has it. "
            "Install CANN's toolkit package (not the run-time package) and source its set_env.sh."
        )
    if cann.version is not None and cann.version.numbers < OLDEST_CANN:
        raise ToolchainError(
            f"CANN is {cann.version.text} (in {cann.home}), but it must be {_shown(OLDEST_CANN)} or later "
            f"({WHY_OLDEST_CANN}). Install a newer one and source its set_env.sh."
        )
    return cann


def check_versions(home: Path | None = None) -> Versions:
    """Checks and returns what the NPU back end runs on.

    Raises:
        ToolchainError: CANN, the driver or the processor is missing, or its version does not fit.
    """
    cann = check_cann(home)
    if cann.version is None:
        raise ToolchainError(
            f"CANN's version is unknown: no ascend_toolkit_install.info in {cann.home} tells it. "
            "Install CANN's toolkit package anew."
        )
    return Versions(cann, check_driver(cann.version), check_soc())


def check_driver(cann: Version) -> Version:
    """The driver, if it serves this CANN.

    Raises:
        ToolchainError: there is none, or CANN's release notes do not have it.
    """
    if (driver := driver_version()) is None:
        raise ToolchainError(
            f"The NPU's driver is missing: {DRIVER_INFO} does not tell its version. "
            "Install the driver, or mount /usr/local/Ascend/driver into the container."
        )
    oldest = max((o for since, o in OLDEST_DRIVERS.items() if since <= cann.numbers), default=(0, 0))
    if driver.numbers < oldest:
        raise ToolchainError(
            f"The NPU's driver is {driver.text}, but CANN {cann.text} needs {_shown(oldest)} or later. "
            "Install a newer driver (Ascend HDK), or an older CANN."
        )
    return driver


def check_soc() -> Soc:
    """The processor, if it is one that this package knows.

    Raises:
        ToolchainError: it is not, or nothing tells which it is.
    """
    name = soc_name()
    if name is None:
        raise ToolchainError(
            "The SoC is unknown: neither torch_npu nor npu-smi tells it. "
            "Install the driver and torch_npu, and see that `npu-smi info -m` lists the NPU."
        )
    return soc_of(name)


def _soc_of_torch_npu() -> str | None:
    if util.find_spec("torch_npu") is None:
        return None
    try:
        import torch
        import torch_npu  # noqa: F401  # registers torch.npu

        return str(torch.npu.get_device_name())  # type: ignore[attr-defined]
    except Exception:  # without a device, or without CANN's libraries, it fails in many ways
        return None


def _soc_of_npu_smi() -> str | None:
    """From ``npu-smi``, composed as "Common Compilation Options" says under ``--npu-soc``."""
    if shutil.which("npu-smi") is None:
        return None
    first = re.search(r"^\s*(\d+)\s+(\d+)\s+\d+\s", _npu_smi("-m"), re.M)
    if first is None:
        return None
    board = _npu_smi("-t", "board", "-i", first[1], "-c", first[2])
    fields = dict(re.findall(r"^\s*(Chip Type|Chip Name|NPU Name)\s*:\s*(\S+)", board, re.M))
    if "Chip Name" not in fields:
        return None
    chip = "Ascend" + fields["Chip Name"].removeprefix("Ascend")
    return f"{chip}_{fields['NPU Name']}" if "NPU Name" in fields else chip


def _npu_smi(*arguments: str) -> str:
    command = ["npu-smi", "info", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
