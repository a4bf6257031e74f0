"""Placements and loads in the files of vllm-ascend and sglang.

Symbols: L layers with experts, E experts of the model, P slots on ranks.

vllm-ascend's map of experts is JSON: ``moe_layer_count``, and a ``layer_list`` whose entries have a
``layer_id``, a ``device_count`` and a ``device_list``; an entry of that has a ``device_id`` and the list
``device_expert``: which expert each slot of the device holds, slot by slot (``_export_tensor_to_file`` in
``vllm_ascend/eplb/adaptor/vllm_adaptor.py``). Its readers go by the order of the lists and look at no id but
the layers' count (``vllm_ascend/ops/expert_load_balancer.py``).

sglang's ``--init-expert-location`` is JSON or what ``torch.save`` writes, by the ending of the name: a
mapping with ``physical_to_logical_map`` and nothing else, or with ``logical_count`` among others
(``python/sglang/srt/eplb/expert_location.py``).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_triton.balance.arguments import MOST_ELEMENTS, check_at_least, check_weight
from moe_triton.balance.loads import Loads
from moe_triton.balance.placement import Placement, check_placement
from moe_triton.core.checks import shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.plain_files import MOST_BYTES, check_plain, read_bytes, read_text

MOST_LISTED = 1 << 24
"""Numbers in lists: 61 layers of 256 experts at 1000 steps are as many, and take torch some seconds."""
MAP, COUNT = "physical_to_logical_map", "logical_count"
_TENSORS, _JSON = ".pt", ".json"
_AS_VLLM_ASCEND = "Write it as vllm-ascend does (expert_map_record_path), or with write_expert_map."
_AS_SGLANG = "Write it with write_expert_location or write_logical_count, or as sglang dumps it."

PathLike = str | os.PathLike[str]


# vllm-ascend.


def read_expert_map(path: PathLike, num_experts: int | None = None) -> Placement:
    """The placement in vllm-ascend's map of experts (``expert_map_path``).

    Layers and devices are those of the lists, in their order. Their ids have to ascend, or the file means
    something else than what its readers make of it; where they begin does not matter.

    Args:
        path: of the file.
        num_experts: E; None for those that the file places.

    Returns:
        A placement on as many ranks as there are devices, none of them with shared experts.

    Raises:
        ArgumentError: the file cannot be read, is no such map, or does not place every expert.
    """
    path = _path(path)
    record = _mapping(path, _document(path), "", _AS_VLLM_ASCEND)
    layers = _entries(path, record, "layer_list", "moe_layer_count", "layer_id", "")
    ids: list[list[int]] = []
    sizes: tuple[int, int] | None = None
    for number, layer in enumerate(layers):
        within = f"layer_list[{number}]."
        devices = _entries(path, layer, "device_list", "device_count", "device_id", within)
        experts: list[int] = []
        for place, device in enumerate(devices):
            key = f"{within}device_list[{place}].device_expert"
            held = device.get("device_expert")
            if not isinstance(held, list) or not held or not all(type(each) is int for each in held):
                raise _error(path, key, held, "it must be a list of experts' numbers", _AS_VLLM_ASCEND)
            if sizes is None:
                sizes = len(devices), len(held)
            if (len(devices), len(held)) != sizes:
                rule = f"every layer must have {sizes[0]} devices of {sizes[1]} slots, as the first one has"
                found = f"{len(held)} of one of {len(devices)} devices"
                raise _error(path, key, found, rule, _AS_VLLM_ASCEND)
            experts += held
        ids.append(experts)
    assert sizes is not None
    placed = _ids(path, "device_expert", ids, _AS_VLLM_ASCEND)
    return _placement(path, "device_expert", placed, num_experts, sizes[0], 0)


def write_expert_map(placement: Placement, path: PathLike) -> None:
    """Writes a placement as vllm-ascend's map of experts. Layers are numbered from 0 on, as it numbers them.

    Args:
        placement: without ranks of shared experts: the file has none.
        path: of the file; its folder has to exist. A reader sees the file as it was before, or all of it.

    Raises:
        ArgumentError: the placement is none or has ranks of shared experts, or the file cannot be written.
    """
    if check_placement(placement).num_shared_ranks:
        rule = "vllm-ascend's map has no ranks of shared experts"
        remedy = "Write a Placement of the ranks with routed experts alone."
        found = f"one with {placement.num_shared_ranks} shared ranks"
        raise ArgumentError("placement", found, rule, remedy)
    by_device = placement.phy2log.reshape(placement.num_layers, placement.num_ranks, -1).tolist()
    layers = [
        {
            "layer_id": layer,
            "device_count": len(devices),
            "device_list": [
                {"device_id": device, "device_expert": experts} for device, experts in enumerate(devices)
            ],
        }
        for layer, devices in enumerate(by_device)
    ]
    _write(_path(path), json.dumps({"moe_layer_count": len(layers), "layer_list": layers}).encode())


# sglang.


def read_expert_location(
    path: PathLike, num_ranks: int, num_experts: int | None = None, num_shared_ranks: int = 0
) -> Placement:
    """The placement in a file for sglang's ``--init-expert-location`` with ``physical_to_logical_map``.

    Args:
        path: of the file: ``.json``, or ``.pt``, of which nothing but tensors and plain values is loaded.
        num_ranks: of the group, which the file does not say.
        num_experts: E; None for those that the file places.
        num_shared_ranks: that hold shared experts.

    Raises:
        ArgumentError: the file cannot be read, holds no (L, P) integers under that key, or does not place
            every expert.
    """
    path = _path(path)
    found = _ids(path, MAP, _value(path, MAP), _AS_SGLANG)
    return _placement(path, MAP, found, num_experts, num_ranks, num_shared_ranks)


def write_expert_location(placement: Placement, path: PathLike) -> None:
    """Writes a placement for sglang's ``--init-expert-location``: (L, P) under ``physical_to_logical_map``.

    Args:
        placement: to write; its ranks are not part of the file.
        path: of the file, ``.json`` or ``.pt``; see `write_expert_map`.

    Raises:
        ArgumentError: the name ends otherwise, or the file cannot be written.
    """
    _write_value(path, MAP, check_placement(placement).phy2log)


def read_logical_count(path: PathLike) -> torch.Tensor:
    """The loads in a file of sglang with ``logical_count``, as its recorder of distributions dumps them.

    Args:
        path: of the file; see `read_expert_location`.

    Returns:
        (L, E) float64; counts of several steps, (steps, L, E) in the file, are added up.

    Raises:
        ArgumentError: the file cannot be read, or holds no such counts that are finite and not negative.
    """
    path = _path(path)
    value = _tensor(path, COUNT, _value(path, COUNT), _AS_SGLANG)
    if value.ndim not in (2, 3):
        rule = "it must be (layers, experts) or (steps, layers, experts)"
        raise _error(path, COUNT, f"of shape {tuple(value.shape)}", rule, _AS_SGLANG)
    steps = value[None] if value.ndim == 2 else value
    with _in(path, COUNT):
        counts = check_weight(COUNT, steps.movedim(0, 1), np.float64, num_dims=3)
    with np.errstate(over="ignore"):
        summed = counts.sum(axis=1)
    if not np.isfinite(summed).all():
        layer, expert = np.argwhere(~np.isfinite(summed))[0].tolist()
        found = f"{summed[layer, expert]} for expert {expert} in layer {layer}, all steps together"
        raise _error(path, COUNT, found, "sums must be finite in float64", "Divide all by the same number.")
    return torch.from_numpy(summed)


def write_logical_count(weight: Loads, path: PathLike) -> None:
    """Writes loads for sglang's ``--init-expert-location``: (L, E) under ``logical_count``.

    Args:
        weight: (L, E), of a real dtype.
        path: of the file, ``.json`` or ``.pt``; see `write_expert_map`.

    Raises:
        ArgumentError: a load is negative or not finite, the name ends otherwise, or the file cannot be
            written.
    """
    loads = torch.from_numpy(check_weight("weight", weight, np.float64))
    is_whole = bool((loads == loads.round()).all()) and float(loads.max()) < 2**53
    _write_value(path, COUNT, loads.to(torch.int64) if is_whole else loads)


# Reading.


def _path(path: object) -> Path:
    try:
        return Path(path)  # type: ignore[arg-type]
    except TypeError:
        rule = "it must be a str or a path"
        raise ArgumentError("path", shown(path), rule, "Pass a name.", code=INVALID_ARGUMENT) from None


def _error(path: Path, key: str, value: object, rule: str, remedy: str) -> ArgumentError:
    """The error of a file, or of a key in it."""
    name = f'"{key}" of {path}' if key else str(path)
    text = value if isinstance(value, str) else shown(value)
    return ArgumentError(name, text, rule, remedy, code=INVALID_ARGUMENT)


class _in(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Errors of what a file holds name the file."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ArgumentError) and error.argument in ("phy2log", COUNT):
            raise error.renamed({error.argument: f'"{self._key}" of {self._path}'}) from None


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except OSError as error:
        rule = f"it must be a file that can be read ({error.strerror or error})"
        raise _error(path, "", "not readable", rule, "Pass the name of such a file.") from None


def _document(path: Path) -> Any:
    text = _read(path, read_text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        rule = f"it must be JSON ({str(error)[:200]})"
        raise _error(path, "", "not readable", rule, "Write it again, or pass another file.") from None


def _loaded(path: Path) -> Any:
    """What ``torch.save`` has written: tensors and plain values; code in it is never run."""
    data = _read(path, read_bytes)
    remedy = "Write it again with torch.save, of a dict of tensors, or as .json."
    try:
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > MOST_BYTES:
                raise _error(path, "", f"of {unpacked} bytes", f"it may have {MOST_BYTES >> 20} MB", remedy)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except ArgumentError:
        raise
    except Exception as error:  # a damaged file ends in whatever its parts end in
        why = " ".join(str(error).split())[:200]
        rule = f"it must be what torch.save writes, of tensors and plain values alone ({why})"
        raise _error(path, "", "not readable", rule, remedy) from None


def _mapping(path: Path, value: object, key: str, remedy: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _error(path, key, value, "it must be a mapping", remedy)
    return value


def _entries(
    path: Path, record: dict[Any, Any], key: str, count: str, number: str, within: str
) -> list[dict[Any, Any]]:
    """The mappings in a list, as many as another key says, each numbered above the one before."""
    found = record.get(key)
    if not isinstance(found, list) or not found:
        raise _error(path, within + key, found, "it must be a list with something in it", _AS_VLLM_ASCEND)
    said = record.get(count)
    if type(said) is not int or said != len(found):
        rule = f'it must be {len(found)}, the entries of "{key}"'
        raise _error(path, within + count, said, rule, _AS_VLLM_ASCEND)
    last = -1
    for place, entry in enumerate(found):
        at = f"{within}{key}[{place}]"
        value = _mapping(path, entry, at, _AS_VLLM_ASCEND).get(number)
        if type(value) is not int or value <= last:
            rule = "ids must ascend: the file's readers go by the order of the list"
            raise _error(path, f"{at}.{number}", value, rule, _AS_VLLM_ASCEND)
        last = value
    return found


def _value(path: Path, key: str) -> object:
    """What a file of sglang has under a key."""
    endings: dict[str, Callable[[Path], Any]] = {_TENSORS: _loaded, _JSON: _document}
    if path.suffix not in endings:
        rule = f'its name must end in "{_TENSORS}" or "{_JSON}", as sglang tells them apart'
        raise _error(path, "", "of another kind", rule, "Rename it.")
    record = _mapping(path, endings[path.suffix](path), "", _AS_SGLANG)
    if key not in record:
        keys = sorted(str(each) for each in record)[:8]
        raise _error(path, key, "absent", f"the file must have it, and has {keys}", _AS_SGLANG)
    return record[key]


def _tensor(path: Path, key: str, value: object, remedy: str) -> torch.Tensor:
    """Numbers in a file, in whatever lists, as a tensor."""
    rule = "it must be a tensor, or lists of lists of numbers, each of the same length"
    if isinstance(value, torch.Tensor):
        # Its strides may be such that a small file means a large tensor.
        if value.layout is not torch.strided or value.numel() > MOST_ELEMENTS:
            raise _error(path, key, f"of shape {tuple(value.shape)}", rule, remedy)
        return value
    listed = _listed(value, {}) if isinstance(value, list) else None
    if listed is None:
        raise _error(path, key, value, rule, remedy)
    if listed.size > MOST_LISTED:
        rule = f"lists may have {MOST_LISTED} numbers in all"
        raise _error(path, key, f"lists of {listed.size} numbers", rule, "Write a tensor, as .pt.")
    try:
        return torch.tensor(value, dtype=torch.float64 if listed.has_floats else torch.int64)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise _error(path, key, value, f"{rule} ({str(error)[:100]})", remedy) from None


class _Listed(NamedTuple):
    """What lists of lists hold: how many numbers and empty lists, and whether some of them are floats."""

    size: int
    has_floats: bool


def _listed(value: list[Any], known: dict[tuple[int, int], _Listed | None], depth: int = 3) -> _Listed | None:
    """What lists hold; None if it is not integers and floats alone, as torch takes True for 1.

    A list that is in others many times, as a ``.pt`` file may have it, is looked at once.

    Args:
        value: the list.
        known: of lists, by `id` and depth.
        depth: of lists at most.
    """
    place = id(value), depth
    if place not in known:
        size, has_floats, is_sound = 0, False, depth > 0
        for each in value if is_sound else ():
            if type(each) in (int, float):
                size, has_floats = size + 1, has_floats or type(each) is float
                continue
            found = _listed(each, known, depth - 1) if type(each) is list else None
            if found is None:
                is_sound = False
                break
            # an empty one takes its time, too
            size, has_floats = size + max(found.size, 1), has_floats or found.has_floats
        known[place] = _Listed(size, has_floats) if is_sound else None
    return known[place]


def _ids(path: Path, key: str, value: object, remedy: str) -> torch.Tensor:
    found = _tensor(path, key, value, remedy)
    if found.ndim != 2 or not found.numel() or found.is_floating_point() or found.is_complex():
        kind = str(found.dtype).removeprefix("torch.")
        rule = "it must be integers, (layers, slots)"
        raise _error(path, key, f"{kind} of shape {tuple(found.shape)}", rule, remedy)
    return found


def _placement(
    path: Path, key: str, ids: torch.Tensor, num_experts: object, num_ranks: int, num_shared_ranks: int
) -> Placement:
    """A placement of what a file holds; what is wrong with it is said of the file."""
    if num_experts is None:
        num_experts = max(1, min(int(ids.max()) + 1, ids.shape[1]))
    with _in(path, key):
        return Placement(ids, check_at_least("num_experts", num_experts, 1), num_ranks, num_shared_ranks)


# Writing.


def _write_value(path: PathLike, key: str, value: torch.Tensor) -> None:
    where = _path(path)
    if where.suffix == _JSON:
        _write(where, json.dumps({key: value.tolist()}).encode())
    elif where.suffix == _TENSORS:
        data = io.BytesIO()
        torch.save({key: value.clone()}, data)
        _write(where, data.getvalue())
    else:
        rule = f'its name must end in "{_TENSORS}" or "{_JSON}", as sglang tells them apart'
        raise _error(where, "", "of another kind", rule, "Rename it.")


def _write(path: Path, data: bytes) -> None:
    """Puts a file in its place at once: who reads it meanwhile sees the one before.

    What is there has to be a plain file: a device or a pipe would be one afterwards.
    """
    draft: Path | None = None
    try:
        place = path.resolve()  # where a link leads to is written over, not the link
        check_plain(place)
        draft = place.with_name(f".{place.name}-{secrets.token_hex(8)}.new")
        draft.write_bytes(data)
        draft.replace(place)
    except (OSError, ValueError, RuntimeError) as error:  # a circle of links is the last one
        why = error.strerror if isinstance(error, OSError) else error
        rule = f"it must be a file that can be written ({why})"
        raise _error(path, "", "not writable", rule, "Make room, or name another place.") from None
    finally:
        if draft is not None:
            with contextlib.suppress(OSError, ValueError):
                draft.unlink()
