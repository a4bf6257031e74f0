"""``moe-triton doctor``: which components of the toolchain are present, and what pip has mixed up."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import util
from pathlib import Path

from rich.console import Console
from rich.text import Text

import moe_triton
from moe_triton.backends.cpu import extension, native, row_copies
from moe_triton.backends.cpu.triton import probe
from moe_triton.backends.cpu.triton.toolchain import distribution_version, how_to_get_triton
from moe_triton.backends.npu import library, toolchain
from moe_triton.core import shared_memory, triton_package
from moe_triton.core.errors import ToolchainError, WindowError
from moe_triton.core.installing import install, reinstall
from moe_triton.schemes.ascendc import LAUNCHED
from moe_triton.tools.text_table import TextTable, names, texts

Row = tuple[str, bool, str, str]

OK, MISSING = Text("ok", style="green"), Text("missing", style="red")

NPU = "npu: "
CALLS, COPIES = "faster calls: ", "faster copies: "
FASTER = (CALLS, COPIES)  # not needed
INSTALL = install("npu")


def components() -> list[Row]:
    """(component, present, what was found, how to get it), the CPU back end's first."""
    return [_native(), *probe(), *_shared_memory(), *_row_copies(), _extension(), *_npu()]


def run_doctor(console: Console) -> int:
    """Prints the table.

    Returns:
        0 if the CPU back end can run with Triton kernels, else 1.
    """
    rows = components()
    console.print(f"moe_triton {moe_triton.__version__}, Python {platform.python_version()}", highlight=False)
    TextTable(
        (texts("component"), names("state"), texts("found"), texts("how to get it")),
        [
            (component, OK if present else MISSING, detail, "" if present else remedy)
            for component, present, detail, remedy in rows
        ],
    ).print(console)
    if triton_package.ownership().version and triton_package.would_hold():
        console.print(
            "A package asks for a triton that is not there, and pip's next command would bring upstream's. "
            f"Run: {triton_package.FIX}",
            style="yellow",
        )
    triton_parts = {each.component for each in probe()}
    needed = [row for row in rows if not row[0].startswith((NPU, *FASTER))]
    ready = all(present for _, present, _, _ in needed)
    if ready:
        console.print("The CPU back end is ready.")
    elif all(present for component, present, _, _ in needed if component not in triton_parts):
        console.print('The CPU back end runs without Triton kernels only: kernels="torch", which is slow.')
    else:
        console.print("The CPU back end cannot run as it is.", style="red")
    missing = [each.removeprefix(NPU) for each, present, _, _ in rows if each.startswith(NPU) and not present]
    console.print(
        f"An NPU needs in addition: {', '.join(missing)}." if missing else "All that an NPU needs is there."
    )
    return 0 if ready else 1


def run_fix(console: Console) -> None:
    """Makes the package ``triton`` triton-ascend's, and says what was done.

    Raises:
        ToolchainError: it cannot be done; it says what is in the way, and what was changed.
    """
    try:
        done = triton_package.mend()
    except triton_package.MendError as error:
        raise ToolchainError(str(error)) from None
    is_there = bool(triton_package.ownership().version)
    nothing = "There is nothing to fix." if is_there else f"triton-ascend is not there: {how_to_get_triton()}"
    console.print(done or nothing, markup=False, highlight=False, soft_wrap=True)


def _native() -> Row:
    remedy = f"apt-get install g++, then {reinstall()}"
    return _library("Ascend C kernels, built for the CPU", native.find(), _load_native, remedy)


def _extension() -> Row:
    missing = extension.why_not()
    return (f"{CALLS}extension module", not missing, "" if missing else extension.FILE, missing)


def _library(component: str, path: Path | None, load: Callable[[Path], str], remedy: str) -> Row:
    """Whether a library exists, can be loaded and has this package's argument tables; what loading says."""
    if path is None:
        return (component, False, "", remedy)
    try:
        return (component, True, path.name + load(path), "")
    except ToolchainError as error:
        return (component, False, path.name, str(error))


def _load_native(path: Path) -> str:
    native.check(*LAUNCHED)
    return ""


def _load_npu(path: Path) -> str:
    kernels, said = library.load(path)
    said.check(*LAUNCHED)
    return f", {'with' if kernels.moe_posts() else 'without'} posts to other servers"


def _shared_memory() -> list[Row]:
    try:
        folder = shared_memory.folder()
    except WindowError as error:
        return [("shared memory", False, "", str(error))]
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return [("shared memory", False, "", f"mount a tmpfs on {folder}")]
    usage = os.statvfs(folder)
    free = f"{folder}, {usage.f_bavail * usage.f_frsize / 2**20:.0f} MB free"
    has_huge_pages = shared_memory.huge_pages(folder)
    remedy = (
        "unknown: this kernel does not say"
        if has_huge_pages is None
        else f"mount -o remount,huge=always {folder}, or a tmpfs that {shared_memory.VARIABLE} names"
    )
    return [("shared memory", True, free, ""), (f"{COPIES}huge pages", bool(has_huge_pages), "", remedy)]


def _row_copies() -> list[Row]:
    """How rows are copied, where there is a library that copies any."""
    try:
        copies = row_copies.chosen()
    except ToolchainError:
        return []
    second = copies.caches.second
    streams = f", streamed past {second / 2**20:g} MB" if copies.streams and second else ""
    why = "as timed here" if copies.is_timed else "as measured on this family"
    return [(f"{COPIES}rows", True, f"{copies.name}{streams}, {why}", "")]


def _npu() -> list[Row]:
    kernels = f"{NPU}Ascend C kernels", library.find(), _load_npu, "moe-triton build --backend npu"
    rows = [*_cann(), _driver(), _soc(), _library(*kernels)]
    for module, package in (("torch_npu", "torch_npu"), ("memfabric_hybrid", "memfabric-hybrid")):
        is_present = util.find_spec(module) is not None
        version = distribution_version(package) or "version unknown"
        rows.append((f"{NPU}{package}", is_present, version if is_present else "", INSTALL))
    return rows


def _cann() -> list[Row]:
    cann = toolchain.find_cann()
    install = "install CANN's toolkit package and source its set_env.sh"
    if cann is None:
        return [(f"{NPU}CANN", False, "", install), (f"{NPU}bisheng", False, "", "comes with CANN")]
    version = cann.version.text if cann.version else "version unknown"
    is_old = cann.version is not None and cann.version.numbers < toolchain.OLDEST_CANN
    why_not = cann.why_not_here()
    fits = cann.version is not None and not is_old and not why_not
    bisheng = str(cann.bisheng or "")
    oldest = ".".join(map(str, toolchain.OLDEST_CANN))
    remedy = f"it must be {oldest} or later ({toolchain.WHY_OLDEST_CANN}): {install}" if is_old else install
    return [
        (f"{NPU}CANN", fits, f"{version} in {cann.home}", f"{why_not}: {install}" if why_not else remedy),
        (f"{NPU}bisheng", bool(bisheng) and not why_not, bisheng, "comes with CANN's toolkit package"),
    ]


def _driver() -> Row:
    driver, cann = toolchain.driver_version(), toolchain.find_cann()
    if driver is None:
        return (f"{NPU}driver", False, "", "install the driver, or mount it into the container")
    try:
        if cann is not None and cann.version is not None:
            toolchain.check_driver(cann.version)
    except ToolchainError as error:
        return (f"{NPU}driver", False, driver.text, str(error))
    return (f"{NPU}driver", True, driver.text, "")


def _soc() -> Row:
    name = toolchain.soc_name()
    try:
        soc = toolchain.check_soc()
    except ToolchainError as error:
        return (f"{NPU}SoC", False, name or "", str(error) if name else "an A2 or A3 with its driver")
    return (f"{NPU}SoC", True, f"{soc.name}, {soc.product}, {soc.vector_cores} vector cores", "")
