"""What a modelled price depends on, as digests: of the model, and of each kernel's own code.

A table names both, so that a row is known to be of this source or not, one kernel apart from another, and a
change of anything else leaves tables valid.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import moe_triton
from autotune.model.constants import Machine
from autotune.npu_compiler.compile import compiler_version
from moe_triton.core import native_files
from moe_triton.core.kernel import TritonKernel

ROOT = Path(moe_triton.__file__).parent.parent
DIGITS = 12

PRICED_BY = (
    "autotune/model/kernel_costs/clock.py",
    "autotune/model/kernel_costs/replay/*.py",
    "autotune/model/traffic.py",
    "autotune/model/clusters/routing.py",
    "autotune/npu_compiler/compile.py",
    "autotune/npu_compiler/socs.py",
    "moe_triton/backends/cpu/triton/frontend.py",
    "moe_triton/backends/cpu/triton/ir.py",
    "autotune/kernels/feasible.py",
    "autotune/kernels/modelled.py",
    "autotune/kernels/occasions.py",
    "autotune/kernels/tunables.py",
)
"""Files that price a launch: what it has to do, what the compiler makes of it, and how long that takes."""

PRICED_WITH = "autotune/model/cost.py", ("Table", "Work", "work_of", "_from")
"""A file of which only these definitions count: the rest is of other launches' costs."""

CLOCK = "emulation/core_clock.h"
"""The same of the Ascend C sources, wherever they lie."""

_KERNELS = "moe_triton.kernels"
# What kernels are tested with, and how they are run in torch: no price depends on it.
_NOT_PRICED = "cases", "fallbacks"


def version_of(machine: Machine) -> str:
    """The model and its version: digests of its constants and of its code, and the compiler's version."""
    constants = digest_of_values(constants_read(machine))
    return f"autotune.model, constants {constants}, code {pricing_code()}, compiler {compiler_version()}"


def pricing_files(root: Path = ROOT) -> list[Path]:
    """Files of `PRICED_BY`."""
    return sorted(path for pattern in PRICED_BY for path in root.glob(pattern))


@functools.cache
def pricing_code(root: Path = ROOT) -> str:
    """A digest of what prices a launch.

    Args:
        root: folder of the packages.
    """
    path, names = PRICED_WITH
    text = (root / path).read_text(encoding="utf-8")
    defined = {str(getattr(node, "name", "")): node for node in ast.parse(text).body}
    parts = [ast.get_source_segment(text, defined[name]) or "" for name in names]
    sources = native_files.sources()
    clock = [] if sources is None else [sources / CLOCK]
    return digest_of_values([digest_of([*pricing_files(root), *clock]), *parts])


def constants_read(machine: Machine, root: Path = ROOT) -> dict[str, float]:
    """The values of the constants that are named where launches are priced; others have no part in it.

    Args:
        machine: whose.
        root: folder of the packages.
    """
    named = _names_in(tuple(pricing_files(root)))
    return {name: entry.value for name, entry in sorted(machine.constants.items()) if name in named}


@functools.cache
def _names_in(files: tuple[Path, ...]) -> frozenset[str]:
    """Attributes, and texts: an instruction names the constant that it is slower by."""
    nodes = [n for path in files for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(
        attributes | {n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is str}
    )


def code_of(kernel: TritonKernel) -> str:
    """A digest of the files that a kernel's code is in."""
    return _code_of(kernel.fn.__module__)


@functools.cache
def _code_of(module: str) -> str:
    return digest_of(kernel_files(module))


def kernel_files(module: str, root: Path = ROOT) -> list[Path]:
    """A kernel's module and all that it imports of `moe_triton.kernels`, directly or not.

    Args:
        module: its name.
        root: folder of the packages.
    """
    files: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        path = root / f"{name.replace('.', '/')}.py"
        if name not in files and path.is_file() and not name.rpartition(".")[2].endswith(_NOT_PRICED):
            files[name] = path
            left += _imports(path)
    return sorted(files.values())


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_KERNELS}."):
            yield str(node.module)


def digest_of(files: list[Path]) -> str:
    """A digest of the names and contents of files."""
    digest = sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:DIGITS]


def digest_of_values(values: object) -> str:
    """A digest of the text that `repr` makes of values."""
    return sha256(repr(values).encode()).hexdigest()[:DIGITS]
