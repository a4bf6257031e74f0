"""`Scheme`: all that the rest of the package may ask about how tokens travel (docs/schemes.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from moe_triton.core import traffic
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import RANKS_PER_SERVER
from moe_triton.core.plan import Launch, Phases, Placeholder, Plan
from moe_triton.core.reach import Queues
from moe_triton.core.records import TRAFFIC
from moe_triton.core.region import Region
from moe_triton.core.row_formats import QUANTIZED, RowFormat
from moe_triton.core.space import Space
from moe_triton.core.tuning import usual_on_cpu
from moe_triton.layout import NUM_ZONES, Layout, SlotLayout
from moe_triton.limits.formula import Formula
from moe_triton.limits.rule import RuleSet
from moe_triton.operators.variants import DispatchVariant, Variant
from moe_triton.schemes.common.waits import ENTRY_FINDERS, Finder, arguments_of
from moe_triton.schemes.rank_context import COUNTED, Peers, RankContext, RoundFacts, SchemeFacts

# Choices of `Scheme.space`.
BLOCKS = (1, 2, 4)
CACHED_BYTES = (0, 1 << 18, 1 << 22)
SPINS, YIELDS = (0, 50, 1000), (0, 20, 200, 2000)
Output = Literal["rows", "results"]
Bindings = Mapping[str, Any]
ONE_SERVER = "Make a group of each server's ranks."
OTHER_OR_ONE_SERVER = "Use comm_alg='fullmesh_v1', or make a group of each server's ranks."


class Scratch(NamedTuple):
    """Memory of one placeholder.

    Attributes:
        elements: how many.
        dtype: of each.
        is_zeroed: whether they are zero at first.
    """

    elements: int
    dtype: torch.dtype = torch.int32
    is_zeroed: bool = False


class WindowSpec(NamedTuple):
    """A window that a scheme needs on this rank.

    Attributes:
        window_bytes: what the rank allocates.
        data_bytes: what HCCL_BUFFSIZE has to cover.
        peers: who reaches it, and the names of its placeholders.
        queues: to peers that are not written to directly; None for none.
    """

    window_bytes: int
    data_bytes: int
    peers: Peers
    queues: Queues | None = None


class Refusal(NamedTuple):
    """Why a scheme lacks a feature, and what to do instead, for an `ArgumentError`."""

    rule: str
    remedy: str


CONST_ARGUMENTS = "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"
REFUSED_ON_A2: Mapping[str, Refusal] = {
    "tp_group": Refusal("A2 has no tensor parallelism", "Leave it out, or use product='A3'."),
    **dict.fromkeys(CONST_ARGUMENTS, Refusal("A2 has no constant experts", "Leave it out.")),
}


class KeptTables(ABC):
    """What a dispatch keeps for its combine in an int32 tensor, and what combine is held to for it.

    It is asked where the host reads tensors: elsewhere kernels keep all that combine reads.

    Attributes:
        num_words: of the tensor.
    """

    num_words: int

    @abstractmethod
    def keep(self, bindings: Bindings) -> None:
        """Keeps what the host has for a combine, before a dispatch runs.

        Args:
            bindings: what the dispatch's placeholders hold, the tensor among them
                (`moe_triton.operators.buffer.TABLES`).
        """

    @abstractmethod
    def check(self, bindings: Bindings, called: Mapping[str, str]) -> None:
        """Checks that a combine is given what its dispatch left.

        Args:
            bindings: what the combine's placeholders hold, outputs aside.
            called: what its caller calls that, by placeholder; placeholders that it does not name are not
                looked at.

        Raises:
            ArgumentError: it is not. Nothing was sent.
        """

    @abstractmethod
    def empty(self, tables: torch.Tensor) -> torch.Tensor:
        """Tables of the same size, of a dispatch in which a rank has passed nothing on."""

    def mark_lost(  # noqa: B027
        self,
        bindings: Bindings,
        rank: int,
        is_masked: Callable[[int], bool],
        is_lost_relay: Callable[[int], bool],
        ran: Sequence[Phases] = (),
    ) -> None:
        """Takes out what will not come any more, before a combine runs or in its middle.

        Args:
            bindings: what the combine's placeholders hold.
            rank: whose combine it is.
            is_masked: of a rank.
            is_lost_relay: whether a rank passes nothing on, nor another one in its place.
            ran: launches of it that have run.
        """


class Scheme(SchemeFacts):
    """A scheme on one rank. The defaults are what most schemes have.

    Args:
        context: the rank.
    """

    refuses: ClassVar[Mapping[str, Refusal]] = {}
    """What it cannot do: "torch_npu", its functions; "torch_npu halves", setup and teardown among them;
    "several servers", reach ranks of other servers; "several scales", rows with more than one; "shared
    experts", ranks of their own for them, on A3; "rounds", dispatches whose rows have places, as those in
    rounds.
    """
    takes: ClassVar[frozenset[str]] = frozenset()
    """What it takes of the arguments that not every scheme does (`TensorArgument.by_scheme`), by name."""
    finders: ClassVar[Mapping[str, Finder]] = ENTRY_FINDERS
    """How whom a wait is for is found, by the name of the kernel that waits."""
    goes_on: ClassVar[frozenset[str]] = frozenset()
    """Operators in whose runs ranks may be masked: the others' rows and results come to the right places."""
    marks_in_handle: ClassVar[bool] = False
    """Whether only a handle says, behind a combine, what it was summed without."""
    goes_on_in_rounds: ClassVar[bool] = True
    """Whether that holds for the rounds of a call, too."""
    recounts: ClassVar[bool] = False
    """Whether blocks of a dispatch see counts of one source each by itself, or find places by what each has
    seen of all: where ranks were masked meanwhile, counts are taken back, and places are found anew (phase
    "mend")."""
    relay_share: ClassVar[float] = 1.0
    """How much of the time-out its kernels wait at least: those that tell others for whom they waited give up
    before these do."""
    posts_are_loose: ClassVar[bool] = False
    """Whether messages of a queue may overtake each other (`Queues.is_loose`)."""
    sends_by_all_counts: ClassVar[bool] = False
    """Whether a dispatch sends rows to places that follow from everybody's counts, so that all ranks go by
    the same masks in it or repeat it (`moe_triton.runtime.repeated_dispatch`)."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """Fields of `Tuning` that not every scheme has, as "posts" and "post_parts"."""
    rules: ClassVar[Mapping[int, RuleSet]] = {}
    """Limits besides its product's, by version of the operators."""
    formulas: ClassVar[Mapping[int, tuple[Formula, ...]]] = {}
    """What is published of the bytes that it needs, by version; without one what its layout takes counts."""
    between_servers: ClassVar[bool] = False
    """Whether it is its product's way between servers, which HCCL's switches make the default (`core.hccl`).
    A group inside one server has the product's first scheme instead.
    """
    crosses_servers: ClassVar[bool] = False
    """Whether it reaches ranks of other servers, where ``refuses`` does not say why not."""
    compares_super_nodes: ClassVar[bool] = False
    """Whether the ranks of a server must name one super node to HCCL (`core.hccl.LOGIC_SUPERPOD_ID`)."""
    plans: ClassVar[Mapping[type[Variant], Callable[..., Any]]]
    """What builds the plans of variants: called with the rank's context, one of them, a zone and a number of
    parts, it gives an object whose ``whole()`` is the plan of the operator, and whose ``setup()`` and
    ``teardown()`` are those of halves.
    """
    sums_alike: ClassVar[bool] = True
    """Whether combine's sums have the bits of the product's other schemes: then any may stand for it."""

    @property
    def sends_ahead(self) -> bool:
        """Whether rows of a round may be sent before the one before it is arranged."""
        return False

    @property
    def relays(self) -> bool:
        """Whether ranks hear of others through ranks of their own server."""
        return False

    @property
    def sums_placed(self) -> bool:
        """Whether a combine takes results from the places that rows of its dispatch had, without a copy."""
        return False

    def __init__(self, context: RankContext) -> None:
        self.context = context.of(self)

    @classmethod
    def space(cls, config: Config, capabilities: Capabilities, cores: int) -> Space:
        """The settings of a rank that change how long its operators take, which `autotune` searches.

        Args:
            config: the group's settings.
            capabilities: of the back end.
            cores: that a rank's blocks run on, on a CPU those of the machine.

        Returns:
            Values by the names of `Tuning`'s fields, and "num_blocks"; of a word its number among its
            choices. `usual` says which of them a rank has by itself. Here, blocks; on a CPU how rows are
            copied and flags waited for as well.
        """
        if capabilities.owns_cores:
            return Space({"num_blocks": (max(1, cores // 2), cores)}, usual={"num_blocks": cores})
        blocks = tuple(count for count in BLOCKS if count <= max(1, cores))
        copies = {"cached_bytes": CACHED_BYTES, "spins": SPINS, "yields": YIELDS}
        return Space({"num_blocks": blocks, **copies}, usual=usual_on_cpu(config.num_ranks, cores))

    @staticmethod
    @abstractmethod
    def layout_of(config: Config) -> Layout:
        """What lies where in the scheme's own window, the same on every rank."""

    @staticmethod
    def tables_of(config: Config) -> KeptTables | None:
        """What its dispatch keeps for combine besides `recv_offsets`, on the rank itself; None for nothing.

        With it combine takes dispatch's weights and no others: they have been summed with elsewhere.
        """
        return None

    def whole(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """The plan of an operator.

        Args:
            variant: what it is specialised for.
            zone: that it is built for; 0 where kernels look it up.
            parts: that its tokens are cut into.
        """
        plan: Plan = self.plans[type(variant)](self.context, variant, zone, parts).whole()
        return plan

    def phase(self, name: str, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """The plan of one phase of an operator in rounds.

        Args:
            name: a method of what builds its plans: "ask", "ring", "place", "routing", "announce",
                "starts", "restart", "round", "count", "entries", "fill", "fill_ahead", "late_fill" or
                "local_counts" of a dispatch, "gather" of a combine; "mend" and "recount" where `recounts`,
                "recall" where `sends_by_all_counts`; "pass_on" of both where `relays`.
            variant: what it is specialised for.
            zone: that it is built for; 0 where kernels look it up.
            parts: that its tokens are cut into.
        """
        plan: Plan = getattr(self.plans[type(variant)](self.context, variant, zone, parts), name)()
        return plan

    def barrier(self, zone: int, timeout_us: int | None = None) -> Plan:
        """A flag to every rank, and the wait for every rank's; None for the context's deadline."""
        from moe_triton.schemes.common.steps import barrier_plan  # kernels come with a buffer, not before

        return barrier_plan(self.context, self.layout.barrier_status, zone, timeout_us)

    @cached_property
    def layout(self) -> Layout:
        """Tells what lies where in the scheme's own window, the same on every rank."""
        return self.layout_of(self.context.config)

    @cached_property
    def windows(self) -> tuple[WindowSpec, ...]:
        """Every window that this rank needs; `layout` is the first one's."""
        sizes = self.layout.window_bytes, self.layout.data_bytes
        return (WindowSpec(*sizes, self.context.peers, self.queues),)

    @property
    def queued_peers(self) -> frozenset[int]:
        """Names the ranks that this one reaches by a queue: those of other servers."""
        config = self.context.config
        return frozenset(range(config.num_ranks)) - frozenset(config.topology.neighbours(self.context.rank))

    @property
    def queues(self) -> Queues | None:
        """Those to `queued_peers`, if there are any."""
        peers = self.queued_peers
        servers = self.context.config.topology.servers
        return Queues(peers, servers, self.layout.in_bytes, self.posts_are_loose) if peers else None

    @cached_property
    def rounds(self) -> RoundFacts:
        """Its zones, and which of its operators wait for every rank."""
        return RoundFacts(on_device=self.context.capabilities.captures_graphs)

    def place(self, output: Output, itemsize: int) -> Region | None:
        """Where (A, H) elements of an output lie in this rank's window; None for a tensor of its own.

        Args:
            output: "rows" of dispatch, or "results" that combine takes.
            itemsize: bytes of an element.
        """
        return None

    def left_out(self, memory: Mapping[str, Any]) -> frozenset[int]:
        """Masked ranks whose results are not in what others have summed for this rank, in its last combine.

        Args:
            memory: what placeholders hold.
        """
        return frozenset()

    def received(self, variant: DispatchVariant) -> tuple[Region, ...]:
        """What of each received row lies in the window, where it `sends_by_all_counts`."""
        return ()

    def peers_of(self, launch: Launch) -> Peers:
        """Who reaches the window that a launch looks at."""
        placeholder = arguments_of(launch).get("window")
        name = placeholder.name if isinstance(placeholder, Placeholder) else "window"
        return next(spec.peers for spec in self.windows if f"{spec.peers.prefix}window" == name)

    def scratch(self) -> dict[str, Scratch]:
        """What its plans keep between their launches, by the name of its placeholder; only what they use is
        made.

        Here, what more than one scheme keeps: most of it in `schemes.common`'s steps.
        """
        context, c = self.context, self.context.config
        tokens, results = c.num_max_tokens_per_rank, c.num_results_per_token
        packed = max(SlotLayout.of(c.hidden, r, torch.bfloat16).packed_bytes for r in QUANTIZED.values())
        of_packed = {
            "packed": Scratch(tokens * packed, torch.uint8),
            "packed_results": Scratch(tokens * results * packed, torch.uint8),
        }
        # Of calls in rounds: of each zone, where a round is packed before the one ahead of it is arranged.
        zones = range(self.rounds.num_zones if self.sends_ahead else 0)
        of_packed |= {f"{name}_{zone}": scratch for name, scratch in of_packed.items() for zone in zones}
        counters = len(COUNTED) * context.num_blocks * TRAFFIC.num_words
        return {
            **of_packed,
            "counts": Scratch(c.num_experts),
            "recv_counts": Scratch(context.num_entries),
            "all_counts": Scratch(context.num_entries),
            "row_slots": Scratch(context.capacity),
            "true_offsets": Scratch(context.num_entries),
            "barrier_counts": Scratch(c.num_ranks),
            "reduced_counts": Scratch(2),
            "active_ids": Scratch(tokens * c.num_topk),
            "active_index": Scratch(tokens),
            "num_active": Scratch(1),
            "shared_ranks": Scratch(tokens * c.num_shared_experts),
            "shared_slots": Scratch(tokens),
            "shared_counts": Scratch(c.num_shared_ranks),
            "waited": Scratch(max(context.num_entries, tokens * results)),
            "reduced_rows": Scratch(context.capacity * c.hidden, torch.int16),
            "sums": Scratch(tokens * c.hidden, torch.float32),
            "result_offsets": Scratch(tokens * results, torch.int64),
            "round_numbers": Scratch(NUM_ZONES * len(COUNTED), is_zeroed=True),
            traffic.PLACEHOLDER: Scratch(counters, torch.int64, is_zeroed=True),
        }

    def workspace_bytes(self, *variants: Variant) -> int:
        """Private bytes between the kernels of operators, without making anything."""
        needed = self.scratch()
        placeholders = {
            placeholder for variant in variants for placeholder in self.whole(variant, 0).placeholders
        } & needed.keys()
        return sum(
            needed[placeholder].elements * needed[placeholder].dtype.itemsize for placeholder in placeholders
        )

    @classmethod
    def check_offers(cls, feature: str, argument: str, value: object) -> None:
        """Checks that the scheme has a feature.

        Raises:
            ArgumentError: it does not.
        """
        if feature in cls.refuses:
            raise ArgumentError(argument, value, *cls.refuses[feature])

    @classmethod
    def check_rows(cls, row_format: RowFormat) -> None:
        """Checks that dispatched rows can travel so.

        Raises:
            ArgumentError: they cannot.
        """
        if row_format.elements_per_scale:
            cls.check_offers("several scales", "quantize", repr(row_format.name))

    @classmethod
    def no_masks(cls, config: Config) -> str:
        """Why ranks of a group cannot be masked; empty if they can.

        Args:
            config: of the group.
        """
        return ""

    @classmethod
    def check_reaches(cls, config: Config) -> None:
        """Checks that ranks reach each other, on whatever servers they are.

        Args:
            config: one that keeps every rule.

        Raises:
            ArgumentError: there are several servers, and the scheme only works inside one.
        """
        if config.topology.num_servers == 1:
            return
        servers = list(config.topology.sizes)
        cls.check_offers("several servers", RANKS_PER_SERVER, servers)
        if not cls.crosses_servers:
            rule = f"with comm_alg={config.scheme!r} ranks write to memory that only those of a server share"
            raise ArgumentError(RANKS_PER_SERVER, servers, rule, ONE_SERVER)


class SplitScheme(Scheme):
    """A scheme whose operators run in halves as well: up to their flags, and from the wait on."""

    def setup(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """The plan up to and including the flags; only a dispatch is cut into parts."""
        plan: Plan = self.plans[type(variant)](self.context, variant, zone, parts).setup()
        return plan

    def teardown(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """The plan from the wait on; only a combine is cut into parts."""
        plan: Plan = self.plans[type(variant)](self.context, variant, zone, parts).teardown()
        return plan
