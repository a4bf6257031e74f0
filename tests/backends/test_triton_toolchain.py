from __future__ import annotations

import platform

import pytest

from moe_triton.backends.cpu.triton import probe, toolchain
from moe_triton.core.errors import ToolchainError

V3 = toolchain._LEVEL_FLAGS["x86-64-v3"]
V4 = V3 | toolchain._LEVEL_FLAGS["x86-64-v4"]


def test_probe_names_every_component() -> None:
    components = {p.component: p for p in probe()}
    assert set(components) == {"triton-ascend", "pybind11", "ascendnpu-ir", "linker", "CPU level"}
    assert all(p.ok and p.version and p.how_to_get for p in components.values())


def test_cpu_level_follows_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, level in ((V3, "x86-64-v3"), (V4, "x86-64-v4"), (V4 - {"avx512vl"}, "x86-64-v3")):
        monkeypatch.setattr(toolchain, "_cpu_flags", lambda flags=flags: frozenset(flags))
        assert toolchain.cpu_level() == level


def test_an_old_cpu_and_another_architecture_are_told_of_the_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "_cpu_flags", lambda: frozenset(V3 - {"avx2"}))
    with pytest.raises(ToolchainError, match=r'lacks avx2.*kernels="torch"'):
        toolchain.cpu_level()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ToolchainError, match=r'aarch64.*kernels="torch"'):
        toolchain.cpu_level()
    assert not {p.component: p for p in probe()}["CPU level"].ok


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
