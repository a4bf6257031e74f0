"""``moe-triton doctor``: what of the toolchain is present."""

from __future__ import annotations

import os
import shutil
from importlib import metadata, util
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moe_triton.backends.cpu import native

Row = tuple[str, bool, str, str]


def components() -> list[Row]:
    """(component, present, what was found, how to get it), the CPU back end's first."""
    from moe_triton.backends.cpu.triton import probe

    return [_native(), *probe(), _shared_memory(), *_npu()]


def run_doctor(console: Console) -> int:
    """Prints the table.

    Returns:
        0 if the CPU back end can run, else 1.
    """
    rows = components()
    table = Table(title="moe_triton doctor")
    for column in ("component", "", "found", "how to get it"):
        table.add_column(column)
    for name, present, found, remedy in rows:
        mark = "[green]ok[/green]" if present else "[red]missing[/red]"
        table.add_row(name, mark, found, "" if present else remedy)
    console.print(table)
    needed = [present for name, present, _, _ in rows if not name.startswith("npu:")]
    ready = all(needed)
    console.print(
        "The CPU back end is ready." if ready else "[red]The CPU back end cannot run as it is.[/red]"
    )
    console.print(
        "The NPU back end does not exist yet; its kernels go through the compiler as far as that runs."
    )
    return 0 if ready else 1


def _native() -> Row:
    path = native.find()
    remedy = "apt-get install g++, then pip install --no-build-isolation -e '.[cpu]'"
    return ("Ascend C kernels, built for the CPU", path is not None, path.name if path else "", remedy)


def _shared_memory() -> Row:
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        return ("shared memory", False, "", "mount a tmpfs on /dev/shm")
    usage = os.statvfs(shm)
    return ("shared memory", True, f"{usage.f_bavail * usage.f_frsize / 2**20:.0f} MB free", "")


def _npu() -> list[Row]:
    home = os.environ.get("ASCEND_HOME_PATH", "")
    bisheng = shutil.which("bisheng")
    rows = [
        ("npu: CANN", bool(home), home, "install CANN and source its set_env.sh"),
        ("npu: bisheng", bisheng is not None, bisheng or "", "comes with CANN"),
    ]
    for module, package in (("torch_npu", "torch_npu"), ("memfabric_hybrid", "memfabric-hybrid")):
        found = util.find_spec(module) is not None
        version = metadata.version(package) if found else ""
        rows.append((f"npu: {package}", found, version, "pip install moe_triton[npu]"))
    return rows
