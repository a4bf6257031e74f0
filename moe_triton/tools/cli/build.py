"""``moe-triton build``: the native library of a back end, from the sources that came with the package."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Literal

from rich.console import Console

from moe_triton.backends.cpu import extension, native
from moe_triton.backends.npu import library, toolchain
from moe_triton.backends.npu.window import MEMFABRIC
from moe_triton.core import native_files
from moe_triton.core.errors import ArgumentError, ToolchainError
from moe_triton.core.installing import reinstall
from moe_triton.core.soc import ARCHS

INSTALLED = Path("installed")
SCHEME_FILES = "ascendc.py", "launchers.asc"


@dataclass(frozen=True)
class BuildSettings:
    """What to build, and where.

    Attributes:
        backend: "npu" or "cpu".
        arch: architecture for bisheng.
        cann: CANN's folder; None for ``ASCEND_HOME_PATH``, or else the default places.
        cann_version: CANN's version where its files do not tell it.
        jobs: processes of the build.
        output: folder for the library; None for the one that the package loads from.
        memfabric: memfabric-hybrid's package, by whose RoCE write kernels post: its folder, or `INSTALLED`;
            None for kernels that do not post.
        schemes: folders of further schemes, with ``ascendc.py`` and ``launchers.asc`` (docs/schemes.md).
    """

    backend: Literal["npu", "cpu"] = "npu"
    arch: str = "dav-2201"
    cann: Path | None = None
    cann_version: str = ""
    jobs: int = 1
    output: Path | None = None
    memfabric: Path | None = None
    schemes: tuple[Path, ...] = ()


def build(settings: BuildSettings, console: Console) -> None:
    """Configures, builds and installs the library, atomically, and says where it is.

    Raises:
        ArgumentError: an architecture that the kernels are not for, no jobs, or a folder that is no scheme's.
        ToolchainError: CMake, CANN or the sources are missing, or the build failed.
    """
    _check(settings)
    if (sources := native_files.sources()) is None:
        raise ToolchainError(
            "The Ascend C sources are missing: this installation has no kernels_ascendc folder. "
            f"Install moe_triton again: {reinstall()}"
        )
    cmake = find_program("cmake")
    options = [f"-DBACKEND={settings.backend}", f"-DPython_EXECUTABLE={sys.executable}"]
    if settings.schemes:
        options.append(f"-DOTHER_SCHEMES={';'.join(str(folder.absolute()) for folder in settings.schemes)}")
    if settings.backend == "npu":
        cann = toolchain.check_cann(settings.cann)
        options += [
            f"-DCANN_HOME={cann.home}",
            f"-DCANN_MACHINE={platform.machine()}",
            f"-DBISHENG={cann.bisheng}",
            f"-DCANN_VERSION={settings.cann_version}",
            f"-DNPU_ARCH={settings.arch}",
            f"-DMOE_MEMFABRIC={_memfabric(settings.memfabric)}",
        ]
    name = library.LIBRARY if settings.backend == "npu" else native.LIBRARY
    folder = settings.output or native_files.build_folder()
    with tempfile.TemporaryDirectory(prefix="moe_triton_build_") as scratch:
        tree, stage = Path(scratch) / "build", Path(scratch) / "stage"
        _run([cmake, "-S", sources, "-B", tree, *options], console)
        _run([cmake, "--build", tree, "--parallel", str(settings.jobs)], console)
        _run([cmake, "--install", tree, "--component", "library", "--prefix", stage], console)
        built = stage / "moe_triton" / "_native"
        if settings.backend == "cpu":
            _place(built / native_files.COUNTING_LIBRARY, folder)
            if (built / extension.FILE).is_file():
                _place(built / extension.FILE, folder)
        path = _place(built / name, folder)
    console.print(f"built {path}", markup=False, highlight=False, soft_wrap=True)


def _check(settings: BuildSettings) -> None:
    if settings.backend not in ("npu", "cpu"):
        raise ArgumentError("backend", settings.backend, "it must be npu or cpu", "Pass --backend npu.")
    if settings.arch not in ARCHS:
        rule = f"the kernels are for {', '.join(ARCHS)}, the architecture of A2 and A3"
        raise ArgumentError("arch", settings.arch, rule, f"Pass --arch {ARCHS[0]}.")
    if settings.memfabric and settings.backend != "npu":
        rule = "an emulated rank posts to its own thread"
        raise ArgumentError("memfabric", settings.memfabric, rule, "Leave it out, or pass --backend npu.")
    for folder in settings.schemes:
        if missing := [name for name in SCHEME_FILES if not (folder / name).is_file()]:
            rule = f"a scheme's folder has {' and '.join(SCHEME_FILES)}, and this one lacks {missing[0]}"
            raise ArgumentError("scheme", folder, rule, "See docs/schemes.md.")
    if settings.jobs < 1:
        raise ArgumentError("jobs", settings.jobs, "it must be 1 or more", "Pass --jobs 1.")


def _memfabric(given: Path | None) -> Path | str:
    """The folder of memfabric-hybrid's package; empty for none."""
    if given is None:
        return ""
    if given != INSTALLED:
        return given.absolute()  # CMake runs elsewhere
    spec = util.find_spec(MEMFABRIC)
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError(
            f"{MEMFABRIC} is not installed, by which kernels are to post. "
            "Run: pip install memfabric-hybrid==1.3.0; or pass its folder, or no --memfabric."
        )
    return Path(spec.submodule_search_locations[0])


def find_program(name: str) -> str:
    """A program beside this Python, where pip puts a cmake that is new enough, or on the PATH."""
    if (program := shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)) is None:
        raise ToolchainError(f"{name} is missing, which the build needs. Run: pip install {name}")
    return program


def _run(command: list[str | Path], console: Console) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    console.print(done.stdout, markup=False, highlight=False, soft_wrap=True, end="")
    if done.returncode:
        raise ToolchainError(
            f"`{' '.join(words[:2])} ...` failed with status {done.returncode}. What it said stands above; "
            "`moe-triton doctor` says what of the toolchain is missing."
        )


def _place(built: Path, folder: Path) -> Path:
    """Installs the library atomically: processes that have loaded the old one keep it."""
    if not built.is_file():
        raise ToolchainError(f"The build left no {built.name}. What it said stands above.")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / built.name
    beside = folder / f".{built.name}.new"
    shutil.copy2(built, beside)
    beside.replace(target)
    return target
