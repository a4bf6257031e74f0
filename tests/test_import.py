"""Every module imports where nothing optional is installed: the first test of a new Python."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import seconds

OPTIONAL = (
    *("triton", "pybind11", "ascendnpuir", "torch_npu", "memfabric_hybrid", "shmem"),
    *("optuna", "matplotlib"),
)
LABORATORY = ("moe_triton.tools", "autotune")
ABOVE = ("moe_triton.balance",)
IMPORT_ALL = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({OPTIONAL!r} + ("autotune",)))
import moe_triton
loaded = sorted(n for n, m in sys.modules.items() if m and n.startswith({LABORATORY + ABOVE!r}))
print("beside moe_triton:", *loaded)
for package in ("moe_triton", "autotune"):
    if package == "autotune":
        del sys.modules[package]
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("modules:", sum(name.startswith(("moe_triton", "autotune")) for name in sys.modules))
"""


def test_all_modules_import_without_what_is_optional() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=seconds(120)
    )
    assert done.returncode == 0, done.stderr
    beside, modules = done.stdout.splitlines()
    assert beside == "beside moe_triton:", "what runs imports what measures or stands above it"
    assert int(modules.split()[1]) > 300


WITHOUT_TORCH = """
import sys
import moe_triton
from moe_triton import ArgumentError, MoeTritonError
import moe_triton.tools.cli.app
print(*sorted({"torch", "numpy", "triton"} & sys.modules.keys()))
assert set(moe_triton.__all__) <= set(dir(moe_triton))
assert moe_triton.EPBuffer is moe_triton.EPBuffer and "torch" in sys.modules
from moe_triton import *
assert EPBuffer.__module__ == "moe_triton.buffer"
"""


def test_nothing_waits_for_torch_that_does_not_need_it() -> None:
    """Neither ``import moe_triton`` nor the command line, which is often asked how it is used."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=seconds(120)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
