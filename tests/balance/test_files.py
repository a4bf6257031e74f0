"""Files of vllm-ascend and sglang: what is written is read again, and as they read it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.balance import (
    Placement,
    read_expert_location,
    read_expert_map,
    read_logical_count,
    write_expert_location,
    write_expert_map,
    write_logical_count,
)
from moe_triton.core.errors import ArgumentError
from tests.balance.plain import on_ranks, random_placement

MAP = "physical_to_logical_map"
SMALL = Placement(torch.tensor([[0, 1, 2, 3, 0, 1], [3, 0, 1, 0, 2, 0]]), 4, 3)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2), st.integers(0, 99))
def test_what_is_written_is_read(
    tmp_path: Path, num_experts: int, num_ranks: int, more: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    placement = random_placement(random, 2, num_experts, -(-num_experts // num_ranks) + more, num_ranks)
    write_expert_map(placement, tmp_path / "map.json")
    assert read_expert_map(tmp_path / "map.json") == placement
    for ending in (".json", ".pt"):
        path = str(tmp_path / f"location{ending}")
        write_expert_location(placement, path)
        assert read_expert_location(path, num_ranks) == placement
        assert read_expert_location(path, num_ranks + 1, num_experts, 1).num_shared_ranks == 1
        counts = random.integers(100, size=(2, num_experts))
        for weight in (counts, counts / 7, counts.astype(np.float32)):
            write_logical_count(weight, path)
            assert np.array_equal(read_logical_count(path).numpy(), weight.astype(np.float64))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["location.json", "location.pt", "map.json"]


def test_vllm_ascend_finds_its_keys(tmp_path: Path) -> None:
    """As its ExpertLoadBalancer reads them."""
    write_expert_map(SMALL, tmp_path / "map.json")
    data = json.loads((tmp_path / "map.json").read_text())
    assert data["moe_layer_count"] == 2
    assert data["layer_list"][0]["device_count"] == 3
    assert [layer["layer_id"] for layer in data["layer_list"]] == [0, 1]
    assert [device["device_id"] for device in data["layer_list"][0]["device_list"]] == [0, 1, 2]
    held = [[device["device_expert"] for device in layer["device_list"]] for layer in data["layer_list"]]
    assert held == [on_ranks(SMALL, 0), on_ranks(SMALL, 1)]


def test_sglang_finds_one_key(tmp_path: Path) -> None:
    """It passes all of them on as arguments (init_by_mapping)."""
    write_expert_location(SMALL, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == {MAP: SMALL.phy2log.tolist()}
    write_expert_location(SMALL, tmp_path / "x.pt")
    (tensor,) = torch.load(tmp_path / "x.pt", weights_only=True).values()
    assert torch.equal(tensor, SMALL.phy2log)


def test_counts_of_several_steps_are_added_up(tmp_path: Path) -> None:
    steps = torch.arange(24).reshape(2, 3, 4)
    torch.save(
        {"rank": 0, "logical_count": steps, "average_utilization_rate_over_window": None}, tmp_path / "x.pt"
    )
    assert torch.equal(read_logical_count(tmp_path / "x.pt"), steps.sum(dim=0).double())


def test_layers_may_be_numbered_from_where_experts_begin(tmp_path: Path) -> None:
    record = expert_map()
    for layer in record["layer_list"]:
        layer["layer_id"] += 3
    (tmp_path / "map.json").write_text(json.dumps(record))
    assert read_expert_map(tmp_path / "map.json") == SMALL


def expert_map() -> dict[str, Any]:
    layers = [
        {
            "layer_id": layer,
            "device_count": 3,
            "device_list": [
                {"device_id": n, "device_expert": e} for n, e in enumerate(on_ranks(SMALL, layer))
            ],
        }
        for layer in range(2)
    ]
    return {"moe_layer_count": 2, "layer_list": layers}


def change(*keys: Any) -> Callable[[Any], None]:
    """Puts the last of the keys where the others lead."""
    *way, last, value = keys

    def changing(record: Any) -> None:
        for key in way:
            record = record[key]
        record[last] = value

    return changing


DEVICE = "layer_list", 1, "device_list", 2
MALFORMED: dict[str, tuple[Callable[[Any], None], str]] = {
    "count": (change("moe_layer_count", 3), '"moe_layer_count" of .* is 3.*must be 2, the entries'),
    "no layers": (change("layer_list", []), '"layer_list" of .*must be a list with something in it'),
    "a layer": (change("layer_list", 0, 7), r'"layer_list\[0\]" of .* is 7.*must be a mapping'),
    "order": (change("layer_list", 1, "layer_id", 0), r'"layer_list\[1\].layer_id" of .*ids must ascend'),
    "devices": (change("layer_list", 1, "device_count", 2), r'"layer_list\[1\].device_count" of .*must be 3'),
    "device": (change(*DEVICE, "device_id", None), r'device_list\[2\].device_id" of .*ids must ascend'),
    "slots": (change(*DEVICE, "device_expert", [1]), r'device_expert" of .*3 devices of 2 slots'),
    "no experts": (change(*DEVICE, "device_expert", None), r"\[2\].device_expert.* list of experts' numbers"),
    "a text": (change(*DEVICE, "device_expert", [0, "1"]), "list of experts' numbers"),
    "true": (change(*DEVICE, "device_expert", [0, True]), "list of experts' numbers"),
    "huge": (change(*DEVICE, "device_expert", [0, 10**30]), '"device_expert" of .*lists of numbers'),
    "negative": (
        change(*DEVICE, "device_expert", [0, -1]),
        '"device_expert" of .* is -1 in slot 5 of layer 1',
    ),
    "left out": (change(*DEVICE, "device_expert", [0, 0]), "without expert 2 in layer 1"),
    "high": (change(*DEVICE, "device_expert", [0, 9]), "is 9 in slot 5 of layer 1"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_map_is_refused_by_file_and_key(name: str, tmp_path: Path) -> None:
    changing, said = MALFORMED[name]
    record = copy.deepcopy(expert_map())
    changing(record)
    path = tmp_path / "map.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ArgumentError, match=said) as caught:
        read_expert_map(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([[0, 1, 2], [0, 1]], "each of the same length"),
        ([[0.0, 1.0]], r'"physical_to_logical_map" of .* is float64 of shape \(1, 2\).*must be integers'),
        ([0, 1], r"int64 of shape \(2,\)"),
        ([[True, False]], "lists of numbers"),
        ({"0": 1}, "lists of numbers"),
        ([[0, 2]], "is 2 in slot 1 of layer 0, on rank 1, but experts are numbered 0 to 1"),
        ([[0, 1, 2]], r"is of 3 slots, but the 2 ranks"),
        ([[[[0]]]], "lists of numbers"),
    ],
)
def test_a_malformed_location_is_refused(value: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({MAP: value}))
    with pytest.raises(ArgumentError, match=said) as caught:
        read_expert_location(path, 2)
    assert str(path) in str(caught.value)


class Malice:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("way", ["torch", "pickle"])
def test_code_in_a_file_is_refused_and_not_run(way: str, tmp_path: Path) -> None:
    path, mark = tmp_path / "x.pt", tmp_path / "was-run"
    if way == "torch":
        torch.save({MAP: Malice(mark)}, path)
    else:
        path.write_bytes(pickle.dumps({MAP: Malice(mark)}, protocol=2))
    with pytest.raises(ArgumentError, match="of tensors and plain values alone"):
        read_expert_location(path, 2)
    assert not mark.exists()
    if way == "torch":  # it would have been
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())
    assert mark.exists()


def test_a_small_file_is_no_large_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({MAP: torch.zeros(1, 1, dtype=torch.int64).expand(1 << 20, 1 << 20)}, path)
    with pytest.raises(ArgumentError, match=r"of shape \(1048576, 1048576\)"):
        read_expert_location(path, 2)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(65 << 20))
    with pytest.raises(ArgumentError, match="it may have 64 MB"):
        read_expert_location(path, 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda folder: read_expert_map(folder / "none"), r"none is not readable.*No such file"),
        (lambda folder: read_expert_map(folder), "it is no plain file, but a folder"),
        (lambda folder: read_expert_map(7), r"path is 7 \(a int\), but it must be a str or a path"),
        (lambda folder: read_expert_location(folder / "x.bin", 2), 'must end in ".pt" or ".json"'),
        (lambda folder: write_expert_location(SMALL, folder / "x.bin"), 'must end in ".pt" or ".json"'),
        (lambda folder: write_expert_map(SMALL, folder / "no" / "x.json"), "not writable.*No such file"),
        (lambda folder: write_expert_map(SMALL, folder), "not writable"),
        (lambda folder: write_expert_map(None, folder / "x.json"), "placement is None, but it must be"),
        (lambda folder: write_expert_location({}, folder / "x.pt"), r"placement is {} \(a dict\), but"),
        (lambda folder: write_logical_count(-torch.ones(1, 2), folder / "x.pt"), "weight is -1.0 for"),
        (
            lambda folder: write_expert_map(Placement(SMALL.phy2log, 4, 4, 1), folder / "x.json"),
            "placement is one with 1 shared ranks",
        ),
    ],
)
def test_what_cannot_be_read_or_written_is_an_error_of_ours(
    call: Callable[[Any], object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=said):
        call(tmp_path)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({}, r'"logical_count" of .* is absent, but the file must have it, and has \[\]'),
        ([1], "must be a mapping"),
        ({"logical_count": [1.0]}, r"of shape \(1,\)"),
        ({"logical_count": [[1, -1]]}, '"logical_count" of .* is -1 for expert 1 in layer 0'),
        ({"logical_count": [[[1, 1]], [[1, float("nan")]]]}, "is nan for expert 1 in layer 0"),
        ({"logical_count": "1"}, "lists of numbers"),
        ({"logical_count": [[[True]]]}, "lists of numbers"),
        ({"logical_count": [[[[1]]]]}, "lists of numbers"),
        ({"logical_count": [[1, 2], [3]]}, "each of the same length"),
        ({"logical_count": [[1, 2**70]]}, "each of the same length"),
        ({"logical_count": [[[1, 1e308]]] * 2}, "is inf for expert 1 in layer 0, all steps together"),
    ],
)
def test_counts_that_are_none_are_refused(record: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(record))
    with pytest.raises(ArgumentError, match=said):
        read_logical_count(tmp_path / "x.json")


def test_a_small_file_of_lists_is_no_large_tensor(tmp_path: Path) -> None:
    """pickle writes a list once that is in another one many times."""
    path = tmp_path / "x.pt"
    torch.save({"logical_count": [[[1.0] * 4000] * 4000] * 4000}, path)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ArgumentError, match="is lists of 64000000000 numbers, but lists may have 16777216"):
        read_logical_count(path)
    torch.save({"logical_count": [[[]] * 40000] * 40000}, path)
    with pytest.raises(ArgumentError, match="is lists of 1600000000 numbers"):
        read_logical_count(path)
    torch.save({"logical_count": [[[1, 2.5]] * 3] * 5}, path)
    assert read_logical_count(path).tolist() == [[5, 12.5]] * 3


@pytest.mark.parametrize("name", ["", ".", "/", "/dev/null"])
def test_what_is_no_file_is_left_alone(name: str) -> None:
    with pytest.raises(ArgumentError, match="it must be a file that can be written"):
        write_expert_map(Placement.initial(1, 2, 2, 1), name)
    assert Path("/dev/null").is_char_device()


def test_a_pipe_stays_one_and_a_link_is_followed(tmp_path: Path) -> None:
    placement = Placement.initial(1, 2, 2, 1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="it is no plain file"):
        write_expert_map(placement, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_expert_map(placement, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_expert_map(tmp_path / "target") == placement
