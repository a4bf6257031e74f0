"""What moving weights costs beside steps: ``python -m benchmarks.moves [--json FILE]``.

Two ranks take steps of dispatch, experts (SwiGLU in fp32) and combine, and move from placement to placement
all the while. In every other step, chosen at random, `Mover.step` copies a megabyte; the ratio is of such a
step to the one without beside it, last rank out minus first rank in. After each step a rank copies as many
bytes of another rank's memory as the mover has, by `numpy.copyto` in pieces of a megabyte: what experts came
in a second of `Mover.step` is compared with that, move by move; and a switch with a copy of what it changes.
Then each rank is a server, and a paced link lies between them: how much of it do weights have?
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import harness
from moe_triton import EPBuffer
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.balance import ExpertWeights, Mover, Placement, adopt, allocate
from moe_triton.balance.weights import Side
from moe_triton.processes import RankGroup
from moe_triton.starting_line import StartingLine

PIECE_BYTES = 1 << 20
ARENA_BYTES = 96 << 20  # what is copied has left the caches when it comes again
DTYPE = torch.float32
EXCHANGED = 2  # experts of a layer, between neighbours
LINK_GB_PER_S = 0.1  # slower than what steps could move
LINK_STEP_BYTES = 8 << 20
STAGE_BYTES = 32 << 20  # what is put into it has been taken out two steps later


@dataclass(frozen=True)
class Setting:
    """What runs.

    Attributes:
        held: "allocated" weights, which others read in place, or "adopted" ones, which go through a stage.
        side: see `allocate`.
        moves: that are timed.
        ranks, tokens, topk, experts, slots: W, T, K, E, and slots of a rank.
        hidden, intermediate: H and I.
        layers: of which each step takes the next one.
    """

    held: str
    side: Side
    moves: int
    ranks: int = 2
    tokens: int = 64
    topk: int = 4
    experts: int = 16
    slots: int = 10
    hidden: int = 2048
    intermediate: int = 512
    layers: int = 2

    @property
    def name(self) -> str:
        """Of tables."""
        return f"{self.held}, {self.side}"


SETTINGS: tuple[tuple[str, Side], ...] = (
    ("allocated", "layer"),
    ("allocated", "double"),
    ("adopted", "layer"),
    ("adopted", "double"),
)


@dataclass
class Found:
    """What one rank has seen.

    Attributes:
        spans: of each step: when it began and ended.
        kinds: of each step: whether `Mover.step` was called, and whether it can be compared.
        rates: of each move, bytes that came in a second of `Mover.step` over those of a copy.
        switches: seconds of each.
        switch_ratios: of each that copies something, over a copy of that.
        is_shared: whether others had the core for a good part.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)
    kinds: list[tuple[bool, bool]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    switch_ratios: list[float] = field(default_factory=list)
    is_shared: bool = False


def placements(setting: Setting) -> list[Placement]:
    """One after the other, the same on every rank: in each layer neighbours exchange some experts."""
    draw = random.Random(0)
    held = Placement.initial(setting.layers, setting.experts, setting.ranks * setting.slots, setting.ranks)
    made = [held]
    for _ in range(setting.moves):
        ids = made[-1].phy2log.view(setting.layers, setting.ranks, setting.slots).clone()
        for of_layer in ids:
            for rank in range(setting.ranks - 1):
                mine, others = of_layer[rank].tolist(), of_layer[rank + 1].tolist()
                there = [slot for slot, expert in enumerate(mine) if expert not in others]
                back = [slot for slot, expert in enumerate(others) if expert not in mine]
                for slot, other in zip(
                    draw.sample(there, EXCHANGED), draw.sample(back, EXCHANGED), strict=True
                ):
                    of_layer[rank, slot], of_layer[rank + 1, other] = others[other], mine[slot]
        made.append(Placement(ids.view(setting.layers, -1), setting.experts, setting.ranks))
    return made


def _weights(buffer: EPBuffer, setting: Setting, held: Placement) -> ExpertWeights:
    """Filled as a placement says; an expert's number is the seed of its weights."""
    shapes = {
        "up": (setting.hidden, 2 * setting.intermediate),
        "down": (setting.intermediate, setting.hidden),
    }
    if setting.held == "allocated":
        specs = {name: (shape, DTYPE) for name, shape in shapes.items()}
        weights = allocate(buffer, setting.layers, specs, side=setting.side, stage_bytes=STAGE_BYTES)
    else:
        layers = [
            {name: torch.empty(setting.slots, *shape, dtype=DTYPE) for name, shape in shapes.items()}
            for _ in range(setting.layers)
        ]
        weights = adopt(buffer, layers, side=setting.side, stage_bytes=STAGE_BYTES)
    for layer in range(setting.layers):
        own = held.phy2log[layer].view(setting.ranks, -1)[buffer.rank].tolist()
        for tensor in weights.layer(layer).values():
            for slot, expert in enumerate(own):
                draw = torch.Generator().manual_seed(layer * setting.experts + expert)
                tensor[slot].normal_(0, setting.hidden**-0.5, generator=draw)
    return weights


class Copies:
    """Copies of other memory, which stand beside what a mover copies."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        self._source, self._target, self._at = source, np.zeros(ARENA_BYTES, np.uint8), 0

    def copy(self, num_bytes: int) -> float:
        """Seconds that it takes to copy some bytes, piece by piece."""
        begun = time.perf_counter()
        left = num_bytes
        while left:
            size = min(left, PIECE_BYTES, ARENA_BYTES - self._at)
            np.copyto(self._target[self._at : self._at + size], self._source[self._at : self._at + size])
            self._at = (self._at + size) % ARENA_BYTES
            left -= size
        return time.perf_counter() - begun


def run_experts(received: Any, layer: Mapping[str, Any], results: torch.Tensor, setting: Setting) -> None:
    """SwiGLU of what came."""
    begin = 0
    for slot, count in enumerate(received.tokens_per_expert.tolist()):
        rows = received.tokens[begin : begin + count].float()
        gate, up = (rows @ layer["up"][slot]).split(setting.intermediate, 1)
        results[begin : begin + count] = (torch.nn.functional.silu(gate) * up) @ layer["down"][slot]
        begin += count


def inputs(rank: int, setting: Setting) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's tokens, ids and weights."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(setting.tokens, setting.hidden, generator=draw).bfloat16()
    ids = torch.rand(setting.tokens, setting.experts, generator=draw).topk(setting.topk).indices.int()
    return x, ids, torch.rand(setting.tokens, setting.topk, generator=draw)


def make_buffer(setting: Setting, ranks_per_server: int | None = None) -> EPBuffer:
    """Collective."""
    return EPBuffer(
        num_max_tokens_per_rank=setting.tokens,
        hidden=setting.hidden,
        num_topk=setting.topk,
        num_experts=setting.ranks * setting.slots,
        ranks_per_server=ranks_per_server,
    )


def measure(rank: int, num_ranks: int, setting: Setting) -> Found:
    """All moves on this rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    harness.keep_freed_memory()
    found = Found()
    old, *goals = placements(setting)
    shuffle, line = random.Random(0), StartingLine()  # the same on every rank
    x, ids, scales = inputs(rank, setting)
    with make_buffer(setting) as buffer:
        weights = _weights(buffer, setting, old)
        mover = Mover(weights, old)
        arena = buffer.peer_memory(lambda: (ARENA_BYTES, {}))
        arena.of(rank).fill_(1)
        line.wait()
        copies = Copies(arena.of((rank + 1) % num_ranks).numpy())
        copies.copy(ARENA_BYTES)
        expert_bytes = weights.parts.expert_bytes
        results = None
        number, order = 0, [True, False]
        waited, begun_at = harness.waited_s(), time.perf_counter()
        for goal in goals:
            coming = mover.begin(goal)
            in_step = in_copies = 0.0
            copied = 0
            while mover.is_moving:
                if not number % 2:
                    shuffle.shuffle(order)
                moves = order[number % 2]
                held = mover.placement
                line.wait()
                times = [time.perf_counter()]
                changed = mover.switch(number)
                times.append(time.perf_counter())
                done = mover.step(PIECE_BYTES) if moves else 0
                times.append(time.perf_counter())
                at = number % setting.layers
                received = buffer.dispatch(x, ids, eplb_table=mover.table(at))
                results = torch.zeros_like(received.tokens) if results is None else results
                run_experts(received, weights.layer(at), results, setting)
                buffer.combine(results, received.handle, scales)
                times.append(time.perf_counter())
                found.spans.append((times[0], times[3]))
                found.kinds.append((moves, not changed and (done > 0 or not moves)))
                if changed:
                    found.switches.append(times[1] - times[0])
                    is_new = held.phy2log != mover.placement.phy2log
                    slots = int(is_new.view(setting.layers, num_ranks, -1)[list(changed), rank].sum())
                    if slots and setting.side == "layer":
                        found.switch_ratios.append((times[1] - times[0]) / copies.copy(slots * expert_bytes))
                if done:
                    in_step += times[2] - times[1]
                    in_copies += copies.copy(done)
                    copied += done
                number += 1
            if in_step:
                found.rates.append(coming / in_step / (copied / in_copies))
        found.is_shared = harness.waited_s() - waited > harness.SHARED_FROM * (time.perf_counter() - begun_at)
        line.wait()
        weights.close()
        arena.close()
    os.sched_setaffinity(0, cores)
    return found


def over_a_link(rank: int, num_ranks: int, setting: Setting) -> list[float]:
    """Of each move, what came in the time of steps over what a link between servers has left for it.

    Each rank is a server. Until all has come, what the link carries besides is rows.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    harness.keep_freed_memory()
    old, *goals = placements(setting)
    x, ids, scales = inputs(rank, setting)
    found, line, link = [], StartingLine(), PacedLink(LINK_GB_PER_S)
    with paced(link), make_buffer(setting, ranks_per_server=1) as buffer:
        weights = _weights(buffer, setting, old)
        mover = Mover(weights, old)
        number = 0
        for goal in goals:
            line.wait()
            coming, taken, begun = mover.begin(goal), link.taken_bytes, time.perf_counter()
            elapsed = carried = 0.0
            while mover.is_moving:
                mover.switch(number)
                at = number % setting.layers
                received = buffer.dispatch(x, ids, eplb_table=mover.table(at))
                mover.step(LINK_STEP_BYTES)  # goes while experts run, and not in front of rows
                if not elapsed and mover.ready():
                    elapsed, carried = time.perf_counter() - begun, link.taken_bytes - taken
                results = torch.zeros_like(received.tokens)
                run_experts(received, weights.layer(at), results, setting)
                buffer.combine(results, received.handle, scales)
                number += 1
            # As much goes as comes.
            found.append(coming / (LINK_GB_PER_S * 1e9 * elapsed - (carried - coming)))
        weights.close()
    os.sched_setaffinity(0, cores)
    return found


def step_ratios(per_rank: Sequence[Found]) -> list[float]:
    """Of each pair of steps side by side, with and without a copy, that can be compared on every rank."""
    took = harness.elapsed([found.spans for found in per_rank])
    ratios = []
    for first in range(0, len(took) - 1, 2):
        pair = first, first + 1
        if all(found.kinds[n][1] for found in per_rank for n in pair):
            with_copy, without = pair if per_rank[0].kinds[first][0] else pair[::-1]
            ratios.append(took[with_copy] / took[without])
    return ratios


def figures(setting: Setting) -> tuple[dict[str, float], bool]:
    """Starts the ranks; figures by metric, and whether cores were shared."""
    with RankGroup(setting.ranks) as group:
        per_rank: list[Found] = group.run(measure, setting, timeout_s=600)
    found = harness.with_interval("step", step_ratios(per_rank))
    found |= harness.with_interval("of_memcpy", [rate for each in per_rank for rate in each.rates])
    if setting.side == "layer":
        ratios = [ratio for each in per_rank for ratio in each.switch_ratios]
        found |= harness.with_interval("switch", ratios)
    found["switch_us"] = 1e6 * statistics.median(s for each in per_rank for s in each.switches)
    return found, any(each.is_shared for each in per_rank)


def link_figures(setting: Setting) -> dict[str, float]:
    """Starts the ranks, each a server; how much of the link between them weights had."""
    with RankGroup(setting.ranks) as group:
        per_rank: list[list[float]] = group.run(over_a_link, setting, timeout_s=600)
    return harness.with_interval("of_link", [each for of_rank in per_rank for each in of_rank])


def main() -> None:
    """Measures all settings and prints tables."""
    options = harness.parser(__doc__ or "")
    options.add_argument("--moves", type=harness.at_least(1), default=6, help="of each setting")
    options.add_argument("--ranks", type=harness.at_least(2, harness.MAX_RANKS), default=2)
    options.add_argument("--hidden", type=harness.at_least(1024), default=2048)
    options.add_argument("--intermediate", type=harness.at_least(1), default=512)
    chosen = options.parse_args()
    rows, records = [], []
    sizes = {"hidden": chosen.hidden, "intermediate": chosen.intermediate}
    for held, side in SETTINGS:
        setting = Setting(held, side, chosen.moves, chosen.ranks, **sizes)
        found, is_shared = figures(setting)
        case = {"held": held, "side": side, "shared": is_shared}
        records += harness.records_of("moves", case, found)
        cells = []
        for metric in ("step", "of_memcpy", "switch"):
            if metric in found:
                cells += [
                    harness.marked(f"{found[metric]:.2f}", is_shared),
                    harness.interval_text(found, metric),
                ]
            else:
                cells += ["", ""]
        rows.append([setting.name, *cells, f"{found['switch_us']:,.0f}"])
    columns = ("weights, side", "step", "95 %", "of memcpy", "95 %", "switch / memcpy", "95 %", "switch, us")
    harness.print_table("Steps with a megabyte moved over steps without, and what moves", columns, rows)
    print(harness.SHARED_NOTE)
    rows = []
    for held in ("allocated", "adopted"):
        setting = Setting(held, "layer", chosen.moves, 2, layers=1, **sizes)
        found = link_figures(setting)
        records += harness.records_of("moves", {"held": held, "side": "layer", "servers": 2}, found)
        rows.append([held, f"{found['of_link']:.2f}", harness.interval_text(found, "of_link")])
    title = f"Between two servers, what came over what a link of {LINK_GB_PER_S} GB/s has beside rows"
    harness.print_table(title, ("weights", "of the link", "95 %"), rows)
    harness.write_records(chosen.json, records)


if __name__ == "__main__":
    harness.run_main(main)
