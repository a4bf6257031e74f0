"""What the Triton CPU runtime is made of, where it is, and what to install when it is not there."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moe_triton.backends.cpu.triton.cache import sources_digest
from moe_triton.backends.cpu.triton.targets import this_target
from moe_triton.core import triton_package
from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import check_triton, install

INSTALL = install("cpu")
_REMEDY = f'Install the toolchain with {INSTALL}, or choose the torch fallback by name: kernels="torch".'

_LEAST = ("an x86-64 CPU with AVX2 and F16C", "an Armv8.2 one with fp16 and dot product")
LAST_PYTHON = (3, 11)
"""For which the public index has wheels of triton-ascend."""


class Probe(NamedTuple):
    """One component of the toolchain, for ``moe-triton doctor``."""

    component: str
    ok: bool
    version: str
    how_to_get: str


class Toolchain(NamedTuple):
    """Programs of the compile chain, but for the adapter."""

    bishengir_opt: Path
    linker: tuple[str, ...]


def run_tool(command: Sequence[str | Path], text: str | None = None) -> str:
    """Run a compiler program on text; its messages become a ToolchainError."""
    try:
        done = subprocess.run([str(part) for part in command], input=text, capture_output=True, text=True)
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be run: {error.strerror}. {_REMEDY}") from error
    if done.returncode:
        message = done.stderr.strip()[:2000]
        raise ToolchainError(f"{Path(command[0]).name} failed with status {done.returncode}: {message}")
    return done.stdout


def package_folder(package: str) -> Path | None:
    """Where a Python package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def distribution_version(name: str) -> str:
    """Installed version, or an empty string."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_program(package: str, relative: str) -> Path | None:
    """A program inside an installed package."""
    folder = package_folder(package)
    return folder / relative if folder is not None and (folder / relative).is_file() else None


def _find_linker() -> tuple[str, ...]:
    for name in ("ld", "ld.lld", "cc", "gcc", "clang"):
        if path := shutil.which(name):
            return (path,) if name.startswith("ld") else (path, "-nostdlib")
    return ()


def has_wheels() -> bool:
    """Whether the public index has triton-ascend for this Python."""
    return sys.version_info[:2] <= LAST_PYTHON


def how_to_get_triton() -> str:
    """What installs triton-ascend."""
    if has_wheels():
        return INSTALL
    here, last = (".".join(map(str, version)) for version in (sys.version_info[:2], LAST_PYTHON))
    return f"no index has it for Python {here} but Ascend's own; the public one has it up to {last}"


def probe() -> list[Probe]:
    """Every component with its state; never raises."""
    adapter = find_program("triton", "backends/ascend/triton-adapter-opt")
    bishengir = find_program("ascendnpuir", "bin/bishengir-opt")
    linker = _find_linker()
    try:
        level, level_ok = this_target().name, True
    except ToolchainError:
        level, level_ok = platform.machine(), False
    problem = triton_package.ownership().problem
    return [
        Probe(
            "triton-ascend",
            adapter is not None and not problem,
            distribution_version("triton-ascend"),
            f"{problem}. Run: {triton_package.FIX}" if problem else how_to_get_triton(),
        ),
        Probe("pybind11", package_folder("pybind11") is not None, distribution_version("pybind11"), INSTALL),
        Probe("ascendnpu-ir", bishengir is not None, distribution_version("ascendnpu-ir"), INSTALL),
        Probe("linker", bool(linker), linker[0] if linker else "", "install binutils (ld) or a C compiler"),
        Probe("CPU level", level_ok, level, " or ".join(_LEAST)),
    ]


@functools.cache
def find_toolchain() -> Toolchain:
    """The compile chain's programs, or an error that says what is missing and how to get it."""
    this_target()
    check_triton()
    if missing := [p for p in probe() if not p.ok]:
        wanted = "; ".join(
            p.component if p.how_to_get.startswith(INSTALL) else f"{p.component} ({p.how_to_get})"
            for p in missing
        )
        raise ToolchainError(f"the Triton CPU runtime lacks {wanted}. {_REMEDY}")
    bishengir = find_program("ascendnpuir", "bin/bishengir-opt")
    assert bishengir is not None
    return Toolchain(bishengir, _find_linker())


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Everything but the kernel that decides what code comes out."""
    return (
        ("triton-ascend", distribution_version("triton-ascend")),
        ("ascendnpu-ir", distribution_version("ascendnpu-ir")),
        ("pipeline", sources_digest(Path(__file__).parent)),
    )
