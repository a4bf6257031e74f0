"""What `autotune.model.bodies.posts` counts, priced for a machine."""

from __future__ import annotations

import numpy as np

from autotune.model.bodies import movement, posts
from autotune.model.bodies.counts import Counted, reached
from autotune.model.bodies.pricing import (
    SCALAR_PER_ENTRY,
    cost_of,
    loaded_cycles,
    scalar_cycles,
    slowest,
    start_us,
    stored_cycles,
)
from autotune.model.constants import Machine
from autotune.model.cost import Cost, Work


def _asking(machine: Machine, counted: Counted) -> dict[str, float]:
    """Microseconds of making messages, without posting them: tables, and what they say."""
    if "posts" not in counted.stages:
        return {}
    did = counted.stages["posts"]
    cycles = scalar_cycles(machine, did, SCALAR_PER_ENTRY) + loaded_cycles(machine, did, did.turns)
    return {"items": slowest(machine, cycles + stored_cycles(machine, did, np.minimum(did.stores, 1)))}


def post_status(work: Work, machine: Machine) -> Cost:
    """One entry to every rank."""
    counted = posts.post_status(work)
    did, tiers = counted.stages["flags"], reached(work)
    cycles = scalar_cycles(machine, did, SCALAR_PER_ENTRY) + loaded_cycles(machine, did, did.loads)
    cycles += stored_cycles(machine, did, np.minimum(did.stores, 1))
    hops = movement.hops(machine, movement.remote(counted.flags, tiers), tiers, work.blocks)
    parts = {"scalar": start_us(machine, counted), "flags": slowest(machine, cycles), "hops": hops}
    return posts.with_messages(work, machine, cost_of(counted, parts | _asking(machine, counted)))


def dispatch_post(work: Work, machine: Machine) -> Cost:
    """Rows, expert by expert, and entries."""
    counted = posts.dispatch_post(work)
    cost = cost_of(counted, {"scalar": start_us(machine, counted), **_asking(machine, counted)})
    return posts.with_messages(work, machine, cost)


def combine_post(work: Work, machine: Machine) -> Cost:
    """Results, each with its flag."""
    counted = posts.combine_post(work)
    cost = cost_of(counted, {"scalar": start_us(machine, counted), **_asking(machine, counted)})
    return posts.with_messages(work, machine, cost)
