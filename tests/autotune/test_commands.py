"""``moe-triton tune`` as a user types it."""

from __future__ import annotations

import multiprocessing
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from autotune import results
from autotune.kernels.modelled import ModelledTask
from autotune.pipeline.candidate import Sizes
from autotune.pipeline.tune import priced_schemes, target_of
from autotune.search import Outcome
from moe_triton import tables
from moe_triton.core.config import Config
from moe_triton.core.cpu_family import cpu_family
from moe_triton.core.installing import install, reinstall
from moe_triton.core.space import Settings
from moe_triton.core.tables import Row, Table
from moe_triton.tables import schemes
from moe_triton.tools.cli import extensions
from moe_triton.tools.cli.app import app

DEADLINE_S = 200.0
SMALL = ("--kernel", "stamps", "--tokens", "128", "--dtype", "bf16", "--workers", "1")
CHIP = "Ascend910_9391"
NAME, SCHEMES = f"kernels-{CHIP}", f"schemes-{CHIP}"


def run(*arguments: object, code: int = 0) -> str:
    """As in a pipe, for which a terminal's usual width stands."""
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["tune", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study, and the table that was made of it."""
    made = tmp_path_factory.mktemp("tables")
    said = run("kernels", *SMALL, "--study", made / "study.db", "--output", made)
    assert f"kept: {made / NAME}.json" in said
    assert "best / floor" in said
    rows = tuple(
        Row(
            (outputs,),
            (hidden, topk, ranks, tokens),
            ("fullmesh_v1", tokens * ranks * 1000, tokens * ranks * 1000),
        )
        for outputs in schemes.OUTPUTS
        for hidden, topk, ranks, tokens in ((2048, 8, 256, 1), (7168, 1, 8, 1), (8192, 16, 16, 512))
    )
    columns = schemes.KEYS, schemes.SIZES, schemes.VALUES
    of_schemes = Table(SCHEMES, schemes.COMMAND, "by hand", *columns, rows)
    (made / f"{SCHEMES}.json").write_text(of_schemes.to_json())
    return made


@pytest.fixture
def kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table, where buffers look it up."""
    monkeypatch.setenv(tables.ENVIRONMENT, str(folder))
    return folder


def test_the_table_is_one_that_buffers_take(kept: Path) -> None:
    table = Table.from_json((kept / f"{NAME}.json").read_text(), NAME)
    assert (table.keys, table.sizes, table.values) == (tables.KEYS, tables.SIZES, tables.VALUES)
    assert {row.keys[0] for row in table.rows} == {"stamps"}
    assert all(row.values[1] <= row.values[2] for row in table.rows)  # type: ignore[operator]
    settings = tables.KernelSettings("Ascend910_9391", Config(16, 128, 7168, 8, 256, scheme="direct"))
    assert len(settings.tables) >= 1


def test_show_says_what_tables_there_are_and_how_to_see_their_rows(kept: Path) -> None:
    said = run("show")
    assert len(said.splitlines()) < 60
    words = " ".join(said.split())
    shipped = Table.from_json((tables.FOLDER / f"{NAME}.json").read_text(), NAME)
    for part in (
        f"rows {len(shipped.rows)} of kernel: block_quantize, ",
        "sizes hidden 2048 to 8192, topk 4 to 16, ranks 16, tokens 16 to 512 ",
        f"source {shipped.source} ",
        "written comes with moe_triton",
        "sizes hidden 2048 to 8192, topk 1 to 16, ranks 8 to 256, tokens 1 to 512",  # of schemes: K may be 1
        f"in {kept}",
        f"no table of pipelines for {CHIP}; what writes one: moe-triton tune pipeline --soc A3",
        "--kernel, --dtype, --hidden, --topk, --ranks, --tokens, or --all.",
    ):
        assert part in words


def test_show_prints_the_rows_that_are_asked_for_in_microseconds(kept: Path) -> None:
    said = run("show", "--kernel", "stamps")
    assert f"{kept / NAME}.json\nautotune.model, constants " in said
    mine, shipped = (
        Table.from_json((folder / f"{NAME}.json").read_text(), NAME) for folder in (kept, tables.FOLDER)
    )
    rows = [row for table in (mine, shipped) for row in table.rows if row.keys[0] == "stamps"]
    assert len(rows) == len(re.findall(r"^stamps  ", said, re.M))
    assert "In all rows: dtype any, hidden any, topk any, ranks 16." in said
    for row in rows:
        cells = *row.keys[:2], "(.* )?", row.values[0], f"{int(row.values[1]) / 1e3:.2f}"
        assert re.search(rf"^{' +'.join(map(str, cells))}", said, re.M), cells
    few = run("show", "--tokens", "128", "--hidden", "7168", "--kernel", "rms_norm", "--kernel", "stamps")
    shown = re.findall(r"^(?:rms_norm|stamps) .*", few, re.M)
    named = [row for table in (mine, shipped) for row in table.rows if row.keys[0] in ("rms_norm", "stamps")]
    assert len(shown) == len([row for row in named if row.sizes[0] in (7168, 1) and row.sizes[3] == 128])
    of_schemes = run("show", "--topk", "1", "--ranks", "8")
    assert re.search(r"^own +7168 +1 +8 +1  fullmesh_v1  8.00 ", of_schemes, re.M)
    assert not re.search(r"^own +(2048|8192) ", of_schemes, re.M)


def test_show_has_everything_on_demand(kept: Path) -> None:
    said = run("show", "--all")
    every = [
        Table.from_json((folder / f"{name}.json").read_text(), name)
        for folder, name in ((kept, NAME), (tables.FOLDER, NAME), (kept, SCHEMES))
    ]
    rows = [row for table in every for row in table.rows]
    for row in rows:
        assert f" {int(row.values[1]) / 1e3:.2f}" in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--kernel", "nothing"), "kernel is nothing, but the tables have block_quantize, "),
        (("--tokens", "3"), "tokens is 3, but the tables have 1, "),
        (("--kernel", "rms_norm", "--ranks", "7"), "ranks is 7, but the tables have 16. "),
        (
            ("--kernel", "block_quantize", "--dtype", "fp8"),
            "dtype is fp8, but the tables have any, bf16, fp16",
        ),
    ],
)
def test_show_names_the_option_that_no_row_fits(kept: Path, options: tuple[str, ...], told: str) -> None:
    assert told in run("show", *options, code=1)


def test_without_a_table_the_remedy_is_for_that_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    for command in ("show", "verify"):
        assert "moe-triton tune kernels --soc cpu" in run(command, "--soc", "cpu", code=1)


def test_explain_says_why(folder: Path, tmp_path: Path) -> None:
    command = ("explain", "stamps", "--variant", "plain", "--study", folder / "study.db")
    said = " ".join(run(*command, "--plot", tmp_path / "plots").split())
    for part in ("critical path", "pipes, occupied", "runner-up", "MTE2", "unified buffer"):
        assert part in said
    assert re.search(r"The runner-up loses 0\.\d%", said)
    assert re.search(r"What forbids 1\.3 times: MTE2 0\.\d\d us", said)
    drawn = sorted(path.name.rpartition("-")[2] for path in (tmp_path / "plots").iterdir())
    assert drawn == ["BLOCK.svg", "pipes.svg"]


def test_diff_tells_what_changed(folder: Path, tmp_path: Path) -> None:
    table = folder / f"{NAME}.json"
    assert "as each other" in run("diff", table, table)
    other = tmp_path / f"{NAME}.json"
    other.write_text(table.read_text().replace('"default", 627', '"BLOCK=64", 600'))
    said = run("diff", table, other, code=1)
    assert "stamps plain any ranks=16 tokens=128: default (627 ns) -> BLOCK=64 (600 ns)" in said
    assert "it must be a file, with the name" in run("diff", table, tmp_path / "none.json", code=1)
    assert "it must be a file, with the name" in run("diff", table, tmp_path / f"{NAME}.old", code=1)


def test_diff_of_schemes(folder: Path, tmp_path: Path) -> None:
    table = folder / f"{SCHEMES}.json"
    assert "as each other" in run("diff", table, table)
    other = tmp_path / f"{SCHEMES}.json"
    other.write_text(table.read_text().replace('512, "fullmesh_v1"', '512, "fullmesh_v2"', 1))
    said = run("diff", table, other, code=1)
    assert re.search(r"own hidden=\d+ .*tokens=512: fullmesh_v1 \(\d+ ns\) -> fullmesh_v2", said)
    assert "it must be of the kind of" in run("diff", table, folder / f"{NAME}.json", code=1)


def test_verify_prices_again(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    assert f"none of {CHIP}" in run("verify", code=1)
    shipped = tmp_path / f"{NAME}.json"
    shipped.write_text((folder / f"{NAME}.json").read_text())
    assert "as kept" in run("verify", "--most", "2")
    shipped.write_text(shipped.read_text().replace("627", "500").replace("constants ", "constants 0"))
    said = run("verify", "--most", "0", code=1)
    assert "500 -> 627 ns" in said
    assert "source: " in said


def test_verify_prices_schemes_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    row, *_ = priced_schemes(Sizes(8, 1, 7168, 8, 256), CHIP)
    columns = schemes.KEYS, schemes.SIZES, schemes.VALUES
    table = Table(SCHEMES, schemes.COMMAND, target_of(CHIP, tmp_path).source, *columns, (row,))
    kept = tmp_path / f"{SCHEMES}.json"
    kept.write_text(table.to_json())
    assert f"{kept.name}: as kept" in run("verify")
    wrong = replace(row, values=("direct", *row.values[1:]))
    kept.write_text(replace(table, source="another", rows=(wrong,)).to_json())
    said = run("verify", code=1)
    assert f"source: another -> {table.source}" in said
    assert f"tokens 1: direct, {row.values[1]} ns of {row.values[2]} -> fullmesh_v1, " in said


def test_verify_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shipped = tables.FOLDER / "schemes-cpu-amd-25-1.json"
    name = f"schemes-cpu-{cpu_family()}"
    text = shipped.read_text().replace(shipped.stem, name).replace("moe_triton 0.1.0", "moe_triton 0.0.9")
    (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    said = run("verify", "--soc", "cpu")
    assert f"{name}.json: not verified: measured between processes" in said
    assert "moe_triton 0.0.9 on 2 cores of amd-25-1; installed here: moe_triton " in said


def _write_rows(folder: Path, number: int) -> None:
    for tokens in range(1, 21):
        row = Row(("stamps", "plain", "any"), (1, 1, number, tokens), ("default", 1, 1))
        columns = tables.KEYS, tables.SIZES, tables.VALUES
        results.write(Table(NAME, tables.COMMAND, "by hand", *columns, (row,)), folder)


def test_processes_that_write_a_table_at_once_lose_no_row(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_rows, args=(tmp_path, number)) for number in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    table = Table.from_json((tmp_path / f"{NAME}.json").read_text(), NAME)
    assert len(table.rows) == 60
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", f"{NAME}.json"]


def test_rows_of_other_sizes_stay(folder: Path) -> None:
    before = Table.from_json((folder / f"{NAME}.json").read_text(), NAME)
    sizes = ("--kernel", "stamps", "--tokens", "16", "--dtype", "bf16", "--workers", "1")
    run("kernels", *sizes, "--study", folder / "study.db", "--output", folder)
    after = Table.from_json((folder / f"{NAME}.json").read_text(), NAME)
    assert len(after.rows) == 2 * len(before.rows)
    assert set(before.rows) < set(after.rows)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--soc", "A9"),
            "soc is 'A9', but times are known of A2 (Ascend910B3), A3 (Ascend910_9391)",
        ),
        (("--soc", "950"), "times are known of A2 (Ascend910B3), A3 (Ascend910_9391), and of cpu"),
        (("--dtype", "fp8"), "dtype is"),
        (
            ("--kernel", "nothing"),
            "kernel is nothing, but in plans of these sizes the kernels with ",
        ),
        (("--kernel", "arrange"), ", route, route_pack, "),  # which has none
        (("--machine", "/dev/null/machine.json"), "machine is /dev/null/machine.json"),
        (("--hidden", "0"), "hidden is 0"),
        (("--measure",), "an NPU is needed to measure on one (the npu back end needs torch_npu"),
    ],
)
def test_what_is_refused(
    options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert said in run("kernels", *options, "--study", tmp_path / "study.db", code=1)


def test_explain_has_nothing_to_say_of_a_cpus_pipes() -> None:
    assert "soc is cpu" in run("explain", "stamps", "--soc", "cpu", code=1)


def test_without_the_package_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for points, why in (
        ([], "is not installed"),
        ([EntryPoint("tune", "autotune_that_is_not_there:app", extensions.GROUP)], "cannot be imported"),
    ):
        monkeypatch.setattr(extensions, "entry_points", lambda group, points=points: points)
        bare = typer.Typer(cls=extensions.Extended)
        bare.callback()(lambda: None)
        for words, remedy in (
            (["tune", "kernels"], install("tune")),
            (["model", "plan"], reinstall()),
            (["compile", "--kernel", "pack"], reinstall()),
            (["gate"], reinstall()),
        ):
            result = CliRunner().invoke(bare, words)
            assert result.exit_code == 1
            is_found = [point for point in points if point.name == words[0]]
            assert (why if is_found else "is not installed") in result.output
            assert remedy in result.output
        assert CliRunner().invoke(bare, ["nothing"]).exit_code == 2


def test_another_package_s_command_is_found_and_loaded_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single one, and a group; the list of commands imports neither."""
    one, group = typer.Typer(), typer.Typer()
    one.command()(lambda: typer.echo("this is one"))
    group.command("first")(lambda: typer.echo("this is the first of a group"))
    group.callback()(lambda: None)
    module = ModuleType("others_commands")
    module.one, module.group = one, group  # type: ignore[attr-defined]
    points = [EntryPoint(name, f"others_commands:{name}", extensions.GROUP) for name in ("one", "group")]
    monkeypatch.setattr(extensions, "entry_points", lambda group: points)
    bare = typer.Typer(cls=extensions.Extended)
    bare.callback()(lambda: None)
    listed = CliRunner().invoke(bare, ["--help"]).output
    assert all(f" {name} " in listed for name in ("one", "group", "model", "tune"))
    monkeypatch.setitem(sys.modules, "others_commands", module)
    assert CliRunner().invoke(bare, ["one"]).output == "this is one\n"
    assert CliRunner().invoke(bare, ["group", "first"]).output == "this is the first of a group\n"


def test_ctrl_c_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, while candidates are priced; what was priced before is not priced again."""
    study = tmp_path / "study.db"
    command = [sys.executable, "-m", "tests.autotune.interrupted", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + DEADLINE_S
        while not (tmp_path / "third").exists() and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert process.returncode == 130, said
    assert "--resume" in said
    assert not (tmp_path / f"{NAME}.json").exists()  # no kernel is through
    before = (tmp_path / "asked").read_text().splitlines()
    assert len(before) == 3
    again: list[str] = []
    usual = ModelledTask.evaluate

    def evaluate(task: ModelledTask, settings: Settings, best: float | None) -> Outcome:
        again.append(f"{task.name} {dict(settings)}")
        return usual(task, settings, best)

    monkeypatch.setattr(ModelledTask, "evaluate", evaluate)
    run("kernels", *SMALL, "--study", study, "--resume", "--output", tmp_path)
    assert before[2] in again  # it was interrupted
    whole = Table.from_json((tmp_path / f"{NAME}.json").read_text(), NAME)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["autotune.cli.kernels"], "tune", interrupt)
    (tmp_path / f"{NAME}.json").unlink()
    assert "kept: " in run("kernels", *SMALL, "--study", study, "--resume", "--output", tmp_path, code=130)
    assert Table.from_json((tmp_path / f"{NAME}.json").read_text(), NAME) == whole
    assert not {*before[:2]} & {*again}
