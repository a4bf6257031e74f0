"""What ranks of several servers run in tests of A2's hierarchy, and what they compare."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, EPBuffer, Tuning, reference
from moe_triton.backends.cpu.nic import NicSettings, emulated_nic
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.core.config import Config
from moe_triton.core.region import Region
from moe_triton.core.row_formats import AS_THEY_ARE
from moe_triton.core.traffic import Traffic
from moe_triton.core.tuning import POSTS, Posts
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.reference.hierarchy import Tables, servers_of, tables
from moe_triton.schemes.hierarchy.layout import HierarchyLayout, RailSlot
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.tools.selftest.cases import difference, wrong_received
from tests.distributed.cases import Case, Inputs, experts_of, inputs_of, small_case
from tests.distributed.workers import by_turns, make_buffer
from tests.patience import seconds

TIMEOUT_S = seconds(3.0)
FAST = 1000.0  # GB/s
Limit = int | Literal["server 1"] | None


@dataclass(frozen=True)
class Relayed:
    """A case of a group of equal servers.

    Attributes:
        case: with its rounds.
        limit: servers that a token's experts lie in: at most so many, or only that one; None for any.
        nic: of every rank, each with a seed of its own.
        cached_bytes: of `Tuning`.
    """

    case: Case
    limit: Limit = None
    nic: NicSettings = field(default_factory=NicSettings)
    cached_bytes: int | None = None

    @property
    def config(self) -> Config:
        """Its group's."""
        return self.case.config

    def inputs(self, rank: int, number: int) -> Inputs:
        """What one rank brings to a round."""
        given = inputs_of(self.case, rank, number)
        return replace(given, topk_idx=self._limited(given.topk_idx, rank, number))

    def _limited(self, ids: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        if self.limit is None:
            return ids
        c = self.config
        servers = c.topology.num_servers
        generator = torch.Generator().manual_seed(1000 * number + rank)
        if isinstance(self.limit, int):
            order = torch.rand(len(ids), servers, generator=generator).argsort(1)[:, : self.limit]
        else:
            order = torch.full((len(ids), 1), min(1, servers - 1))
        allowed = torch.zeros(len(ids), servers).scatter(1, order, 1.0)
        scores = torch.rand(len(ids), c.num_experts, generator=generator) + 1
        scores *= allowed.repeat_interleave(c.num_experts // servers, 1)
        return scores.topk(c.num_topk).indices.int()

    @contextmanager
    def device(self, rank: int) -> Iterator[None]:
        """The rank's emulated NIC."""
        seed = self.nic.seed + 100 * rank if self.nic.seed else 0
        with emulated_nic(replace(self.nic, seed=seed)):
            yield

    def expected(self, number: int) -> Expected:
        """By the reference."""
        c = self.config
        everyone = [self.inputs(rank, number) for rank in range(c.num_ranks)]
        x, ids, weights = zip(*((i.x, i.topk_idx, i.topk_weights) for i in everyone), strict=True)
        received = reference.dispatch(c, x, ids, weights, quantize=self.case.quantize)
        y = [experts_of(self.case, rank, r.tokens) for rank, r in enumerate(received)]
        sums = {
            name: reference.combine(c, y, received, ids, weights, comm_quant_mode=mode)
            for name, mode in ((None, 0), ("int8", 2))
        }
        return Expected(received, sums, tables(c, ids, weights))


@dataclass(frozen=True)
class Expected:
    """Of one round, by rank.

    Attributes:
        received: of dispatch.
        sums: of combine, by how results travel.
        tables: that dispatch keeps.
    """

    received: list[reference.Received]
    sums: dict[str | None, list[torch.Tensor]]
    tables: list[Tables]


def relayed(
    servers: int, cards: int, limit: Limit = None, nic: NicSettings | None = None, **changes: Any
) -> Relayed:
    """A small case of a group of equal servers, of an A2 unless ``product`` is another."""
    topk, most = changes.pop("topk", 3), changes.pop("max_tokens", 4)
    product = changes.pop("product", "A2")
    hidden, cached_bytes = changes.pop("hidden", None), changes.pop("cached_bytes", None)
    case = small_case(servers * cards, "hierarchy", **{"rounds": 3, **changes})
    config = replace(
        case.config,
        product=product,
        ranks_per_server=cards,
        num_topk=min(topk, case.config.num_experts),
        num_max_tokens_per_rank=most,
        hidden=hidden or case.config.hidden,
    )
    return Relayed(replace(case, config=config), limit, nic or NicSettings(), cached_bytes)


def make(
    of: Relayed,
    posts: Posts,
    message_tokens: int | None = None,
    return_pieces: int | None = None,
    **options: Any,
) -> EPBuffer:
    """Its buffer. Collective."""
    messages = {"message_tokens": message_tokens, "return_pieces": return_pieces}
    tuning = Tuning(posts=posts, cached_bytes=of.cached_bytes, **messages)
    return make_buffer(of.case, tuning=tuning, **options)


def compare(rank: int, num_ranks: int, cases: Sequence[Relayed]) -> list[str]:
    """Every case in both stages: what differs from the reference in any bit.

    Of that in which cores post, one case after the other has messages of 1 to 3 tokens, and other pieces,
    where there is another server to post to.
    """
    wrong = []
    for case, of in enumerate(cases):
        expected = by_turns(of.expected, of.case.rounds)
        servers = of.config.topology.num_servers
        for posts in POSTS:
            is_set = posts == "aiv" and servers > 1
            messages = (1 + case % 3, 1 + case % servers) if is_set else (None, None)
            # Sixteen ranks and what else runs have two cores between them: one may come very late.
            with of.device(rank), make(of, posts, *messages, timeout_s=seconds(120.0)) as buffer:
                for number, each in enumerate(expected):
                    found = _compare_round(buffer, of, number, each)
                    wrong += [f"case {case} by {posts}, round {number}: {what}" for what in found]
    return wrong


def _compare_round(buffer: EPBuffer, of: Relayed, number: int, expected: Expected) -> list[str]:
    inputs, rank = of.inputs(buffer.rank, number), buffer.rank
    output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, quantize=of.case.quantize)
    wrong = wrong_received(output, expected.received[rank])
    assert output.handle.tables is not None
    wrong += wrong_tables_of(of.config, rank, output.handle.tables, expected.tables[rank])
    y = experts_of(of.case, rank, output.tokens)
    for name, sums in expected.sums.items():
        got = buffer.combine(y, output.handle, inputs.topk_weights, comm_quantize=name)  # type: ignore[call-overload]
        text = difference(f"combined as {name}", got, sums[rank])
        wrong += [text] if text else []
    return wrong


def wrong_tables_of(config: Config, rank: int, found: torch.Tensor, expected: Tables) -> list[str]:
    """What a dispatch has kept otherwise than the reference, where it means anything."""
    parts = RelayTables(config)
    of = {name: parts.of(found, name) for name in parts.parts}
    tokens, goes = len(expected.outer_ids), expected.outer_ids >= 0
    servers, own = config.topology.num_servers, config.topology.servers[rank]
    by_place = [(own + place) % servers for place in range(servers)]
    counts = expected.received_from[by_place]
    pairs = [
        ("outer_ids", of["outer_ids"][:tokens], expected.outer_ids),
        ("outer_rows", of["outer_rows"][:tokens][goes], expected.outer_rows[goes]),
        ("outer_counts", of["outer_counts"], expected.sent_to.int()),
        ("rail_counts", of["rail_counts"], counts.int()),
    ]
    most, experts = config.num_max_tokens_per_rank, config.num_experts // servers
    for place, (server, count) in enumerate(zip(by_place, counts.tolist(), strict=True)):
        relay, rows = expected.inner[server], slice(place * most, (place + 1) * most)
        active = torch.where(torch.arange(most) < count, 0, -1).int()
        here = relay.inner_ids >= 0
        numbered = torch.where(here, relay.inner_ids + place * experts, -1).int()
        inner = {name: of[f"inner_{name}"][rows][:count] for name in ("ids", "positions", "weights")}
        pairs += [
            (f"inner_active_index of {server}", of["inner_active_index"][rows], active),
            (f"inner_ids of {server}", inner["ids"], numbered),
            (f"inner_positions of {server}", inner["positions"][here], relay.inner_positions[here]),
            (
                f"inner_weights of {server}",
                inner["weights"][here],
                relay.inner_weights.view(torch.int32)[here],
            ),
        ]
    return [text for name, have, want in pairs if (text := difference(name, have, want))]


def straggle(rank: int, num_ranks: int, of: Relayed, rounds: int) -> list[str]:
    """Many rounds with ranks that fall behind at random moments."""
    different = 6
    expected = by_turns(of.expected, different)
    late, wrong = random.Random(rank), []
    for posts in POSTS:
        with of.device(rank), make(of, posts) as buffer:
            for number in range(rounds):
                if late.randrange(4) == 0:
                    time.sleep(late.random() * 0.004)
                wrong += _compare_round(buffer, of, number % different, expected[number % different])
                if len(wrong) > 5:
                    break
    return wrong


# What is posted.


def traffic_of(
    rank: int, num_ranks: int, of: Relayed, posts: Posts, message_tokens: int | None = None
) -> tuple[Traffic, Traffic]:
    """Of a dispatch and its combine."""
    with of.device(rank), make(of, posts, message_tokens) as buffer:
        inputs = of.inputs(rank, 0)
        output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, quantize=of.case.quantize)
        buffer.combine(experts_of(of.case, rank, output.tokens), output.handle, inputs.topk_weights)
        found = buffer.traffic("dispatch"), buffer.traffic("combine")
        assert output.handle.traffic == found[0]
        assert found[0] is not None
        assert found[1] is not None
        return found[0], found[1]


def copies_of(of: Relayed) -> torch.Tensor:
    """(EP, S): tokens that each rank sends to each server, in round 0."""
    ranks = range(of.config.num_ranks)
    return torch.stack([servers_of(of.config, of.inputs(rank, 0).topk_idx).sum(0) for rank in ranks])


def passed_on_by(of: Relayed) -> torch.Tensor:
    """(EP, EP): rows that each rank passes on to each other one of its server, in round 0."""
    c = of.config
    rows = torch.zeros(c.num_ranks, c.num_ranks, dtype=torch.int64)
    for source in range(c.num_ranks):
        ids = of.inputs(source, 0).topk_idx.flatten()
        for receiver in (ids[ids >= 0] // c.num_local_experts).tolist():
            relay = next(
                rank
                for rank in c.topology.rail(source)
                if c.topology.servers[rank] == c.topology.servers[receiver]
            )
            rows[relay, receiver] += int(relay != receiver)
    return rows


# Failure.


def die_at(
    rank: int, num_ranks: int, of: Relayed, posts: Posts, victim: int, operator: str, steps: int
) -> tuple[tuple[int, ...], str, float]:
    """One rank dies after so many steps of an operator; what the others are told, by which call, and when."""
    inputs = of.inputs(rank, 0)
    with of.device(rank), make(of, posts) as buffer:
        one_round(buffer, of, inputs)  # kernels are compiled before anybody waits for so short a time
    with of.device(rank), make(of, posts, timeout_s=TIMEOUT_S) as buffer:
        for _ in range(2):  # a plan for either zone
            one_round(buffer, of, inputs)
        dist.barrier()  # nobody needs what has been posted until now
        began = time.monotonic()
        try:
            if rank == victim:
                if operator == "combine":
                    output = buffer.dispatch(*vars(inputs).values())
                    y = experts_of(of.case, rank, output.tokens)
                if steps:
                    _cut(buffer, operator, steps)
                    if operator == "dispatch":
                        buffer.dispatch(*vars(inputs).values())
                    else:
                        buffer.combine(y, output.handle, inputs.topk_weights)
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(2):
                one_round(buffer, of, inputs)
        except CommunicationTimeoutError as error:
            return error.missing_ranks, str(error), time.monotonic() - began
    return (), "nothing", 0.0


def one_round(buffer: EPBuffer, of: Relayed, inputs: Inputs) -> None:
    output = buffer.dispatch(*vars(inputs).values())
    buffer.combine(experts_of(of.case, buffer.rank, output.tokens), output.handle, inputs.topk_weights)


def _cut(buffer: EPBuffer, operator: str, steps: int) -> None:
    """Leaves the first steps of an operator's plans."""
    kind = DispatchVariant if operator == "dispatch" else CombineVariant
    executables = buffer._communicator._executables
    keys = executables.keys()
    for key in keys:
        if isinstance(key[0], kind):
            plan = executables.plan(key)
            executables.put(key, replace(plan, launches=plan.launches[:steps]))


# What is passed on before all has come.


@dataclass(frozen=True)
class Seen:
    """What a rank's window holds while a server's last token is under way.

    Attributes:
        is_over: the last token has come, and this says nothing.
        own_rows: rows from ranks of the own server have been passed on to this rank.
        own_entries: entries of all of them, too.
        slow_rows: rows from the slow server have.
    """

    is_over: bool
    own_rows: bool
    own_entries: bool
    slow_rows: bool


def held_back(rank: int, num_ranks: int, of: Relayed, posts: Posts, link_s: float, trace: str) -> Seen | None:
    """What rank 0 sees while the link of the last server takes so long for its ranks' tokens, in call 1."""
    c = of.config
    is_slow = c.topology.servers[rank] == c.topology.num_servers - 1
    token_bytes = RailSlot.of(c, AS_THEY_ARE, of.case.dtype).slot_bytes
    link, tokens = PacedLink(FAST), 1 if posts == "aiv" else None
    with (
        of.device(rank),
        paced(link) if is_slow else nullcontext(),
        make(of, posts, tokens, trace=trace) as buffer,
    ):
        inputs = of.inputs(rank, 0)
        one_round(buffer, of, inputs)  # kernels are there then, and the other zone is empty
        link.set(c.num_max_tokens_per_rank * token_bytes / link_s / 1e9)
        dist.barrier()
        with ThreadPoolExecutor(1) as threads:
            seen = threads.submit(_look_at, buffer, 0.85 * link_s) if rank == 0 else None
            one_round(buffer, of, inputs)
        return seen.result() if seen else None


def _look_at(buffer: EPBuffer, after_s: float) -> Seen:
    time.sleep(after_s)
    layout, c = buffer.layout, buffer.config
    assert isinstance(layout, HierarchyLayout)
    window = buffer._communicator._fixed["window"]

    def holds(region: Region, **place: int) -> bool:
        first = region.offset(zone=1, **place)
        return bool(window[first : first + 32].any())

    slow = c.topology.num_servers - 1
    of_server = {server: c.topology.ranks_on(server) for server in (0, slow)}
    rows = {
        server: [
            holds(layout.forward_slots, source=source, expert=expert, index=0)
            for source in sources
            for expert in range(c.num_local_experts)
        ]
        for server, sources in of_server.items()
    }
    entries = [
        holds(layout.token_counts, source=source, expert=expert)
        for source in of_server[0]
        for expert in range(c.num_local_experts)
    ]
    is_over = holds(layout.rail_flags, server=slow)
    return Seen(is_over, any(rows[0]), all(entries), any(rows[slow]))
