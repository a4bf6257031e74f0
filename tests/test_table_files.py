"""Files of kernels' settings: what lies in a table's place, and what its rows are held against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moe_triton
from moe_triton import ArgumentError
from moe_triton.kernels.weighted_sum import weighted_sum_kernel
from moe_triton.tables import FOLDER, KernelSettings, checked_table, keys_of, name_of
from moe_triton.tables.fits import misfits_of
from moe_triton.tables.installed import source_said
from moe_triton.tables.kept import Kept, keeping
from tests.distributed.interrupted import messages
from tests.test_kernel_tables import CONFIG, MACHINE, SUM, row_of, table_of, write


def test_a_folder_that_the_environment_names_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TRITON_TABLES", "/dev/null/typo")
    with pytest.raises(ArgumentError, match="MOE_TRITON_TABLES is /dev/null/typo, but it must be a folder"):
        _ = KernelSettings(MACHINE, CONFIG).tables


@pytest.mark.parametrize("is_link", [True, False])
def test_what_is_named_like_a_table_and_is_none_is_refused(tmp_path: Path, is_link: bool) -> None:
    path = tmp_path / f"{name_of(MACHINE)}.json"
    path.symlink_to("nothing") if is_link else path.mkdir()
    with pytest.raises(ArgumentError, match="it must be a table that can be read"):
        _ = KernelSettings(MACHINE, CONFIG, tmp_path).tables


def test_rows_that_fit_no_kernel_are_told_whatever_sizes_they_are_of(tmp_path: Path) -> None:
    other = weighted_sum_kernel(torch.bfloat16, 7168, 8)
    rows = [
        (keys_of(other), (7168, 8, 4, 16), "TILE=1000"),
        (keys_of(other), (7168, 8, 4, 32), "FOO=1"),
        (("no_such", "plain", "any"), (1, 1, 4, 16), "BLOCK=1"),
        (keys_of(other), (7168, 8, 4, 64), "TILE=896"),
        (("stamps", "plain", "any"), (1, 1, 4, 16), "BLOCK=32"),
    ]
    path = write(tmp_path, table_of(*rows, row_of("TILE=512")))
    with messages() as said:
        for _ in range(2):
            assert KernelSettings(MACHINE, CONFIG, tmp_path).chosen(SUM).settings == {"TILE": 512}
    (line,) = said
    assert line.startswith(f"{path}: rows that fit no kernel are left out: weighted_sum weights bf16 [7168, ")
    assert "settings is TILE=1000 UNROLL=1, but weighted_sum cannot have these together" in line
    assert "setting FOO is 1, but weighted_sum has the settings TILE, UNROLL" in line
    assert "no_such plain any [1, 1, 4, 16] (no kernel of that name takes these sizes)" in line
    assert "896" not in line
    assert "stamps" not in line


def test_shipped_rows_fit_their_kernels() -> None:
    """So that reading them need not compare them."""
    for path in FOLDER.glob("kernels-*.json"):
        assert list(misfits_of(checked_table(path))) == []


def test_versions_that_are_not_installed_are_said(tmp_path: Path) -> None:
    of = table_of(row_of("TILE=512"))
    source = "measured on cpu-x, moe_triton 9.9.9, triton-ascend 1.0"
    write(tmp_path, replace(of, source=source))
    said = KernelSettings(MACHINE, CONFIG, tmp_path).chosen(SUM).source
    assert f"({source}; installed here: moe_triton {moe_triton.__version__}, triton-ascend " in said
    assert source_said(replace(of, source=f"measured by moe_triton {moe_triton.__version__} on 2 cores")) == (
        f"measured by moe_triton {moe_triton.__version__} on 2 cores"
    )


def test_what_is_kept_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path, table_of(row_of("TILE=512")))
    known: Kept = {}
    for damage in (path.write_text, lambda text: (path.unlink(), tmp_path.rmdir()), str):
        with keeping(known):
            assert KernelSettings(MACHINE, CONFIG, tmp_path).chosen(SUM).settings == {"TILE": 512}
        damage("{")
    with pytest.raises(ArgumentError, match="it must be a folder"):
        _ = KernelSettings(MACHINE, CONFIG, tmp_path).tables
