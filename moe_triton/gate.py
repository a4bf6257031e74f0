"""The compiler gate: what the NPU's compiler makes of a Triton kernel, on a machine without an NPU.

``bishengir-compile`` runs all of its own passes (HFusion, HIVM, memory planning, synchronisation) and only
then calls ``hivmc``, a program that comes with CANN alone. The module that it leaves just before that
is the criterion: it holds the AI vector core's instruction stream with every UB offset decided.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from moe_triton.backends.cpu.triton.frontend import tensor_ir
from moe_triton.backends.cpu.triton.toolchain import INSTALL, find_program
from moe_triton.errors import ToolchainError
from moe_triton.kernel import TritonKernel

UB_BYTES = 192 * 1024
"""Unified buffer of one AI vector core, A2 and A3."""

SOC_OF_PRODUCT = {"A2": "Ascend910B3", "A3": "Ascend910_9391"}


class Transfer(NamedTuple):
    """One copy between global memory and the unified buffer.

    Attributes:
        tile: type of the tile in the unified buffer, as ``"7168xbf16"``.
        double_buffered: two tiles are used in turn, so that the copy overlaps with the work on the other.
            The compiler drops this without a word when the unified buffer is short.
    """

    kind: Literal["load", "store"]
    tile: str
    double_buffered: bool


@dataclass(frozen=True)
class GateReport:
    """What the NPU compiler planned.

    Attributes:
        kernel: name.
        soc: target.
        ub_bytes: unified buffer in use, by the highest planned byte.
        transfers: copies between global memory and the unified buffer.
        module: the final module (``module.hivm.opt.mlir``).
    """

    kernel: str
    soc: str
    ub_bytes: int
    transfers: tuple[Transfer, ...]
    module: str = field(repr=False)

    def is_double_buffered(self, kind: Literal["load", "store"], tile: str) -> bool:
        """Whether there are copies of this kind and tile type, and all use two tiles in turn."""
        found = [t for t in self.transfers if (t.kind, t.tile) == (kind, tile)]
        return bool(found) and all(t.double_buffered for t in found)

    @property
    def fits(self) -> bool:
        """Whether the plan stays within the unified buffer."""
        return self.ub_bytes <= UB_BYTES


def compile_for_npu(kernel: TritonKernel, soc: str = "Ascend910B3") -> GateReport:
    """Take a kernel through the NPU compiler up to the program that only CANN has.

    Args:
        kernel: built for the NPU (``target="npu"`` where its factory knows targets).
        soc: ``Ascend910B3`` (A2) or ``Ascend910_9391`` (A3).
    """
    compiler = find_program("ascendnpuir", "bin/bishengir-compile")
    if compiler is None:
        raise ToolchainError(f"bishengir-compile is missing: {INSTALL}")
    text = tensor_ir(kernel, named_ops=True).replace(', mix_mode = "aiv"', "")
    with tempfile.TemporaryDirectory(prefix="moe_triton_gate_") as name:
        folder = Path(name)
        source = folder / "kernel.mlir"
        source.write_text(text)
        command = [
            compiler,
            source,
            f"--target={soc}",
            "--enable-auto-multi-buffer=true",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            "--enable-memory-display",
            f"--save-temps={folder}",
            "-o",
            folder / "kernel",
        ]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder)
        module, plan = folder / "module.hivm.opt.mlir", folder / "memory_info_aiv.json"
        if not module.is_file():
            message = done.stderr.strip()[:2000]
            raise ToolchainError(f"the NPU compiler rejects {kernel.name} for {soc}: {message}")
        module_text = module.read_text()
        ub_bytes = planned_ub_bytes(plan.read_text()) if plan.is_file() else 0
    return GateReport(kernel.name, soc, ub_bytes, tile_transfers(module_text), module_text)


def planned_ub_bytes(plan: str) -> int:
    """Highest byte that a memory plan (``memory_info_aiv.json``) uses."""
    highest = 0
    for record in json.loads(plan)["Record"]:
        if record["error_info"]:
            raise ToolchainError(f"the NPU compiler's memory plan failed: {record['error_info']}")
        for buffer in record["memory_info_array"]:
            length = buffer["extent"] // 8  # in bits
            highest = max(highest, *(offset + length for offset in buffer["offset"]))
    return highest


def tile_transfers(module: str) -> tuple[Transfer, ...]:
    """Every copy between global memory and the unified buffer, in program order."""
    transfers = []
    for call in re.finditer(r"call @(load_gm_to_ubuf|store_ubuf_to_gm)\w*\((%\w+), (%\w+)", module):
        is_load = call[1].startswith("load")
        before = module[: call.start()]
        definition = _definition(before, call[3] if is_load else call[2])
        if cast := re.match(r"memref\.cast (%\w+)", definition):
            definition = _definition(before, cast[1])
        tile = re.search(r": (?:.* to )?memref<(\w+), ", definition)
        twice = definition.startswith("arith.select")
        transfers.append(Transfer("load" if is_load else "store", tile[1] if tile else "?", twice))
    return tuple(transfers)


def _definition(before: str, value: str) -> str:
    """What last defined an SSA value; names are reused from scope to scope."""
    lines = re.findall(rf"^ *{re.escape(value)} = (.*)$", before, flags=re.M)
    return lines[-1] if lines else ""
