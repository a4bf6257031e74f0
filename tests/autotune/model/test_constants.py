"""Constants of machines: they come back from JSON as they went, and say where they come from."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.model.constants import MACHINES, NETWORK, Constant, Machine, extremes_of, machine_named
from autotune.model.kernel_costs.movement import rdma_us
from moe_triton.core.errors import ArgumentError
from moe_triton.core.soc import SOCS

NAMES = st.sampled_from(MACHINES)
BAD_NUMBERS = [float("nan"), float("inf"), -1.0, "7", None, True]


def values_of(machine: str) -> st.SearchStrategy[dict[str, float]]:
    numbers = {name: st.floats(*extremes_of(name, machine)) for name in machine_named(machine).constants}
    return st.fixed_dictionaries({}, optional=numbers)


MACHINE_AND_VALUES = NAMES.flatmap(lambda name: st.tuples(st.just(name), values_of(name)))


def constant(**changes: Any) -> Constant:
    return Constant(
        **{"value": 2.0, "kind": "assumed", "source": "nobody", "low": 1.0, "high": 3.0, **changes}
    )


@pytest.mark.parametrize("name", MACHINES)
def test_every_constant_says_where_it_comes_from(name: str) -> None:
    for found, entry in machine_named(name).constants.items():
        assert len(entry.source) > 5, found
        assert entry.kind in ("published", "fitted", "assumed"), found
        assert entry.low <= entry.value <= entry.high, found


def test_what_a_product_has_not_is_an_error_that_names_it() -> None:
    a2, a3 = machine_named("A2"), machine_named("A3")
    assert a2.post_aicpu_us == 1.5
    assert a3.hop_far_us == 2.1
    with pytest.raises(AttributeError, match="A2 has no constant 'hop_far_us'"):
        _ = a2.hop_far_us
    with pytest.raises(AttributeError, match="A3 has no constant 'post_aicpu_us'"):
        _ = a3.post_aicpu_us
    with pytest.raises(AttributeError, match="A3 has no constant 'speed'"):
        _ = a3.speed
    with pytest.raises(ArgumentError, match="machine is 'A5'"):
        machine_named("A5")


def test_a_cpu_has_the_numbers_of_an_a3_and_says_so() -> None:
    cpu, a3 = machine_named("cpu"), machine_named("A3")
    assert a3.constants.keys() <= cpu.constants.keys()
    for name, entry in a3.constants.items():
        assert cpu.constants[name].value == entry.value
        assert cpu.constants[name].source.startswith("A3's, not of a CPU: ")
        assert cpu.constants[name].kind == "assumed"


def test_the_constants_of_the_replay_are_those_of_the_specification() -> None:
    a2 = machine_named("A2")
    assert (a2.vector_latency_cycles, a2.vector_bytes_per_cycle) == (18, 256)
    assert a2.vector_reduce_factor == 2
    assert (a2.load_latency_cycles, a2.store_latency_cycles) == (450, 250)
    assert (a2.stream_bytes_per_cycle, a2.stream_bytes_per_cycle_alone) == (21.6, 128)
    assert (a2.scalar_global_cycles, a2.scalar_local_cycles, a2.flag_cycles) == (350, 12, 6)


@pytest.mark.parametrize(("name", "soc"), [("A2", "Ascend910B3"), ("A3", "Ascend910_9391")])
def test_cores_are_those_of_the_processor_and_share_the_memory(name: str, soc: str) -> None:
    machine = machine_named(name)
    assert machine.cores == SOCS[soc].vector_cores
    rate = machine.stream_bytes_per_cycle * machine.cores * machine.clock_ghz
    assert rate == pytest.approx(1600, rel=0.01)


@given(chosen=MACHINE_AND_VALUES)
def test_measured_constants_replace_assumed_ones_and_no_others(chosen: tuple[str, dict[str, float]]) -> None:
    name, values = chosen
    assumed = machine_named(name)
    measured = assumed.measured(values, "Ascend910_9391 2026-01-02")
    for known, entry in measured.constants.items():
        if known in values:
            value = values[known]
            assert entry == Constant(value, "measured", "on Ascend910_9391 2026-01-02", value, value)
            assert getattr(measured, known) == value
        else:
            assert entry == assumed.constants[known]


def test_what_was_measured_has_the_range_of_its_samples() -> None:
    machine = machine_named("A3").measured({"flag_latency_us": 0.5}, "x", {"flag_latency_us": (0.4, 0.9)})
    entry = machine.constants["flag_latency_us"]
    assert (entry.low, entry.value, entry.high) == (0.4, 0.5, 0.9)
    with pytest.raises(ArgumentError, match=r"between low, 0\.6"):
        machine.measured({"flag_latency_us": 0.5}, "x", {"flag_latency_us": (0.6, 0.9)})


@given(chosen=MACHINE_AND_VALUES)
def test_a_value_that_is_tried_widens_the_range_and_keeps_the_source(
    chosen: tuple[str, dict[str, float]],
) -> None:
    name, values = chosen
    before = machine_named(name)
    after = before.replaced(values)
    assert before == machine_named(name)
    for known, entry in after.constants.items():
        old = before.constants[known]
        assert entry.value == values.get(known, old.value)
        assert (entry.kind, entry.source) == (old.kind, old.source)
        assert entry.low == min(old.low, entry.value)
        assert entry.high == max(old.high, entry.value)


@given(chosen=MACHINE_AND_VALUES, is_measured=st.booleans())
def test_json_brings_back_the_same(chosen: tuple[str, dict[str, float]], is_measured: bool) -> None:
    name, values = chosen
    machine = machine_named(name)
    machine = machine.measured(values, "x") if is_measured else machine.replaced(values)
    back = Machine.from_json(machine.to_json())
    assert back == machine
    assert hash(back) == hash(machine)
    assert copy.deepcopy(machine) == pickle.loads(pickle.dumps(machine)) == machine


def test_machines_are_the_same_whatever_order_their_constants_have() -> None:
    machine = machine_named("A3")
    turned = Machine("A3", dict(reversed(machine.constants.items())))
    assert turned == machine
    assert hash(turned) == hash(machine)
    assert machine != machine_named("cpu")
    assert machine != machine.replaced({"flag_cycles": 7})
    assert machine != "A3"


@pytest.mark.parametrize("field", ["value", "low", "high"])
@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_what_is_no_number_is_no_constant(field: str, number: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{field} is .*finite number"):
        constant(**{field: number})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "guessed"}, "kind is guessed"),
        ({"kind": ["assumed"]}, "kind is"),
        ({"source": ""}, "says where it comes from"),
        ({"source": 3}, "says where it comes from"),
        ({"low": 2.5}, "between low, 2.5, and high, 3"),
        ({"high": 1.5}, "between low, 1.0, and high, 1.5"),
    ],
)
def test_a_constant_with_a_mistake_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        constant(**changes)
    constant()


@pytest.mark.parametrize("number", BAD_NUMBERS)
@pytest.mark.parametrize("name", ["clock_ghz", "sync_all_us"])
def test_what_is_no_number_is_refused_by_name(name: str, number: Any) -> None:
    document = json.loads(machine_named("A3").to_json())
    document["constants"][name]["value"] = number
    with pytest.raises(ArgumentError, match=f"^value of {name} is .*finite number"):
        Machine.from_json(json.dumps(document))
    with pytest.raises(ArgumentError, match=f"^{name} is .*finite number"):
        machine_named("A3").measured({name: number}, "x")


def test_a_time_may_be_zero_and_a_rate_may_not() -> None:
    machine = machine_named("A3")
    assert machine.measured({"flag_latency_us": 0.0}, "x").flag_latency_us == 0
    for name in ("clock_ghz", "memcpy_gb_per_s", "cores", "stream_bytes_per_cycle", "queue_entries"):
        with pytest.raises(ArgumentError, match=f"{name} is 0.*divided"):
            machine.measured({name: 0.0}, "x")
        with pytest.raises(ArgumentError, match=f"{name} is 0.*divided"):
            machine.replaced({name: 0.0})


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("cores", 49, "1 to 48"),
        ("queue_entries", 0.5, "1 to 4096"),
        ("queue_entries", 5e9, "1 to 4096"),
        ("load_latency_cycles", 1e14, r"0 to 1e\+06"),
        ("vector_bytes_per_cycle", 1e-300, r"0\.001 to 1e\+06"),
    ],
)
def test_what_no_machine_has_is_refused_of_files_and_reports(name: str, number: float, said: str) -> None:
    document = json.loads(machine_named("A3").to_json())
    for changed in ({"value": number, "low": number, "high": number}, {"low": 0.0, "high": 1e15}):
        entry = {**document["constants"][name], **changed}
        text = json.dumps({**document, "constants": {**document["constants"], name: entry}})
        with pytest.raises(ArgumentError, match=f"of {name} is .* must be "):
            Machine.from_json(text)
    with pytest.raises(ArgumentError, match=f"^value of {name} is .* must be {said}"):
        machine_named("A3").measured({name: number}, "x")
    assert machine_named("cpu").measured({"cores": 128}, "x").cores == 128


def test_a_constant_that_does_not_exist_is_refused() -> None:
    machine = machine_named("A3")
    for change in (lambda v: machine.measured(v, "x"), machine.replaced):
        with pytest.raises(ArgumentError, match="speed"):
            change({"speed": 1.0})
        with pytest.raises(ArgumentError, match=r"post_aicpu_us.*A3 has these only"):
            change({"post_aicpu_us": 1.0})
    with pytest.raises(ArgumentError, match="speed"):
        Machine("A3", {"speed": constant()})


def without(machine: str, *names: str) -> str:
    document = json.loads(machine_named(machine).to_json())
    for name in names:
        del document["constants"][name]
    return json.dumps(document)


@pytest.mark.parametrize("machine", ["A3", "cpu"])
def test_a_document_of_a_machine_without_a_network_is_whole(machine: str) -> None:
    """As all of A3's were."""
    read = Machine.from_json(without(machine, *NETWORK))
    assert read.product == "A3"
    assert machine_named(machine).constants.keys() - read.constants.keys() == set(NETWORK)
    with pytest.raises(ArgumentError, match=f"without {NETWORK[1]}"):
        Machine.from_json(without(machine, NETWORK[1]))


def test_a2_has_a_network() -> None:
    with pytest.raises(ArgumentError, match="without post_aiv_us, rdma_gb_per_s, "):
        Machine.from_json(without("A2", *NETWORK))


SIZES = 16 << 10, 128 << 10, 2 << 20
HIXL = {"A2": (18.3, 23.6, 23.8), "A3": (18.4, 23.8, 23.9)}


@pytest.mark.parametrize("product", HIXL)
def test_a_ports_rates_are_the_published_ones(product: str) -> None:
    """In messages of three sizes: within 2%, and within 0.2% of the shortest, like most of ours."""
    machine = machine_named(product)
    errors = [
        num_bytes / rdma_us(machine, float(num_bytes)) / 1e3 / rate - 1
        for num_bytes, rate in zip(SIZES, HIXL[product], strict=True)
    ]
    assert max(map(abs, errors)) < 0.02
    assert abs(errors[0]) < 0.002


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: d["constants"].pop("flag_cycles"), "without flag_cycles"),
        (lambda d: d["constants"].update(speed=dict(d["constants"]["cores"])), r"\['speed'\]"),
        (lambda d: d["constants"]["cores"].pop("source"), "cores is"),
        (lambda d: d["constants"]["cores"].update(unit="1"), "cores is"),
        (lambda d: d["constants"]["cores"].update(source=""), "source of cores is"),
        (lambda d: d["constants"]["cores"].update(kind="known"), "kind of cores is known"),
        (lambda d: d["constants"]["cores"].update(low=100), "value of cores is 40.*between low, 100"),
        (lambda d: d["constants"].update(cores=48), "cores is 48"),
        (lambda d: d.update(version=1), "version is 1"),
        (lambda d: d.pop("version"), "version is None"),
        (lambda d: d.update(format="other"), "another document"),
        (lambda d: d.pop("machine"), "incomplete"),
        (lambda d: d.update(machine="A5"), "machine is 'A5'"),
        (lambda d: d.update(machine="A3"), "without .*post_aicpu_us|without hop_far_us"),
        (lambda d: d.update(constants=[]), "incomplete"),
        (lambda d: d.update(constants={}), "incomplete"),
    ],
)
def test_a_damaged_document_is_refused(damage: Damage, said: str) -> None:
    document = json.loads(machine_named("A2").to_json())
    damage(document)
    with pytest.raises(ArgumentError, match=said):
        Machine.from_json(json.dumps(document))


@given(cut=st.integers(0, len(machine_named("A2").to_json()) - 3))
def test_a_document_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(ArgumentError, match="no JSON"):
        Machine.from_json(machine_named("A2").to_json()[:cut])


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="constants is"):
        Machine.from_json(text)
