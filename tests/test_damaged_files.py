"""Files that people name, and those beside them: whatever they are or hold, an error of ours names them."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from autotune import results, writing
from autotune.cli.model.options import machine_of
from autotune.kernels.scope import Scope
from autotune.model.constants import machine_named
from autotune.pipeline.results import Target
from autotune.pipeline.results import write as write_rows
from autotune.search.study import Studies
from autotune.search.task import Outcome
from autotune.selftest_reports.step_times import read_report
from autotune.writing import LOCK
from moe_triton.balance import (
    Placement,
    read_expert_location,
    read_expert_map,
    read_logical_count,
    write_expert_location,
    write_expert_map,
    write_logical_count,
)
from moe_triton.core.errors import ArgumentError, MoeTritonError
from moe_triton.core.tables import Row, load_table
from moe_triton.tables import KernelSettings, pipelines, schemes
from moe_triton.tools.cli.app import app
from moe_triton.tools.cli.trace import median_call
from moe_triton.tools.host_traces import on_one_clock
from tests import test_kernel_tables as of_kernels
from tests import test_pipeline_tables as of_pipelines
from tests import test_scheme_tables as of_schemes
from tests.autotune.tasks import Bowl
from tests.autotune.test_step_times import results as report_results
from tests.autotune.test_step_times import write as write_report
from tests.cli.test_trace import write_trace
from tests.patience import seconds
from tests.trace.test_host_traces import clock
from tests.trace.test_host_traces import write as write_host_trace

ROW = Row(("own",), (1, 1, 1, 1), ("direct", 1, 1))


class Read(NamedTuple):
    """One file.

    Attributes:
        write: makes a sound one in a folder, and returns its path.
        read: reads the file at that path.
        is_json: whether it is a document.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    is_json: bool = True


def expert_map(folder: Path) -> Path:
    write_expert_map(Placement.initial(2, 4, 6, 2), folder / "map.json")
    return folder / "map.json"


def expert_location(folder: Path, ending: str = ".json") -> Path:
    write_expert_location(Placement.initial(2, 4, 6, 2), folder / f"location{ending}")
    return folder / f"location{ending}"


def logical_count(folder: Path) -> Path:
    write_logical_count(torch.ones(2, 4), folder / "count.json")
    return folder / "count.json"


def constants(folder: Path) -> Path:
    path = folder / "constants.json"
    path.write_text(machine_named("A3").to_json())
    return path


def report(folder: Path) -> Path:
    write_report(folder, "npu", report_results(0.0, ("direct",))[:2])
    return folder / "report.json"


def study(folder: Path) -> Path:
    path = folder / "study.db"
    studies = Studies(path)
    studies.tell(Bowl(), studies.next(Bowl()) or {}, Outcome(1.0, facts={"ns": 1.0}))
    studies.next(Bowl())  # one that another process may be at
    studies.close()
    return path


def read_study(path: Path) -> None:
    with contextlib.closing(Studies(path)) as studies:
        studies.begin([], resume=True)
        studies.trials(Bowl())
        studies.best(Bowl())
        while (settings := studies.next(Bowl())) is not None:
            studies.tell(Bowl(), settings, Outcome(1.0))
        studies.begin([Bowl()], resume=False)


def empty_lock(folder: Path) -> Path:
    (folder / LOCK).touch()
    return folder / LOCK


def write_kernels(path: Path) -> None:
    results.write(of_kernels.table_of(of_kernels.row_of("TILE=512")), path.parent)


def write_schemes(path: Path) -> None:
    target = Target(of_schemes.MACHINE, 2, "by hand", path.parent)
    write_rows(schemes.KIND, target, [ROW])


KERNELS = of_kernels.table_of(of_kernels.row_of("TILE=512"))
FILES = {
    "kernels": Read(
        lambda folder: of_kernels.write(folder, KERNELS),
        lambda path: KernelSettings(of_kernels.MACHINE, of_kernels.CONFIG, path.parent).chosen(
            of_kernels.SUM
        ),
    ),
    "schemes": Read(
        lambda folder: of_schemes.write(folder, of_schemes.SCHEMES),
        lambda path: of_schemes.chosen(path.parent),
    ),
    "pipelines": Read(
        lambda folder: of_pipelines.write(
            folder, {pipelines.columns_of(of_pipelines.CONFIG, of_pipelines.CORES): of_pipelines.SETTINGS}
        ),
        lambda path: of_pipelines.fill(path.parent, spins=1),
    ),
    "constants": Read(constants, lambda path: machine_of(str(path))),
    "constants to tune by": Read(constants, lambda path: Scope("A3", constants=str(path)).priced_on()),
    "report": Read(report, read_report),
    "trace": Read(lambda f: write_trace(f / "trace.json", [1.0]), lambda p: median_call(p, "dispatch", 0, 1)),
    "trace of a host": Read(
        lambda f: write_host_trace(f / "trace.json", 1, 8025.0, clock(1, -7000.0)),
        lambda p: on_one_clock([p]),
    ),
    "kernels, written again": Read(lambda folder: of_kernels.write(folder, KERNELS), write_kernels),
    "schemes, written again": Read(
        lambda folder: of_schemes.write(folder, of_schemes.SCHEMES), write_schemes
    ),
    "expert map": Read(expert_map, read_expert_map),
    "expert location": Read(expert_location, lambda path: read_expert_location(path, 2)),
    "expert location of tensors": Read(
        lambda folder: expert_location(folder, ".pt"),
        lambda path: read_expert_location(path, 2),
        is_json=False,
    ),
    "logical count": Read(logical_count, read_logical_count),
    "study": Read(study, read_study, is_json=False),
    "lock of a study": Read(
        lambda folder: study(folder).with_suffix(".lock"),
        lambda path: read_study(path.with_suffix(".db")),
        is_json=False,
    ),
    "lock of tables": Read(empty_lock, write_kernels, is_json=False),
    "lock of other tables": Read(empty_lock, write_schemes, is_json=False),
    **{
        f"{suffix} of a study": Read(
            lambda folder, suffix=suffix: study(folder).with_name(f"study.db{suffix}"),  # type: ignore[misc]
            lambda path: read_study(path.with_name("study.db")),
            is_json=False,
        )
        for suffix in ("-wal", "-shm", "-journal")
    },
}
PLACES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device without an end": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
}
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "no text": b"\xff\xfe\0" * 1000,
    "null": b"null",
    "a list": b"[]",
    "a number": b"1" * 400,
    "too many digits": b"1" * 5000,
    "deep": b"[" * 100_000,
    "half": b'{"format": "moe_triton.table", "ver',
    "of SQLite": b"SQLite format 3\0" + bytes(1000),
}
VALUES: list[Any] = [10**400, -1, float("nan"), None, "\ud800", [], {}]


MADE_IF_ABSENT = "study", "-journal of a study"
"""By SQLite, where a link leads to, too."""


def error_of(work: Callable[[], object]) -> BaseException | None:
    """How something ends that may not end."""
    errors: list[BaseException | None] = []

    def catching() -> None:
        try:
            work()
            errors.append(None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=catching, daemon=True)
    thread.start()
    thread.join(seconds(60))
    assert errors, "it does not end"
    return errors[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_by_its_name(name: str, place: str, tmp_path: Path) -> None:
    file = FILES[name]
    path = file.write(tmp_path)
    path.unlink(missing_ok=True)
    PLACES[place](path)
    error = error_of(lambda: file.read(path))
    if place == "link to nothing" and name in MADE_IF_ABSENT:
        assert error is None
    else:
        assert isinstance(error, ArgumentError), error
        assert str(tmp_path) in str(error)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_what_holds_something_else_is_an_error_of_ours(name: str, content: str, tmp_path: Path) -> None:
    file = FILES[name]
    path = file.write(tmp_path)
    path.unlink(missing_ok=True)
    path.write_bytes(CONTENTS[content])
    error = error_of(lambda: file.read(path))
    assert isinstance(error, MoeTritonError | None), error
    assert error is not None or not file.is_json


def places_in(document: Any, most: int = 2) -> Iterator[tuple[Any, ...]]:
    """Ways to values of a document: of a list or a large mapping, to the first ones."""
    if isinstance(document, dict):
        keys: list[Any] = list(document)[: most if len(document) > 16 else None]
    else:
        keys = list(range(len(document)))[:most] if isinstance(document, list) else []
    for key in keys:
        yield (key,)
        yield from ((key, *below) for below in places_in(document[key], 16))


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file.is_json])
def test_no_value_in_a_document_ends_in_another_error(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    path = file.write(tmp_path)
    sound = json.loads(path.read_text())
    refused = 0
    for place in places_in(sound):
        for value in VALUES:
            changed = copy.deepcopy(sound)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            path.write_text(json.dumps(changed))
            try:
                file.read(path)
            except MoeTritonError as error:
                str(error).encode()  # can be printed
                refused += 1
            except Exception as error:
                pytest.fail(f"{place} is {value!r:.50}: {error!r}")
    assert refused > 20


DAMAGED_ROWS: dict[str, tuple[Any, ...]] = {
    "no settings": ("nonsense", 1, 1, None),
    "settings of another type": (b"\xff", 1, 1, None),
    "no outcome": ("X=2 Y=0", 1, 1, "nonsense"),
    "an outcome of other fields": ("X=2 Y=0", 1, 1, '{"bits": 3}'),
    "an outcome that is a list": ("X=2 Y=0", 1, 1, "[1]"),
    "an outcome of bytes": ("X=2 Y=0", 1, 1, b"\xff\xfe"),
    "an empty outcome": ("X=2 Y=0", 1, 1, ""),
    "a value that is a text": ("X=2 Y=0", 1, 1, '{"value": "1"}'),
    "a value that is no number": ("X=2 Y=0", 1, 1, '{"value": NaN}'),
    "a value beyond all": ("X=2 Y=0", 1, 1, f'{{"value": {10**400}}}'),
    "a reason that is none": ("X=2 Y=0", 1, 1, '{"value": 1, "reason": 3}'),
    "a time that is none": ("X=2 Y=0", 1, 1, '{"value": 1, "facts": {"ns": "x"}}'),
    "a fact beyond all": ("X=2 Y=0", 1, 1, f'{{"value": 1, "facts": {{"busy": {{"V": {10**400}}}}}}}'),
    "facts that are none": ("X=2 Y=0", 1, 1, '{"value": 1, "facts": []}'),
    "a deep outcome": ("X=2 Y=0", 1, 1, "[" * 100_000),
}


@pytest.mark.parametrize("kind", DAMAGED_ROWS)
def test_a_row_of_a_study_that_is_none_is_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    path = study(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute("INSERT INTO trials VALUES (?, ?, ?, ?, ?)", (Bowl().name, *DAMAGED_ROWS[kind]))
    with pytest.raises(ArgumentError, match=r"study is .*must be a study that can be read and written"):
        read_study(path)


def test_a_process_of_a_study_that_is_none_is_gone(tmp_path: Path) -> None:
    path = study(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        row = Bowl().name, "X=2 Y=0", "../self", 10**9, None
        file.execute("INSERT INTO trials VALUES (?, ?, ?, ?, ?)", row)
    read_study(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 5000),
    "overwritten": lambda path: path.write_bytes(path.read_bytes()[:100] + b"\xff" * 20_000),
    "other columns": lambda path: replaced(path, "CREATE TABLE trials (a TEXT)"),
    "a view": lambda path: replaced(path, "CREATE VIEW trials AS SELECT 1 AS task"),
}


def replaced(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute("DROP TABLE trials")
        file.execute(statement)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_study_is_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    path = study(tmp_path)
    DAMAGES[kind](path)
    with pytest.raises(
        ArgumentError, match=r"else remove it with its \.lock, -wal and -shm, or name another"
    ):
        read_study(path)


def test_the_command_says_it_in_a_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "study.db")
    done = CliRunner().invoke(app, ["tune", "explain", "stamps", "--study", str(tmp_path / "study.db")])
    assert done.exit_code == 1
    assert "study.db, but it must be a study that can be read and written" in " ".join(done.output.split())


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """It takes no room: it has a placeholder."""
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArgumentError, match="it has more than 64 MB"):
        load_table(path, "none")


def test_a_lock_that_a_stopped_process_holds_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WAIT_S", 0.1)
    path = empty_lock(tmp_path)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ArgumentError, match="another process has held it"):
            write_kernels(path)


def test_a_table_that_cannot_be_put_in_its_place_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "name" / "table.json"
    with writing.writing(path) as put:
        path.mkdir()
        with pytest.raises(ArgumentError, match="it must be a file that can be written"):
            put("{}")
    assert sorted(each.name for each in path.parent.iterdir()) == [LOCK, path.name]
