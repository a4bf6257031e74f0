"""A combine of one rank in parts, launch by launch: each part's tokens are checked when it has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from moe_triton.core.records import PART_PROGRESS

from .case import Routing, WrongResultError, check_reports
from .memory import Guarded

if TYPE_CHECKING:
    from .driver import World


class CombineInParts:
    """What a rank keeps between the launches of a combine.

    Args:
        world: all ranks.
        rank: this one.
        number: of the combine.
        zone: of the combine.
    """

    def __init__(self, world: World, rank: int, number: int, zone: int) -> None:
        self.world, self.rank, self.number, self.zone = world, rank, number, zone
        self.tokens = world.case.tokens[rank]
        self.num_parts = max(1, -(-self.tokens // world.case.part_tokens))
        self.pending = Guarded((self.tokens,), np.int64)
        self.ready = Guarded((self.tokens,), np.int32)
        self.bounds = Guarded((2 * self.num_parts,), np.int32)
        self.progress = Guarded((world.case.blocks, PART_PROGRESS.num_words), np.int32, align=64)
        self.waited = world.times(self.tokens * world.config.num_results_per_token)

    def places(self, part: int) -> slice:
        """Of a part, in the list of tokens."""
        first, last = (self.tokens * p // self.num_parts for p in (part, part + 1))
        return slice(first, last)

    def run(
        self,
        rows: np.ndarray,
        received: dict[str, np.ndarray],
        routing: Routing,
        straggle: bool = False,
        **changes: object,
    ) -> None:
        """All parts."""
        for part in range(self.num_parts):
            check_reports(self.launch(part, rows, received, routing, **changes))
            if straggle:
                time.sleep(0.001)
            self.check(part, routing)
        if sorted(self.ready.array.tolist()) != list(range(self.tokens)):
            raise WrongResultError(f"tokens {self.ready.array.tolist()} are ready")
        self.world.check_number(self.rank, self.number, self.zone)
        self.world.check_times(self.waited, of_results=True)

    def launch(
        self,
        part: int,
        rows: np.ndarray,
        received: dict[str, np.ndarray],
        routing: Routing,
        **changes: object,
    ) -> np.ndarray:
        """The phases of one part. Returns the report of the last one."""
        world, c, case = self.world, self.world.config, self.world.case
        of_part: dict[str, object] = {
            "part": part,
            "num_parts": self.num_parts,
            "part_tokens": case.part_tokens,
            "progress": self.progress.array,
        }
        report = changes.pop("report", None)
        check_reports(world.send_results(self.rank, rows, received, self.zone, **of_part, **changes))
        arguments: dict[str, object] = {
            **of_part,
            "rows": rows,
            "row_bytes": case.result_bytes,
            "origins": received["origins"],
            "recv_offsets": received["offsets"],
            "num_entries": c.experts_on(self.rank) * c.num_ranks,
            "capacity": len(rows),
            **world.placed(self.rank, rows),
            **world.masks,
            "num_ranks": c.num_ranks,
            "num_shared_ranks": c.num_shared_ranks,
            "kept_rank": -1,
            "window": world.windows[self.rank].bytes,
            "topk_idx": routing.ids,
            "active_index": routing.active_index if case.inactive else 0,
            "waited_us": self.waited.array if self.waited else 0,
            "is_timed": int(case.timed),
            "num_tokens": self.tokens,
            "topk": c.num_topk,
            "num_experts": c.num_experts,
            "num_shared_experts": c.num_shared_experts,
            "pending": self.pending.array,
            "ready_tokens": self.ready.array,
            "first_part": part,
            "bounds": self.bounds.array[2 * part : 2 * part + 2],
            "zone": self.zone,
            "numbers": world.numbers[self.rank].array,
            "timeout_us": case.timeout_us,
            "slots": world.layout.combine_slots,
            "status": world.layout.combine_status,
        }
        if report is not None:
            arguments["report"] = report
        found = world.library.launch("combine_ready", case.blocks, **arguments)
        for kept in (self.pending, self.ready, self.progress, self.bounds):
            kept.check_guards()
        return found

    def check(self, part: int, routing: Routing) -> None:
        """The results of a part's tokens are all there, and nothing else waits for them."""
        places = self.places(part)
        if self.bounds.array[2 * part : 2 * part + 2].tolist() != [places.start, places.stop]:
            raise WrongResultError(f"part {part} has places {self.bounds.array.tolist()}")
        tokens = self.ready.array[self.places(part)].tolist()
        if len(set(tokens)) < len(tokens) or not all(0 <= token < self.tokens for token in tokens):
            raise WrongResultError(f"part {part} has the tokens {tokens}")
        self.world.check_results(self.rank, self.number, self.zone, routing, tokens)
        if (self.pending.array[tokens] != -1).any():
            raise WrongResultError(f"part {part}: {self.pending.array[tokens].tolist()} results pending")
