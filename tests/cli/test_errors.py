"""What a command cannot do it says in a line; every number that an option takes has a range or a rule."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from autotune import verification
from autotune.cli import app as tune_app
from autotune.cli import compiler as gate_module
from autotune.cli.compiler import compile_app, gate_app
from autotune.cli.model import app as model_app
from autotune.pipeline import tune as pipeline_tune
from autotune.tuning import Tuned
from moe_triton.core.errors import ArgumentError, ToolchainError
from moe_triton.processes import RankFailedError
from moe_triton.tools.cli import build as build_module
from moe_triton.tools.cli import demo as demo_module
from moe_triton.tools.cli import selftest as selftest_module
from moe_triton.tools.cli.app import app
from moe_triton.tools.cli.errors import Commands

SMALL = "--hidden", "1024", "--experts", "16", "--topk", "4"
ASKED: dict[str, tuple[str, ...]] = {
    "demo": ("--ranks", "2", "--hidden", "64", "--topk", "2", "--experts", "4"),
    "compile": ("--kernel", "gather_counts"),
    "selftest": ("--only", "windows"),
    "build": ("--backend", "cpu"),
    "trace": ("picture.svg", "none.json"),
    "model plan": ("--ranks", "8", "--tokens", "8", *SMALL),
    "model cluster": ("--machine", "A2", "--ep", "8", "--tokens", "8", *SMALL),
    "model kernel": ("pack/bf16-h1024", "--tokens", "16", "--ranks", "4", "--experts", "32", "--blocks", "4"),
    "model calibrate": ("none",),
    "tune explain": ("stamps",),
}
"""What commands are asked beside the option that is tried."""
WHOLE = "0", "-1", "1000000000", str(2**70)
BROKEN = "0", "-1", "1e300", "nan", "inf"
RANK_ERROR = ArgumentError("kernels", "'cuda'", "it must be one of two", "Use 'triton'.")


def groups() -> Iterator[tuple[str, typer.Typer]]:
    yield "", app
    yield "", compile_app
    yield "", gate_app
    yield "model ", model_app
    yield "tune ", tune_app


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name and function of every command."""
    for prefix, group in groups():
        for command in group.registered_commands:
            assert command.callback is not None
            yield prefix + (command.name or command.callback.__name__.replace("_", "-")), command.callback


def numeric_options() -> Iterator[tuple[str, str, type]]:
    """Command, option, and int or float."""
    for command, function in commands():
        hints = get_type_hints(function, include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            hint = hints[parameter.name]
            base, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            kinds = {base, *get_args(base), *itertools.chain(*map(get_args, get_args(base)))}
            kind = next((kind for kind in (int, float) if kind in kinds), None)
            if kind is not None:
                said = [
                    name for extra in extras for name in (extra.param_decls or ()) if name.startswith("--")
                ]
                yield command, said[0] if said else f"--{parameter.name.replace('_', '-')}", kind


NUMERIC = sorted(set(numeric_options()), key=str)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands check what they are asked, and then do nothing that takes long."""
    monkeypatch.chdir(tmp_path)
    for variable in ("MOE_TRITON_TABLES", "XDG_CONFIG_HOME", "MOE_TRITON_CACHE"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    report = SimpleNamespace(results=(), settings=SimpleNamespace(backend="cpu"), has_failed=False, soc="cpu")
    stubs: dict[tuple[object, str], object] = {
        (demo_module, "_run"): lambda settings: [],
        (gate_module, "_compile"): lambda pairs: {},
        (selftest_module, "run_selftest"): lambda *_: report,
        (build_module, "build"): lambda settings, console: build_module._check(settings) or Path("library"),
        (verification, "verified"): lambda *_: iter(()),
        (verification, "schemes_verified"): lambda *_: iter(()),
        (pipeline_tune, "tune"): lambda sizes, *_, **__: iter(()),
    }
    for (module, name), stub in stubs.items():
        monkeypatch.setattr(module, name, stub)
    for name in ("autotune.cli.kernels", "autotune.cli.explain"):
        monkeypatch.setattr(sys.modules[name], "searched", lambda scope, *_: Tuned(scope, ()))


def test_there_are_options_to_try() -> None:
    assert {
        ("demo", "--rounds", int),
        ("model calibrate", "--noise", float),
        ("tune show", "--topk", int),
    } <= {*NUMERIC}
    assert len(NUMERIC) > 60


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "option", "kind"), NUMERIC)
def test_any_number_is_taken_or_refused_without_a_traceback(command: str, option: str, kind: type) -> None:
    for value in WHOLE if kind is int else BROKEN:
        words = [*command.split(), *ASKED.get(command, ()), f"{option}={value}"]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words)
        assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
        assert result.exit_code in (0, 1, 2), (words, result.output)
        if result.exit_code == 2:
            assert f"Invalid value for '{option}'" in result.output
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("demo --kernels cuda", r"kernels is 'cuda', but it must be one of \['auto', 'triton', 'torch'\]"),
        ("demo --rounds 0", r"Invalid value for '--rounds'"),
        ("demo --quantize int9", "quantize is 'int9'"),
        ("layout --ranks 0", "num_ranks is 0"),
        ("plan --comm-alg ring", "comm_alg is 'ring'"),
        ("compile --kernel pak", "kernel is 'pak'"),
        ("gate --soc A9", "soc is 'A9'"),
        ("selftest --only coffee", "--only is 'coffee'"),
        ("build --backend cpu --jobs 0", "jobs is 0"),
        ("trace /dev/null/p.svg /dev/null/trace.json", "traces is /dev/null/trace.json"),
        ("model plan --machine A9", "machine is 'A9'"),
        (
            "model cluster --machine A2 --ep 8 --tokens 8 --csv /dev/null/at.csv",
            "/dev/null/at.csv: Not a directory",
        ),
        ("model kernel nothing", "kernel is 'nothing'"),
        ("model calibrate /dev/null/report", "report is /dev/null/report"),
        ("tune kernels --soc A9", "soc is 'A9'"),
        ("tune pipeline --product A5", "product is 'A5'"),
        ("tune show --kernel nothing", "kernel is nothing"),
        ("tune explain stamps --soc cpu", "soc is cpu"),
        ("tune diff /dev/null/a /dev/null/b", "table is /dev/null/a"),
    ],
)
def test_what_is_wrong_is_a_line(words: str, said: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words.split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == (2 if "Invalid value" in said else 1), result.output
    assert re.search(said, result.output), result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RANK_ERROR, str(RANK_ERROR)),
        (ToolchainError("[cpu] is missing"), "[cpu] is missing"),
        (RankFailedError({0: "Traceback of it", 2: "Traceback of it"}, {0: "no", 2: "no"}), "ranks 0, 2: no"),
        (RankFailedError({0: "Traceback of it", 1: "died"}, {0: "no"}), "rank 0: no\nrank 1: died"),
        (FileNotFoundError(2, "No such file or directory", "/none"), "/none: No such file or directory"),
    ],
)
def test_every_group_ends_alike(error: Exception, said: str) -> None:
    group = typer.Typer(cls=Commands)

    @group.command()
    def fails() -> None:
        raise error

    group.command("other")(lambda: None)
    result = CliRunner().invoke(group, ["fails"])
    assert (result.exit_code, result.output) == (1, f"{said}\n")
    assert result.stdout == ""
    for name, one in groups():
        # A command by itself is run by the group that it is found from.
        is_group = name or len(one.registered_commands) > 1
        assert not is_group or issubclass(one.info.cls, Commands)


def test_a_bug_keeps_its_traceback() -> None:
    group = typer.Typer(cls=Commands)

    @group.command()
    def stumbles() -> None:
        raise IndexError("a bug")

    group.command("other")(lambda: None)
    assert isinstance(CliRunner().invoke(group, ["stumbles"]).exception, IndexError)
