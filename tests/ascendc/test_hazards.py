"""The strict emulation refuses accesses to the same bytes that nothing orders, and buffers without memory."""

from __future__ import annotations

import subprocess

import pytest

from tests.patience import seconds

from .targets import TARGETS

Lines = dict[str, str]

NO_ORDER = "nothing orders them"
NO_MEMORY = "InitBuffer has not given memory"
HARMLESS = (
    "two reads",
    "other words",
    "a barrier of all pipes",
    "by way of another pipe",
    "behind what the scalar unit has waited for",
    "a flag that is polled",
    "a flag that is polled and cleared",
    "memory again after Reset",
)
REFUSED = {
    "a flag read by the scalar unit": "HardEvent::MTE3_S",
    "what was written where a flag had been": "HardEvent::MTE3_MTE2",
    "an order before the access": "HardEvent::S_V",
    "an order the other way round": "HardEvent::S_V",
    "a buffer without memory": NO_MEMORY,
    "a queue without memory": NO_MEMORY,
    "a buffer from before Reset": NO_MEMORY,
}


@pytest.fixture(scope="module", params=TARGETS)
def said(request: pytest.FixtureRequest) -> Lines:
    """What is said of each kernel: nothing where it is right."""
    command = request.param.program("hazards", "-O1", "-DMOE_EMULATION_STRICT")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds(30))
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def pairs(said: Lines) -> Lines:
    """Of accesses that are named with what would order them."""
    return {
        name: text
        for name, text in said.items()
        if name.split(" ")[-1] != "ordered" and name not in (*HARMLESS, *REFUSED)
    }


def test_every_pair_of_pipes_asks_for_its_order(pairs: Lines) -> None:
    """The error names the event, or the barrier, that is missing."""
    assert len(pairs) == 27
    for name, text in pairs.items():
        order = name.rpartition(" ")[2]
        missing = f"HardEvent::{order}" if "_" in order else f"PipeBarrier<PIPE_{order}>"
        assert NO_ORDER in text, name
        assert missing in text, name


def test_every_pair_that_is_ordered_is_right(said: Lines, pairs: Lines) -> None:
    assert {name: said[f"{name}, ordered"] for name in pairs} == dict.fromkeys(pairs, "")


@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_else_is_refused(said: Lines, name: str) -> None:
    assert said[name] == ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(said: Lines, name: str) -> None:
    assert REFUSED[name] in said[name]
