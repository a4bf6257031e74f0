"""``moe-triton tune pipeline`` as a user types it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.cli import app as tune_app
from autotune.intervals import Interval
from autotune.pipeline import measured, results, tune
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.command import command_of
from autotune.pipeline.measured import Measured
from autotune.pipeline.race import Result
from autotune.search.task import WrongBitsError
from moe_triton.processes import RankFailedError
from moe_triton.schemes import SCHEMES
from moe_triton.tables import FOLDER, schemes

SMALL = Sizes(2, 4, 64, 2, 4)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(tune_app, ["pipeline", *arguments])
    return result.exit_code, result.output


def in_folder(folder: Path) -> tuple[str, ...]:
    return "--output", str(folder), "--study", str(folder / "study.db")


def test_it_writes_tables_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "sizes_of", lambda *_: [SMALL])
    options = "--budget", "0", "--seconds", "1", *in_folder(tmp_path)
    code, output = run(*options)
    assert code == 0
    assert "H 64, K 2, EP 2, BS 4: own: fullmesh_" in output
    table = results.kept(schemes.KIND, tune.target_of("cpu", tmp_path))
    assert table is not None
    assert [row.keys[0] for row in table.rows] == ["own", "window"]
    assert table.source == measured.source()
    assert table.command == "moe-triton tune pipeline --budget 0 --seconds 1"
    monkeypatch.setattr(Measured, "price", lambda *_: pytest.fail("it is known"))
    assert run(*options, "--resume")[0] == 0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--soc", "Ascend310", "soc is 'Ascend310'"),
        ("--ranks", "0", "ranks is 0"),
        ("--topk", "100", "topk is 100"),
        ("--product", "A5", "product is 'A5'"),
    ],
)
def test_what_there_is_not_is_refused_in_a_line(tmp_path: Path, option: str, value: str, said: str) -> None:
    code, output = run(option, value, *in_folder(tmp_path))
    assert code == 1
    assert said in output
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (WrongBitsError("direct spins=3 gives other bits"), 1, "direct spins=3 gives other bits"),
        (RankFailedError({0: "it broke", 1: "it broke"}), 1, "ranks 0, 1: it broke\n"),
        (KeyboardInterrupt(), 130, "is kept in"),
    ],
)
def test_it_says_in_a_line_what_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fails(*_: Any) -> Result:
        raise error

    monkeypatch.setattr(tune, "sizes_of", lambda *_: [SMALL])
    monkeypatch.setattr(Measured, "price", fails)
    found = run(*in_folder(tmp_path))
    assert found[0] == code
    assert said in found[1]
    assert found[1].count("it broke") <= 1


def test_after_ctrl_c_what_was_priced_is_known_and_the_schemes_are_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def price(self: Any, default: Candidate, candidate: Candidate, seed: int) -> Result:
        asked.append(str(candidate))
        if len(asked) == 7:
            raise KeyboardInterrupt
        return Result(candidate, 1000, Interval.exact(1.0))

    monkeypatch.setattr(tune, "sizes_of", lambda *_: [SMALL])
    monkeypatch.setattr(Measured, "price", price)
    code, output = run(*in_folder(tmp_path))
    assert code == 130
    assert f"kept in {tmp_path / 'study.db'}; --resume goes on" in output
    assert list(tmp_path.glob("schemes-*.json"))
    before = list(asked)
    assert run("--resume", *in_folder(tmp_path))[0] == 0
    assert asked[7] == before[6]
    assert not set(before[3:6]) & set(asked[7:])


def test_the_command_is_what_was_given() -> None:
    given = {"soc": "A2", "ranks": [8, 16], "hidden": None, "budget": 0, "seconds": 2.5, "seed": 0}
    said = command_of(**given, all_shipped=True, write_shipped=False)
    assert (
        said
        == "moe-triton tune pipeline --soc A2 --ranks 8 --ranks 16 --budget 0 --seconds 2.5 --all-shipped"
    )


def test_shipped_tables_say_how_to_make_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is one that there is, and makes rows of just the sizes that the table has."""
    found: list[list[Sizes]] = []
    monkeypatch.setattr(tune, "tune", lambda sizes, *_, **__: found.append(list(sizes)) or iter(()))
    for path in FOLDER.glob("schemes-*.json"):
        table = schemes.checked_table(path, [name for each in SCHEMES.values() for name in each])
        words = shlex.split(table.command)
        assert words[:3] == ["moe-triton", "tune", "pipeline"]
        assert "--write-shipped" in words
        assert run(*words[3:])[0] == 0
        made = {(one.hidden, one.topk, one.ranks, one.tokens) for one in found.pop()}
        assert made == {row.sizes for row in table.rows}, path.name
        assert ("--soc" in words) == path.name.startswith("schemes-Ascend")


def test_the_command_is_one_of_tune() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(tune_app, ["pipeline", "--help"])
    assert result.exit_code == 0
    assert {"--write-shipped", "--study", "--all-shipped"} <= set(re.findall(r"--[a-z-]+", result.output))
