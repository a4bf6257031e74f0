"""Tables of kernels' settings: which row counts, what is refused, and that no result changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_triton import ArgumentError, EPBuffer, Tuning
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.cpu_family import family_of
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.space import Space, double_buffers, named_features, settings_of, text_of
from moe_triton.core.tables import Row, Table
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.rendezvous.agreement import KERNELS, check_same
from moe_triton.schemes import SCHEMES, make_scheme
from moe_triton.schemes.rank_context import RankContext
from moe_triton.tables import (
    COMMAND,
    FOLDER,
    KEYS,
    SIZES,
    VALUES,
    KernelSettings,
    checked_table,
    keys_of,
    machine_of,
    name_of,
    sizes_of,
)
from tests.distributed.interrupted import messages

CONFIG = Config(4, 16, 1024, 2, 8, scheme="fullmesh_v1", relaxed=True)
SUM = weighted_sum_kernel(torch.bfloat16, 1024, 2)
MACHINE = "cpu-test-1-2"


def table_of(*rows: tuple[tuple[str, ...], tuple[int, ...], str], name: str = name_of(MACHINE)) -> Table:
    found = tuple(Row(keys, sizes, (settings, 1000, 1100)) for keys, sizes, settings in rows)
    return Table(name, COMMAND, "by hand", KEYS, SIZES, VALUES, found)


def write(folder: Path, table: Table) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{table.name}.json"
    path.write_text(table.to_json())
    return path


def row_of(settings: str, kernel: TritonKernel = SUM, ranks: int = 4, tokens: int = 16, **sizes: int) -> Any:
    hidden, topk, *_ = sizes_of(kernel, CONFIG)
    return keys_of(kernel), (sizes.get("hidden", hidden), sizes.get("topk", topk), ranks, tokens), settings


def test_a_kernel_gets_the_settings_of_its_row_and_keeps_the_others(tmp_path: Path) -> None:
    write(tmp_path, table_of(row_of("TILE=512")))
    found = KernelSettings(MACHINE, CONFIG, tmp_path)
    chosen = found.chosen(SUM)
    assert chosen.settings == {"TILE": 512}
    expected = (
        "row of kernel weighted_sum, variant weights, dtype bf16, hidden 1024, topk 2, ranks 4, tokens 16"
    )
    assert expected in chosen.source
    assert str(tmp_path) in chosen.source
    assert "by hand" in chosen.source
    tuned = SUM.with_settings(chosen.settings)
    assert tuned.constants["TILE"] == 512
    assert {**tuned.constants, "TILE": 1024, "SPLIT_TILE": 1024} == SUM.constants


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("TILE=1024", 4, 16), ("TILE=512", 4, 128)], {}),  # the nearest number of tokens
        ([("TILE=1024", 4, 128), ("TILE=512", 4, 32)], {"TILE": 512}),
        ([("TILE=512", 4, 512), ("TILE=1024", 64, 16)], {"TILE": 512}),  # ranks come first
    ],
)
def test_of_ranks_and_tokens_the_nearest_row_counts(
    tmp_path: Path, rows: list[tuple[str, int, int]], expected: dict[str, int]
) -> None:
    write(tmp_path, table_of(*(row_of(settings, ranks=r, tokens=t) for settings, r, t in rows)))
    assert KernelSettings(MACHINE, CONFIG, tmp_path).chosen(SUM).settings == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("any", "TILE=512", 16)], {"TILE": 512}),
        ([("any", "TILE=512", 16), ("bf16", "UNROLL=0", 16)], {"UNROLL": 0}),  # its own dtype first
        ([("any", "TILE=512", 16), ("bf16", "UNROLL=0", 512)], {"TILE": 512}),  # but the nearer row
        ([("fp16", "TILE=512", 16)], {}),
    ],
)
def test_a_row_of_any_dtype_serves_each(
    tmp_path: Path, rows: list[tuple[str, str, int]], expected: dict[str, int]
) -> None:
    name, variant, _ = keys_of(SUM)
    made = [((name, variant, dtype), (1024, 2, 4, tokens), settings) for dtype, settings, tokens in rows]
    write(tmp_path, table_of(*made))
    assert KernelSettings(MACHINE, CONFIG, tmp_path).chosen(SUM).settings == expected


@pytest.mark.parametrize("other", [{"hidden": 2048}, {"topk": 3}])
def test_a_row_of_other_code_is_none(tmp_path: Path, other: dict[str, int]) -> None:
    write(tmp_path, table_of(row_of("TILE=512", **other)))
    chosen = KernelSettings(MACHINE, CONFIG, tmp_path).chosen(SUM)
    assert chosen == ({}, "the kernel's own: no table has a row")


def test_without_tables_a_kernel_keeps_its_own(tmp_path: Path) -> None:
    found = KernelSettings(MACHINE, CONFIG, tmp_path)
    assert not found.tables
    assert found.compared == {}
    assert found.chosen(SUM).settings == {}


def test_a_users_table_goes_before_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    fp16 = weighted_sum_kernel(torch.float16, 1024, 2)
    write(shipped, table_of(row_of("TILE=512"), row_of("TILE=512", fp16)))
    write(own, table_of(row_of("UNROLL=0")))
    monkeypatch.setattr("moe_triton.tables.FOLDER", shipped)
    monkeypatch.setenv("MOE_TRITON_TABLES", str(own))
    found = KernelSettings(MACHINE, CONFIG)
    assert found.chosen(SUM).settings == {"UNROLL": 0}
    assert found.chosen(fp16).settings == {"TILE": 512}
    assert KernelSettings(MACHINE, CONFIG, shipped).chosen(SUM).settings == {"TILE": 512}


def test_settings_that_a_kernel_no_longer_has_are_left_out_and_said(tmp_path: Path) -> None:
    for settings in ("WIDTH=512", "TILE=768", "TILE=0"):
        write(tmp_path, table_of(row_of(settings)))
        chosen = KernelSettings(MACHINE, CONFIG, tmp_path).chosen(SUM)
        assert chosen.settings == {}
        assert "does not fit it any more" in chosen.source


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-5], "it must be a table that can be read"),
        (lambda text: text.replace('"version": 1', '"version": 2'), '"version" must be 1, not 2'),
        (lambda text: text.replace(name_of(MACHINE), "kernels-cpu-other"), '"name" must be'),
        (lambda text: text.replace('"moe_triton.table"', '"another"'), '"format" must be'),
        (lambda text: text.replace("TILE=512", "TILE=wide"), "must be words NAME=NUMBER"),
        (
            lambda text: text.replace("TILE=512", f"TILE={10**22}"),
            "must have numbers up to 922",
        ),
        (lambda text: "[" * 100_000, "it is nested too deeply"),
        (lambda text: text.replace('"topk"', '"experts"'), "its columns must be"),
        (lambda text: text.replace(", 16,", ", 0,"), "integers from 1 on"),
    ],
)
def test_a_damaged_foreign_or_newer_table_is_refused_at_construction(
    tmp_path: Path, change: Any, said: str
) -> None:
    path = write(tmp_path, table_of(row_of("TILE=512")))
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(ArgumentError, match="Install moe_triton again, or write the table again") as error:
        _ = KernelSettings(MACHINE, CONFIG, tmp_path).tables
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"tuning\.tables") as error:
        _ = KernelSettings(MACHINE, CONFIG, tmp_path / "none").tables
    assert str(tmp_path / "none") in str(error.value)
    with pytest.raises(ArgumentError, match="it must be a path or None"):
        Tuning(tables=3)  # type: ignore[arg-type]


def test_settings_are_written_and_read_back() -> None:
    assert text_of({}) == "default"
    assert settings_of("default") == {}
    assert settings_of(text_of({"TILE": 512, "UNROLL": 0})) == {"TILE": 512, "UNROLL": 0}
    for text in ("", "TILE", "TILE=", "TILE=-1", "TILE=1  UNROLL=0", "=1"):
        with pytest.raises(ValueError, match="NAME=NUMBER"):
            settings_of(text)


def test_a_space_lists_what_is_allowed_the_kernels_own_first() -> None:
    space = Space({"A": (1, 2, 3), "B": (0, 1)}, allows=lambda values: values["A"] != 2 or values["B"] == 1)
    found = list(space.candidates({"A": 4, "B": 0}))
    assert found[0] == {"A": 4, "B": 0}
    pairs = {(each["A"], each["B"]) for each in found}
    assert pairs == {(4, 0), (4, 1), (1, 0), (1, 1), (2, 1), (3, 0), (3, 1)}
    assert len(found) == len(pairs)


def test_settings_are_refused_that_the_kernel_does_not_have() -> None:
    with pytest.raises(ArgumentError, match="weighted_sum has the settings TILE, UNROLL"):
        SUM.with_settings({"SPLIT": 2})
    with pytest.raises(ArgumentError, match="cannot have these together"):
        SUM.with_settings({"TILE": 1000})


def test_variants_have_names() -> None:
    assert named_features() == ""
    assert named_features(weights=True, masked=False, shared=2, block=128) == "weights-shared2-block128"


def test_a_cpu_has_no_double_buffers() -> None:
    assert double_buffers("cpu") is None
    space = double_buffers("npu", "masked", "bf16", {"hidden": 1024})
    assert space == Space(
        {"MULTIBUFFER": (0, 1)}, "masked", "bf16", {"hidden": 1024}, space.allows, space.derived
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC", "amd-25-1"),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: X", "intel-6-143"),
        ("CPU implementer\t: 0x48\nCPU part\t: 0xd01\n", "arm-0x48-0xd01"),
        ("processor\t: 0\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_cpu_family_is_vendor_family_and_model(text: str, expected: str) -> None:
    assert family_of(text) == expected


@pytest.mark.parametrize("scheme", SCHEMES["A3"])
@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_plans_get_the_settings_and_nothing_else_changes(tmp_path: Path, scheme: str, target: str) -> None:
    config = replace(CONFIG, scheme=scheme)
    context = RankContext(config, 0, 8, 1_000_000, CAPABILITIES[target])
    variants = DispatchVariant(torch.bfloat16), CombineVariant(torch.bfloat16, True)
    plans = [make_scheme(context).whole(variant, 0) for variant in variants]
    kernels = {
        launch.kernel: None
        for plan in plans
        for launch in plan.launches
        if isinstance(launch.kernel, TritonKernel) and launch.kernel.space
    }
    changed = {
        kernel: list(kernel.space.candidates(kernel.settings))[-1] for kernel in kernels if kernel.space
    }
    rows = [(keys_of(k), sizes_of(k, config), text_of(values)) for k, values in changed.items()]
    machine = machine_of(target, "A3")
    write(tmp_path, table_of(*rows, name=name_of(machine)))
    for plan in plans:
        tuned = KernelSettings(machine, config, tmp_path).tuned(plan)
        assert [(one.step, one.values, one.blocks) for one in tuned.launches] == [
            (one.step, one.values, one.blocks) for one in plan.launches
        ]
        for was, is_now in zip(plan.launches, tuned.launches, strict=True):
            if was.kernel in changed:
                assert isinstance(is_now.kernel, TritonKernel)
                assert is_now.kernel.settings == changed[was.kernel]  # type: ignore[index]
            else:
                assert is_now.kernel is was.kernel
    assert any(launch.kernel in changed for plan in plans for launch in plan.launches)


def test_shipped_tables_can_be_read_and_fit_their_kernels() -> None:
    for path in FOLDER.glob("kernels-*.json"):
        assert checked_table(path).name == path.stem


def _one_call(rank: int, num_ranks: int, tables: str) -> tuple[list[int], dict[str, str]]:
    buffer = EPBuffer(
        num_max_tokens_per_rank=16, hidden=1024, num_topk=2, num_experts=8, relaxed=True,
        comm_alg="fullmesh_v1", tuning=Tuning(tables=tables),
    )  # fmt: skip
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(16, 1024, generator=rng).bfloat16()
    ids = torch.rand(16, 8, generator=rng).topk(2, 1).indices
    weights = torch.rand(16, 2, generator=rng)
    out = buffer.dispatch(x, ids, weights)
    y = buffer.combine(out.tokens, out.handle, weights)
    source = buffer.tuning_source()
    buffer.close()
    return y.view(torch.int16).flatten().tolist(), source


def test_bits_are_the_same_and_a_buffer_says_where_its_settings_come_from(tmp_path: Path, ranks: Any) -> None:
    none, some = tmp_path / "none", tmp_path / "some"
    none.mkdir()
    machine = machine_of("cpu", "A3")
    kernel = weighted_sum_kernel(torch.bfloat16, 1024, 2, features=SumFeatures(own=True))
    write(some, table_of(row_of("TILE=256 UNROLL=0", kernel), name=name_of(machine)))
    expected = ranks(2).run(_one_call, str(none))
    found = ranks(2).run(_one_call, str(some))
    assert [bits for bits, _ in found] == [bits for bits, _ in expected]
    for _, source in found:
        assert source["combine.weighted_sum"].startswith("TILE=256 UNROLL=0: table kernels-cpu-")
    for _, source in expected:
        assert source["combine.weighted_sum"].startswith("default: the kernel's own")


def _differing(rank: int, num_ranks: int, folders: list[str]) -> list[str]:
    with messages() as said:
        _one_call(rank, num_ranks, folders[rank])
    return said


def test_ranks_with_other_tables_are_told(tmp_path: Path, ranks: Any) -> None:
    none, some = tmp_path / "none", tmp_path / "some"
    none.mkdir()
    rows = row_of("TILE=256"), row_of("TILE=512", hidden=2048)
    write(some, table_of(*rows, name=name_of(machine_of("cpu", "A3"))))
    for said in ranks(2).run(_differing, [str(none), str(some)]):
        (line,) = said
        differing = "weighted_sum weights bf16: 'default' on rank(s) [0], 'TILE=256' on rank(s) [1];"
        assert f"differ in settings of kernels: {differing}" in line


def test_the_first_kernels_that_differ_are_named() -> None:
    one = {f"kernel{number}": "A=1" for number in range(9)}
    with messages() as said:
        check_same([{KERNELS: one}, {KERNELS: {**one, "kernel8": "A=2"}}, {KERNELS: one}])
        check_same([{KERNELS: one}, {KERNELS: {}}])
        check_same([{KERNELS: one}, {KERNELS: one}])
    first, second = said
    assert "kernels: kernel8: 'A=1' on rank(s) [0, 2], 'A=2' on rank(s) [1]; calls" in first
    assert "kernel3: 'A=1' on rank(s) [0], 'default' on rank(s) [1]; and 5 more; calls" in second


def test_ranks_compare_what_holds_for_their_sizes(tmp_path: Path) -> None:
    fp16 = weighted_sum_kernel(torch.float16, 1024, 2)
    rows = [
        row_of("TILE=512", tokens=16),
        row_of("TILE=256", tokens=512),
        row_of("TILE=512", fp16, hidden=2048),
        (("stamps", "plain", "any"), (1, 1, 4, 16), "BLOCK=32"),
        (("select", "plain", "any"), (1, 2, 4, 16), "default"),
    ]
    write(tmp_path, table_of(*rows))
    compared = KernelSettings(MACHINE, CONFIG, tmp_path).compared
    assert compared == {"stamps plain any": "BLOCK=32", "weighted_sum weights bf16": "TILE=512"}
