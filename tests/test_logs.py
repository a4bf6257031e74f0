"""Lines of the library say whose they are, and ``MOE_TRITON_LOG`` says which there are."""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton import ArgumentError, EPBuffer
from moe_triton.core.logs import FIELDS, LEVELS, NAME, ROOMS, VARIABLE, _used, levels_of, log_of, use_variable
from tests.patience import seconds
from tests.test_docs import ROOT, page, table_after


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Loggers are as they were before the test, which has used no variable."""
    loggers = [logging.getLogger(f"{NAME}.{room}" if room else NAME) for room in ("", *ROOMS)]
    levels, handlers = [logger.level for logger in loggers], list(loggers[0].handlers)
    _used.clear()
    yield
    _used.clear()
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    loggers[0].handlers[:] = handlers


# Lines.


def test_a_line_says_whose_it_is_and_of_which_call(caplog: pytest.LogCaptureFixture) -> None:
    log = log_of("masks", rank=2, num_ranks=4, group="a1b2c3")
    log.of_call("dispatch", 117).warning("dispatch number %d: rank %d is masked", 117, 3)
    (record,) = caplog.records
    assert record.name == "moe_triton.masks"
    assert record.getMessage() == "rank 2 of 4 [group a1b2c3]: dispatch number 117: rank 3 is masked"
    assert [getattr(record, name) for name in FIELDS] == [2, 4, "a1b2c3", "dispatch", 117]


def test_a_line_of_no_rank_is_as_it_was_and_has_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    log_of("tables").warning("%s: rows that fit no kernel", "a.json")
    (record,) = caplog.records
    assert record.getMessage() == "a.json: rows that fit no kernel"
    assert [getattr(record, name) for name in FIELDS] == [None, None, "", "", None]


def test_a_line_of_a_rank_without_a_group_has_no_brackets(caplog: pytest.LogCaptureFixture) -> None:
    log_of("waits", rank=0, num_ranks=2).warning("100% late")  # nothing is filled in
    assert caplog.messages == ["rank 0 of 2: 100% late"]


def rooms_logged_to() -> set[str]:
    """What the library's modules call `log_of` with."""
    found = set()
    for path in (ROOT / "moe_triton").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "log_of":
                assert isinstance(node.args[0], ast.Constant), path
                found.add(str(node.args[0].value))
    return found


def test_every_room_is_logged_to_and_every_line_goes_to_a_room() -> None:
    assert rooms_logged_to() == set(ROOMS)
    getting = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "moe_triton").rglob("*.py")
        if "logging.getLogger" in path.read_text(encoding="utf-8")
    }
    assert getting == {"moe_triton/core/logs.py", "moe_triton/tools/cli/demo.py"}  # which only listens


# The variable.


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("debug", {"": "debug"}),
        ("info,waits=debug,kernels=error", {"": "info", "waits": "debug", "kernels": "error"}),
        (" Masks = Off , WARNING ", {"masks": "off", "": "warning"}),
    ],
)
def test_levels_are_read(text: str, levels: dict[str, str]) -> None:
    assert levels_of(text) == {room: LEVELS[level] for room, level in levels.items()}


@given(st.dictionaries(st.sampled_from(["", *ROOMS]), st.sampled_from([*LEVELS]), min_size=1), st.data())
def test_any_rooms_have_any_levels_in_any_order(levels: dict[str, str], data: st.DataObject) -> None:
    items = [f"{room}={level}" if room else level for room, level in levels.items()]
    text = ",".join(data.draw(st.permutations(items)))
    assert levels_of(text) == {room: LEVELS[level] for room, level in levels.items()}


@given(st.text(alphabet="=, aefinorsuw", max_size=30))
def test_any_text_is_levels_or_an_error_of_the_variable(text: str) -> None:
    found = dict.fromkeys(["", *ROOMS])
    with contextlib.suppress(ArgumentError):
        found |= levels_of(text)
    assert set(found) == {"", *ROOMS}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("loud", "'loud' is no level: these are debug, info, warning, error, off"),
        ("info,", "'' is no level"),
        ("waits", "'waits' is no level"),
        ("wait=debug", f"'wait' is no room: these are {', '.join(ROOMS)}"),
        ("=debug", "'' is no room"),
        ("waits=debug=info", "'waits=debug' is no room"),
        ("info,debug", "all rooms may have one level only"),
        ("waits=info,waits=debug", "the room 'waits' may have one level only"),
    ],
)
def test_a_wrong_text_is_named_with_the_rule_and_the_remedy(text: str, rule: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        use_variable({VARIABLE: text})
    assert str(caught.value).startswith(f"{VARIABLE} is {text!r}, but {rule}")
    assert "as in info,waits=debug,kernels=error; or unset it." in str(caught.value)


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}, {VARIABLE: " "}])
def test_without_it_nothing_is_changed(environment: dict[str, str]) -> None:
    logger = logging.getLogger(NAME)
    before = logger.level, list(logger.handlers)
    use_variable(environment)
    assert (logger.level, logger.handlers) == before


def test_levels_are_set_once_so_that_the_programs_own_hold() -> None:
    use_variable({VARIABLE: "error,waits=debug"})
    assert logging.getLogger("moe_triton.waits").level == logging.DEBUG
    assert logging.getLogger("moe_triton.masks").getEffectiveLevel() == logging.ERROR
    assert logging.getLogger(NAME).handlers == []  # pytest has some for all
    logging.getLogger("moe_triton.waits").setLevel(logging.INFO)
    use_variable({VARIABLE: "error,waits=debug"})
    assert logging.getLogger("moe_triton.waits").level == logging.INFO


def test_the_first_buffer_checks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 2}
    monkeypatch.setenv(VARIABLE, "waits")
    with pytest.raises(ArgumentError, match=f"{VARIABLE} is 'waits', but 'waits' is no level"):
        EPBuffer(**sizes, relaxed=True)  # type: ignore[arg-type]


PROGRAM = """
import logging, sys
from moe_triton.core.logs import log_of, use_variable
{before}
use_variable()
use_variable()
{after}
log = log_of("waits", rank=1, num_ranks=2, group="ab12")
log.info("first")
log_of("kernels").info("second")
log.of_call("combine", 7).warning("third")
"""
CONFIGURED = "logging.basicConfig(format='%(rank)s %(round)s %(message)s', stream=sys.stderr)"
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def written(variable: str, before: str = "", after: str = "") -> list[str]:
    """What a program writes."""
    environment = {**os.environ, VARIABLE: variable}
    code = PROGRAM.format(before=before, after=after)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds(30))
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr.splitlines()


def test_a_program_without_handlers_has_lines_on_stderr_with_time_and_level() -> None:
    first, third = written("warning,waits=debug")
    assert re.fullmatch(rf"{TIME} INFO moe_triton\.waits: rank 1 of 2 \[group ab12\]: first", first)
    assert re.fullmatch(rf"{TIME} WARNING moe_triton\.waits: rank 1 of 2 \[group ab12\]: third", third)


def test_a_program_without_the_variable_has_warnings_alone() -> None:
    assert written("") == ["rank 1 of 2 [group ab12]: third"]


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_program_with_handlers_has_lines_there_alone(place: str) -> None:
    """Also one that configures logging behind its first buffer."""
    lines = written("info", **{place: CONFIGURED})
    of_rank = "rank 1 of 2 [group ab12]: "
    assert lines == [f"1 None {of_rank}first", "None None second", f"1 7 {of_rank}third"]


# The page.


def test_the_page_names_every_room_and_level() -> None:
    text = page("metrics.md")
    assert dict(table_after(text, "Room")) == dict(ROOMS)
    listed = re.findall(r"`(\w+)`", text.split("A level is ")[1].split(".\n")[0])
    assert listed == [*LEVELS]
