"""``moe-triton compile`` and ``moe-triton gate``, as a user meets them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.gate import SOCS, golden, page
from moe_triton.tools.cli.app import app


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of golden files, and a page, that tests may change."""
    folder, text = tmp_path / "golden", tmp_path / "page.md"
    text.write_text(f"{page.BEGIN}\nold\n{page.END}\n")
    monkeypatch.setattr(golden, "FOLDER", folder)
    monkeypatch.setattr(page, "PAGE", text)
    return folder


def test_compile_prints_the_report_of_a_kernel() -> None:
    output = run("compile", "--kernel", "pack", "--hidden", "1024", "--dtype", "fp16", "--soc", "A2")
    assert "pack/fp16-h1024 for Ascend910B3 (in the table)" in output
    assert "1024xf16, double-buffered" in output
    assert "MTE2 1" in output
    assert "of 196608 bytes" in output
    assert "every constant of it assumed" in output


def test_compile_takes_a_case_and_what_differs_from_it() -> None:
    name = "weighted_sum/bf16-h1024-k2-s0-weights"
    output = run("compile", "--kernel", name, "--topk", "3", "--feature", "masked", "--soc", "950")
    assert "weighted_sum/bf16-h1024-k3-s0-weights-masked for Ascend950PR_9589 (not in the table)" in output
    assert "nothing is estimated" in output


def test_compile_saves_every_stage(tmp_path: Path) -> None:
    output = run("compile", "--kernel", "gather_counts", "--save", str(tmp_path / "ir"))
    saved = {path.name: path for path in (tmp_path / "ir").iterdir()}
    assert "tt.func" in saved["kernel.ttir.mlir"].read_text()
    assert "linalg." in saved["kernel.mlir"].read_text()
    assert "PIPE_MTE2" in saved["module.hivm.opt.mlir"].read_text()
    assert "memory_info_array" in saved["memory_info_aiv.json"].read_text()
    assert "hivmc" in saved["bishengir.log"].read_text()
    passes = [path.name for path in saved["passes"].rglob("*.mlir")]
    assert any("plan-memory" in name for name in passes)
    assert all(name in output for name in saved if name != "kernel")


def test_compile_fails_where_the_kernel_does_not_fit() -> None:
    output = run("compile", "--kernel", "block_quantize", "--hidden", "65536", code=1)
    assert "rejects block_quantize for Ascend910_9391: ub overflow" in output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kernel", "pak"], "kernel is 'pak', but must be one of add_counts, add_rows"),
        (["--kernel", "pack", "--soc", "A4"], "soc is 'A4', but must be one of Ascend910B3 (A2)"),
        (["--kernel", "route", "--hidden", "64"], "hidden is 64, but route does not depend on it"),
        (["--kernel", "pack", "--hidden", "65"], "hidden is 65, but must be a positive multiple of 32"),
        (["--kernel", "pack", "--dtype", "fp32"], "dtype is 'fp32', but it must be one of"),
        (["--kernel", "pack_smooth", "--topk", "0"], "topk is 0, but it must be positive"),
        (["--kernel", "weighted_sum", "--shared", "-1"], "shared is -1, but must be 0 or more"),
        (
            ["--kernel", "arrange", "--feature", "masked"],
            "feature is 'masked', but arrange has int8, int8_128, weights",
        ),
        (["--kernel", "pack/bf16-h64-fast"], "feature is 'fast', but pack has int8_128"),
        (["--kernel", "pack/k8"], "topk is 8, but pack does not depend on it; it depends on dtype, hidden"),
    ],
)
def test_compile_names_what_is_wrong(arguments: list[str], told: str) -> None:
    assert told in run("compile", *arguments, code=1)


def test_gate_keeps_compares_and_tells(kept: Path) -> None:
    only = ["--kernel", "gather_counts", "--kernel", "waits_of_dispatch"]
    output = run("gate", *only, code=1)
    assert "gather_counts: new" in output
    assert "make gate-update" in output
    assert not kept.exists()

    run("gate", *only, "--update")
    assert {path.stem for path in kept.iterdir()} == SOCS.keys()
    assert golden.read("Ascend910B3", kept).keys() == {"gather_counts", "waits_of_dispatch"}
    assert "old" not in page.PAGE.read_text()
    assert "| `gather_counts` |" in page.PAGE.read_text()
    assert "as kept" in run("gate", *only)

    rows = golden.read("Ascend910_9391", kept)
    before = rows["waits_of_dispatch"]["V"]
    rows["waits_of_dispatch"]["V"] = "1"
    golden.write("Ascend910_9391", rows.values(), kept)
    output = run("gate", *only, code=1)
    assert f"Ascend910_9391 waits_of_dispatch: V 1 -> {before}" in output
    assert "as kept" in run("gate", *only, "--soc", "A2")


def test_gate_updates_one_kernel_and_leaves_the_others(kept: Path) -> None:
    for kernel in ("gather_counts", "waits_of_dispatch"):
        run("gate", "--soc", "A2", "--kernel", kernel, "--update")
    assert golden.read("Ascend910B3", kept).keys() == {"gather_counts", "waits_of_dispatch"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--soc", "Ascend310"], "soc is 'Ascend310', but must be one of"),
        (["--kernel", "pak"], "kernel is 'pak', but must be one of"),
        (["--sample", "--update"], "update is True, but it keeps whole chips or whole kernels"),
    ],
)
def test_gate_names_what_is_wrong(kept: Path, arguments: list[str], told: str) -> None:
    assert told in run("gate", *arguments, code=1)
    assert not kept.exists()


def test_gate_says_that_it_needs_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path / "lib" / "golden")
    output = run("gate", "--kernel", "route", code=1)
    assert "run this in a checkout" in output
    assert "moe-triton compile works anywhere" in output
