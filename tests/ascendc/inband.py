"""Rows with flags in them: taken out of their slots by one rank, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .case import WrongResultError, sent_to
from .memory import GARBAGE, Guarded
from .placed import SPARE_ROWS, draw_places

if TYPE_CHECKING:
    from .driver import World

ABSENT = 0.25  # of the rows that have places: they go nowhere


def receive_inband(
    world: World, rank: int, zone: int, offsets: np.ndarray, waited: Guarded | None = None, **changes: object
) -> tuple[dict[str, Guarded], np.ndarray]:
    """Outputs and the report."""
    case = world.case
    capacity = changes.get("capacity", int(offsets[-1]))
    assert isinstance(capacity, int)
    num_places = capacity + SPARE_ROWS * case.placed
    outputs = {
        "out_rows": Guarded((num_places, case.slot.row_bytes)),
        "out_scales": Guarded((num_places, case.num_scales), np.float32),
        "out_origins": Guarded((capacity, 3), np.int32),
        "out_weights": Guarded((num_places,), np.float32),
    }
    arrays: dict[str, object] = {name: output.array for name, output in outputs.items()}
    arguments: dict[str, object] = {
        "window": world.windows[rank].bytes,
        "recv_offsets": offsets,
        "places": places_of(world, rank, capacity) if case.placed else 0,
        "waited_us": waited.array if waited else 0,
        **world.masks,
        "num_entries": world.config.experts_on(rank) * world.config.num_ranks,
        "num_ranks": world.config.num_ranks,
        "capacity": capacity,
        "row_bytes": case.slot.row_bytes,
        "scale_offset": case.slot.scale_offset,
        "scale_bytes": case.slot.scale_bytes,
        "stamp_offset": case.slot.stamp_offset,
        **arrays,
        "out_scales": arrays["out_scales"] if case.scaled else 0,
        "out_weights": arrays["out_weights"] if case.weighted else 0,
        "zone": zone,
        "timeout_us": case.timeout_us,
        "status": world.layout.dispatch_status_on(rank),
        "slots": world.slots.on(rank),
    }
    report = world.library.launch("inband_receive", case.blocks, **{**arguments, **changes})
    for output in outputs.values():
        output.check_guards()
    return outputs, report


def places_of(world: World, rank: int, rows: int) -> np.ndarray:
    """(rows,) where these go: to their own numbers, unless the case says otherwise."""
    if not world.case.placed:
        return np.arange(rows, dtype=np.int32)
    return draw_places(world.seed, rank, rows, ABSENT)


def check_outputs(world: World, rank: int, number: int, outputs: dict[str, Guarded]) -> None:
    """Rows, scales, origins and weights where in-band rows were put, and nothing where none was."""
    case, row_bytes = world.case, world.case.slot.row_bytes
    sent = [
        (source, row)
        for expert, source in np.ndindex(world.config.experts_on(rank), world.config.num_ranks)
        for row in sent_to(case, world.seed, number, source, rank, expert)
    ]
    places = places_of(world, rank, len(sent)).tolist()
    for n, (place, (source, row)) in enumerate(zip(places, sent, strict=True)):
        if outputs["out_origins"].array[n].tolist() != [source, row.token, row.k]:
            raise WrongResultError(f"origin {n} of rank {rank} differs")
        if place < 0:
            continue
        if not np.array_equal(outputs["out_rows"].array[place], row.row[:row_bytes]):
            raise WrongResultError(f"row {n} of rank {rank} differs")
        if case.weighted and outputs["out_weights"].array[place] != np.float32(row.weight):
            raise WrongResultError(f"weight {n} of rank {rank} differs")
        at = case.slot.scale_offset
        scales = outputs["out_scales"].array[place].view(np.uint8)
        if case.scaled and not np.array_equal(scales, row.row[at : at + case.slot.scale_bytes]):
            raise WrongResultError(f"scales {n} of rank {rank} differ")
    is_free = np.ones(len(sent) + SPARE_ROWS * case.placed, dtype=bool)
    is_free[[place for place in places if place >= 0]] = False
    for name in ("out_rows", "out_scales", "out_weights"):
        if (outputs[name].array[is_free].view(np.uint8) != GARBAGE).any():
            raise WrongResultError(f"{name} of rank {rank} has something at a place of no row")
