"""What was compiled once is not compiled again, unless something that decides it changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.gate import SOCS, compile_for_npu
from autotune.npu_compiler import cache
from autotune.npu_compiler import compile as npu_compile
from autotune.npu_compiler.compile import Compiled, compile_ir, notes_of, npu_ir, reason_of
from autotune.npu_compiler.socs import Soc
from moe_triton.core.errors import ToolchainError
from moe_triton.kernels.add_rows import add_rows_kernel
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.layout import SlotLayout

A2, A3, OUTLOOK = SOCS.values()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Runs of the compiler by chip and extra options; the compiler leaves its input as its module."""
    found: list[tuple[str, tuple[str, ...]]] = []

    def run(text: str, soc: Soc, folder: Path, options: tuple[str, ...]) -> Compiled:
        found.append((soc.name, options))
        return Compiled("" if options and "reject" in text else text, "", "log")

    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(npu_compile, "run_compiler", run)
    return found


def test_the_second_time_is_from_the_disk(runs: list[Any]) -> None:
    assert compile_ir("text", A3) == compile_ir("text", A3) == Compiled("text", "", "log")
    assert runs == [(A3.name, ())]


def test_other_text_another_chip_and_other_options_are_compiled(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, soc in (("text", A3), ("other", A3), ("text", A2), ("text", OUTLOOK)):
        compile_ir(text, soc)
    assert [soc for soc, _ in runs] == [A3.name, A3.name, A2.name, OUTLOOK.name]
    monkeypatch.setattr(npu_compile, "OPTIONS", ("--other",))
    compile_ir("text", A3)
    monkeypatch.setattr(npu_compile, "compiler_version", lambda: "another")
    compile_ir("text", A3)
    compile_ir("text", dataclasses.replace(A3, options=("--more",)))
    assert len(runs) == 7


def test_a_damaged_entry_is_compiled_again(runs: list[Any]) -> None:
    compile_ir("text", A3)
    (entry,) = cache.folder().glob(f"*{cache.SUFFIX}")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert compile_ir("text", A3).module == "text"
    assert len(runs) == 2


def test_a_single_attempt_that_fails_is_followed_by_all_attempts(runs: list[Any]) -> None:
    assert compile_ir("reject", OUTLOOK).module == "reject"
    assert runs == [(OUTLOOK.name, OUTLOOK.options), (OUTLOOK.name, ())]


def test_the_front_end_is_asked_once_for_all_chips(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def front_end(kernel: object, *, named_ops: bool) -> str:
        asked.append(named_ops)
        return 'mix_mode = "none", mix_mode = "aiv"'

    monkeypatch.setattr(npu_compile, "tensor_ir", front_end)
    kernel = add_rows_kernel(torch.bfloat16, 64, "npu")
    for soc in SOCS:
        compile_for_npu(kernel, soc)
    assert asked == [True]
    assert npu_ir(kernel) == 'mix_mode = "none"'
    npu_ir(add_rows_kernel(torch.bfloat16, 96, "npu"))
    npu_ir(add_rows_kernel(torch.float16, 96, "npu"))
    npu_ir(arrange_kernel(SlotLayout(128, 1, 1), False))
    assert len(asked) == 4


def test_a_rejected_kernel_is_an_error_with_the_compilers_reason(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = (
        'loc("k.mlir":2:3): error: ub overflow, requires 2 bits while 1 bits available! (possible reason: x)'
    )
    monkeypatch.setattr(npu_compile, "run_compiler", lambda *_: Compiled("", "", log))
    monkeypatch.setattr(npu_compile, "tensor_ir", lambda kernel, *, named_ops: "text")
    with pytest.raises(ToolchainError, match=r"rejects add_rows for Ascend910B3: ub overflow.*available!$"):
        compile_for_npu(add_rows_kernel(torch.bfloat16, 64, "npu"))


def test_reasons_and_notes_are_read_off_the_log() -> None:
    log = (
        "[ERROR] Cannot find hivmc under $PATH\n"
        "[NOTE] Ub overflow detected; automatically set enable-code-motion to false and retrying.\n"
        "[NOTE] Ub overflow detected; automatically set enable-auto-multi-buffer to false and retrying.\n"
        'loc("k.mlir":2:3): error: ub overflow, requires 9 bits\n'
        'loc("k.mlir":1:1): error: Failed to run BiShengHIR pipeline\n'
    )
    assert reason_of(log) == "ub overflow, requires 9 bits"
    assert notes_of(log) == ("enable-code-motion", "enable-auto-multi-buffer")
    assert reason_of("error: Failed to run it") == "Failed to run it"
    assert reason_of("dies\nof something") == "of something"
    assert reason_of("") == "no message"
    assert notes_of("") == ()
