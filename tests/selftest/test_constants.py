"""Constants of a machine: they come back from JSON as they went, and say where they come from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.errors import ArgumentError
from moe_triton.costs import FIELDS, MACHINES, MachineConstants, assumed_constants
from tests.selftest.probes import is_measured

NUMBERS = st.floats(min_value=1e-6, max_value=1e12)
MEASURED = st.dictionaries(st.sampled_from(FIELDS), NUMBERS)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_assumption_names_its_source(machine: str) -> None:
    constants = assumed_constants(machine)
    for name in FIELDS:
        assert constants.provenance[name].startswith("assumed: ")
        assert len(constants.provenance[name]) > len("assumed: ") + 5
        assert not is_measured(constants, name)


def test_the_constants_of_the_replay_are_those_of_the_specification() -> None:
    a2 = assumed_constants("A2")
    assert (a2.vector_latency_cycles, a2.vector_bytes_per_cycle) == (18, 256)
    assert (a2.vector_divide_factor, a2.vector_reduce_factor) == (4, 2)
    assert (a2.load_latency_cycles, a2.store_latency_cycles) == (450, 250)
    assert (a2.stream_bytes_per_cycle, a2.stream_bytes_per_cycle_alone) == (21.6, 128)
    assert (a2.scalar_global_cycles, a2.scalar_local_cycles, a2.flag_cycles) == (350, 12, 6)


def test_streaming_is_the_bandwidth_of_the_memory_over_all_cores() -> None:
    for machine in ("A2", "A3"):
        c = assumed_constants(machine)
        assert c.stream_bytes_per_cycle * c.cores * c.clock_ghz == pytest.approx(1600, rel=0.01)


@given(machine=st.sampled_from(MACHINES), measured=MEASURED)
def test_measured_constants_replace_assumed_ones_and_no_others(
    machine: str, measured: dict[str, float]
) -> None:
    assumed = assumed_constants(machine)
    merged = assumed.merge(measured, "Ascend910_9391 2026-01-02")
    for name in FIELDS:
        assert is_measured(merged, name) == (name in measured)
        if name in measured:
            assert getattr(merged, name) == measured[name]
            assert merged.provenance[name] == "measured on Ascend910_9391 2026-01-02"
        else:
            assert getattr(merged, name) == getattr(assumed, name)
            assert merged.provenance[name] == assumed.provenance[name]


@given(machine=st.sampled_from(MACHINES), measured=MEASURED)
def test_json_brings_back_the_same(machine: str, measured: dict[str, float]) -> None:
    constants = assumed_constants(machine).merge(measured, "x")
    assert MachineConstants.from_json(constants.to_json()) == constants


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "7", None, True])
@pytest.mark.parametrize("name", ["clock_ghz", "sync_all_us"])
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    document = json.loads(assumed_constants("A3").to_json())
    document["constants"][name]["value"] = value
    with pytest.raises(ArgumentError, match=f"^{name} is .*finite number"):
        MachineConstants.from_json(json.dumps(document))
    with pytest.raises(ArgumentError, match=f"^{name} is .*finite number"):
        assumed_constants("A3").merge({name: value}, "x")


def test_a_time_may_be_zero_and_a_rate_may_not() -> None:
    assert assumed_constants("A3").merge({"flag_latency_us": 0.0}, "x").flag_latency_us == 0
    for name in ("clock_ghz", "memcpy_gb_per_s", "cores"):
        with pytest.raises(ArgumentError, match=f"{name} is 0.*divided"):
            assumed_constants("A3").merge({name: 0.0}, "x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["constants"].pop("flag_cycles"), "without flag_cycles"),
        (lambda d: d["constants"].update(speed={"value": 1, "provenance": "x"}), r"\['speed'\]"),
        (lambda d: d["constants"]["cores"].pop("provenance"), "cores is"),
        (lambda d: d["constants"]["cores"].update(provenance=""), "provenance of cores"),
        (lambda d: d["constants"]["cores"].update(provenance=3), "provenance of cores"),
        (lambda d: d["constants"].update(cores=48), "cores is 48"),
        (lambda d: d.update(version=2), "version is 2"),
        (lambda d: d.update(format="other"), "another document"),
        (lambda d: d.pop("machine"), "incomplete"),
        (lambda d: d.update(constants=[]), "incomplete"),
    ],
)
def test_a_document_with_a_mistake_is_refused(change: Any, said: str) -> None:
    document = json.loads(assumed_constants("A2").to_json())
    change(document)
    with pytest.raises(ArgumentError, match=said):
        MachineConstants.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="constants is"):
        MachineConstants.from_json(text)


def test_a_constant_that_does_not_exist_is_not_merged() -> None:
    with pytest.raises(ArgumentError, match="speed"):
        assumed_constants("A3").merge({"speed": 1.0}, "x")
    with pytest.raises(ArgumentError, match="machine is 'A5'"):
        assumed_constants("A5")
