"""Triton kernels as native code on a CPU: front end, lowering, code, disk cache, launch."""

from moe_triton.backends.cpu.triton.launch import launch, launch_fallback, overlaps, prepare
from moe_triton.backends.cpu.triton.loader import CompiledKernel, load
from moe_triton.backends.cpu.triton.toolchain import Probe, probe

__all__ = ["CompiledKernel", "Probe", "launch", "launch_fallback", "load", "overlaps", "prepare", "probe"]
