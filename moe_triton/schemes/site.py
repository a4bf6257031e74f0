"""What every plan of one rank is built from: the group's settings, this rank's place, memory in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from moe_triton.core.config import Config
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Hole, Launch, Part, Stream, Value, launch
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.core.tuning import Tuning
from moe_triton.kernels.zones import turn_kernel
from moe_triton.layout import UB_ALIGN, ExchangeLayout, Layout, SlotLayout, align
from moe_triton.schemes import make_scheme

if TYPE_CHECKING:
    from moe_triton.schemes.scheme import Scheme

BLOCK_QUANTIZE_ELEMENTS = 8
Scratch = dict[str, tuple[int, torch.dtype]]
Operator = Literal["dispatch", "combine", "barrier"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine", "barrier")
ZONE_BYTES = 4  # of one operator's zone, in device memory
# Call words that this rank keeps for itself, in "call_words": a cache line for each.
COMBINE_KIND, DISPATCH_WORD = Hole("call_words", 0), Hole("call_words", 64)
CALL_WORDS = 32


class Peers(NamedTuple):
    """The ranks that reach a window of this rank.

    Attributes:
        num_ranks: how many, this one included.
        rank: this rank's number among them.
        group: of which group they are.
        prefix: of the holes that plans find the window by: ``{prefix}window``, this rank's bytes;
            ``{prefix}peers``, each rank's address; ``{prefix}peer_offsets``, elements of 16 bits from this
            rank's to each.
        calls: what call words say of their flags; "" for the operator.
    """

    num_ranks: int
    rank: int
    group: Literal["expert", "tensor"] = "expert"
    prefix: str = ""
    calls: str = ""


@dataclass(frozen=True)
class Site:
    """Where plans run.

    Attributes:
        config: the group's settings.
        rank: this rank.
        num_blocks: blocks per kernel.
        timeout_us: deadline of each wait, in microseconds.
        target: what the Triton kernels are specialised for: the back end's name.
        exchange_rank: this rank's number among two tensor-parallel ranks, or None.
        tuning: how operators are cut into parts.
    """

    config: Config
    rank: int
    num_blocks: int
    timeout_us: int
    target: str
    exchange_rank: int | None = None
    tuning: Tuning = field(default_factory=Tuning)

    @cached_property
    def scheme(self) -> Scheme:
        """How tokens travel."""
        return make_scheme(self)

    @property
    def layout(self) -> Layout:
        """Where things lie in the scheme's own window."""
        return self.scheme.layout

    @property
    def zones_on_device(self) -> bool:
        """See `RoundFacts`."""
        return self.scheme.rounds.on_device

    @property
    def keeps_own(self) -> bool:
        """See `Scheme`."""
        return self.scheme.keeps_own

    def zone_cell(self, operator: Operator) -> Hole:
        """Where an operator's zone stands."""
        shared = self.scheme.rounds.shared
        sharing = shared if operator in shared else {operator}
        return Hole("zones", ZONE_BYTES * min(OPERATORS.index(other) for other in sharing))

    def zone_of(self, operator: Operator, zone: int) -> dict[str, Value]:
        """How an Ascend C kernel finds an operator's zone."""
        return {"zone": zone, "zone_at": self.zone_cell(operator) if self.zones_on_device else 0}

    def zone_in_memory(self, operator: Operator, stride: int) -> dict[str, Value]:
        """How a Triton kernel that is given zone 0 finds the right one, ``stride`` elements from it."""
        return {"zone": self.zone_cell(operator), "zone_stride": stride}

    def turn(self, operator: Operator) -> list[Launch]:
        """The end of an operator, where zones are in device memory."""
        if not self.zones_on_device:
            return []
        return [launch("turn", turn_kernel(), "compute", 1, zone=self.zone_cell(operator))]

    @cached_property
    def exchange(self) -> ExchangeLayout:
        """Where things lie in the window between tensor-parallel ranks."""
        c = self.config
        return ExchangeLayout(c.hidden, c.receive_capacity(self.rank), c.num_ranks)

    @property
    def peers(self) -> Peers:
        """The expert-parallel group."""
        return Peers(self.config.num_ranks, self.rank)

    @property
    def exchange_peers(self) -> Peers:
        """The two tensor-parallel ranks."""
        assert self.exchange_rank is not None
        return Peers(2, self.exchange_rank, "tensor", "exchange_", "tensor-parallel exchange")

    @property
    def overlaps(self) -> bool:
        """Whether computing and communicating have blocks of their own."""
        return self.tuning.communication_blocks > 0

    def blocks(self, stream: Stream, parts: int) -> int:
        """Blocks of a launch that is one of ``parts``."""
        if parts == 1 or not self.overlaps:
            return self.num_blocks
        communication = self.tuning.communication_blocks
        return communication if stream == "communication" else self.num_blocks - communication

    @property
    def num_local_experts(self) -> int:
        """Experts whose rows this rank receives."""
        return self.config.experts_on(self.rank)

    @property
    def first_expert(self) -> int:
        """The first of this rank's routed experts."""
        return (self.rank - self.config.num_shared_ranks) * self.config.num_local_experts

    @property
    def num_entries(self) -> int:
        """Status entries that a dispatch waits for."""
        return self.num_local_experts * self.config.num_ranks

    @property
    def capacity(self) -> int:
        """Rows that a dispatch can deliver here."""
        return self.config.receive_capacity(self.rank)

    @property
    def is_version_1(self) -> bool:
        """Whether V1's rules hold."""
        return self.config.version == 1

    @property
    def keeps_own_tokens(self) -> bool:
        """Whether this is a rank of V1's shared expert: it reports its own tokens split into pieces."""
        return self.is_version_1 and self.config.is_shared_rank(self.rank)

    @property
    def quantized_row_bytes(self) -> int:
        """Bytes of a row quantised in blocks: int8, then a 16-bit scale per block."""
        hidden = self.config.hidden
        scales = 2 * (hidden // BLOCK_QUANTIZE_ELEMENTS)
        return align(hidden, UB_ALIGN) + align(scales, UB_ALIGN)

    def scratch(self) -> Scratch:
        """Elements and dtype of what plans keep between their launches, by the name of its hole."""
        c = self.config
        tokens, results = c.num_max_tokens_per_rank, c.num_results_per_token
        packed = max(SlotLayout.of(c.hidden, r, torch.bfloat16).packed_bytes for r in QUANTIZED.values())
        i32 = torch.int32
        return {
            "counts": (c.num_experts, i32),
            "recv_counts": (self.num_entries, i32),
            "true_offsets": (self.num_entries, i32),
            "barrier_counts": (c.num_ranks, i32),
            "reduced_counts": (2, i32),
            "packed": (tokens * packed, torch.uint8),
            "packed_results": (tokens * results * packed, torch.uint8),
            "masked_ids": (tokens * c.num_topk, i32),
            "active": (tokens, i32),
            "num_active": (1, i32),
            "shared_ranks": (tokens * c.num_shared_experts, i32),
            "shared_slots": (tokens, i32),
            "shared_counts": (c.num_shared_ranks, i32),
            "waited": (max(self.num_entries, tokens * results), i32),
            "quantized_rows": (self.capacity * self.quantized_row_bytes, torch.uint8),
            "reduced_rows": (self.capacity * c.hidden, torch.int16),
            "return_origins": (3 * self.capacity, i32),
            "sums": (tokens * c.hidden, torch.float32),
            "packed_scales": (tokens * results, torch.float32),
            "starts": (c.num_shared_ranks + c.num_experts, i32),
            "places": (tokens * c.num_topk, i32),
            "shared_places": (tokens * c.num_shared_experts, i32),
            "result_offsets": (tokens * results, torch.int64),
            "alphas": (2 * tokens * c.num_topk, torch.float32),
        }


def tokens_of(part: int, parts: int) -> tuple[Value, Value]:
    """First token of a part, and how many it has."""
    return Part("num_tokens", 0, part, parts), Part("num_tokens", 0, part, parts, is_count=True)


def launch_matching(
    step: str, kernel: TritonKernel | AscendCKernel, stream: Stream, blocks: int, values: dict[str, Value]
) -> Launch:
    """A launch of a kernel that comes in variants, from values for the arguments of all of them."""
    wanted = {arg.name: values[arg.name] for arg in kernel.args}
    return launch(step, kernel, stream, blocks, **wanted)
