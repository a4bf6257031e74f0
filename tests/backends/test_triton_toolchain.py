from __future__ import annotations

import platform

import pytest

from moe_triton.backends.cpu.triton import probe, targets, toolchain
from moe_triton.backends.cpu.triton.loader import load
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.places import move_rows_kernel

V4, V3, ARM = targets.TARGETS
A_KERNEL: TritonKernel = move_rows_kernel(8, False)


def test_probe_names_every_component() -> None:
    components = {p.component: p for p in probe()}
    assert set(components) == {"triton-ascend", "pybind11", "ascendnpu-ir", "linker", "CPU level"}
    assert all(p.ok and p.version and p.how_to_get for p in components.values())


@pytest.mark.parametrize(
    ("machine", "flags", "level"),
    [
        ("x86_64", V3.needs, V3),
        ("AMD64", V4.needs | {"avx512_bf16"}, V4),
        ("x86_64", V4.needs - {"avx512vl"}, V3),
        ("aarch64", ARM.needs | {"sve"}, ARM),
        ("arm64", ARM.needs, ARM),
    ],
)
def test_the_level_follows_the_features(machine: str, flags: frozenset[str], level: targets.Target) -> None:
    assert targets.choose_target(machine, flags) is level


@pytest.mark.parametrize(
    ("machine", "flags", "said"),
    [
        ("x86_64", V3.needs - {"avx2"}, r"needs x86-64-v3 on x86_64; this CPU lacks avx2\."),
        ("aarch64", ARM.needs - {"asimddp", "fphp"}, r"lacks asimddp, fphp\."),
        ("riscv64", ARM.needs, r"code for x86_64 and aarch64 and this CPU is riscv64\."),
    ],
)
def test_another_cpu_is_told_of_the_fallback(machine: str, flags: frozenset[str], said: str) -> None:
    with pytest.raises(ToolchainError, match=said + r'.*kernels="torch"'):
        targets.choose_target(machine, flags)


def test_another_machines_level_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LLVM without the target would end the process."""
    (own, other) = (ARM, V3) if platform.machine() in ARM.machines else (V3, ARM)
    said = f"of {other.architecture} and this CPU is {own.architecture}: .*own machine only"
    with pytest.raises(ToolchainError, match=said):
        load(A_KERNEL, cpu=other.name)
    with pytest.raises(ToolchainError, match="no level 'x86-64-v9'; there are x86-64-v4, x86-64-v3, armv8"):
        load(A_KERNEL, cpu="x86-64-v9")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not {p.component: p for p in probe()}["CPU level"].ok


def test_this_machine_has_a_level() -> None:
    assert targets.this_target().needs <= targets.cpu_flags()


def test_missing_parts_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "package_folder", lambda package: None)
    monkeypatch.setattr(toolchain, "_find_linker", lambda: ())
    toolchain.find_toolchain.cache_clear()
    with pytest.raises(ToolchainError, match=r"triton-ascend.*ascendnpu-ir.*binutils") as raised:
        toolchain.find_toolchain()
    assert str(raised.value).count(toolchain.INSTALL) == 1
    monkeypatch.undo()
    toolchain.find_toolchain.cache_clear()


def test_a_failing_program_becomes_an_error_with_its_message() -> None:
    with pytest.raises(ToolchainError, match=r"bishengir-opt failed with status 1: .*unknown"):
        toolchain.run_tool([toolchain.find_toolchain().bishengir_opt, "-"], "not mlir")
