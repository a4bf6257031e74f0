"""Atlas A2's schemes in closed form. Only fullmesh has a plan (`autotune.model.clusters.posted`).

EP ranks are the cards of S servers with C cards each. What crosses servers goes by RDMA (RoCE), one network
port a card; what stays inside goes by HCCS. The schemes are CANN's, as published:

- fullmesh: one block of rows for each peer, one after the other in memory, and a post for each block by the
  AICPU, one post at a time. With several servers the peers of the own server are posted to as well, by RDMA;
  a single server is written to by the vector cores, over HCCS.
- hierarchy: a token goes once to each server that it has experts in, to the card with the same number there,
  which hands it on inside the server. Stage 2: AICPU posts, two items for each server (rows, and their flag),
  and the phases follow each other. Stage 3: vector cores post token by token, one core for each server, and
  rows are handed on while others arrive. Combine goes the other way: results are collected and summed inside
  the server, then one row for each token and server goes back. Stage 2 posts a server's rows when all of them
  are summed. In stage 3 a token's row is posted when that token is summed: results are copied to where the
  server's cards read them, by a core for each rank that they are for; then some cores read and sum them while
  others, one for each server, post what is summed (GM2IPC, SumToWindow and AlltoAllServerDispatch in
  ops-transformer's moe_distribute_combine_a2_layered.h).

Rows may be of sampled routing (`flows_of`) or means (`mean_flow`): nothing here has to be an integer. Steps
that overlap cost as in a pipeline: each its first item, and the longest of them the rest of its items. An
item of stage 3 is a message: one token, as published, or a run of neighbouring ones.

On a group they are priced for every rank, with drawn routing (`price`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autotune.model.clusters import fused
from autotune.model.clusters.cluster import Load, OperatorPoint, Point
from autotune.model.clusters.group import OPERATORS, Group
from autotune.model.constants import NETWORK, POST_AICPU, Machine
from autotune.model.cost import Cost
from autotune.model.kernel_costs import movement
from autotune.model.topology import RANKS_PER_NODE
from moe_triton.core.errors import ArgumentError

ROWS = "int8"
"""How dispatch's rows travel in Ascend's own operators, whose times the forms are held against."""


@dataclass(frozen=True)
class Form:
    """How tokens travel between servers.

    Attributes:
        relays: once to each server, where a card hands them on.
        posts_by_token: vector cores post them one by one, and rows are handed on while others arrive; else
            the AICPU posts blocks.
        tokens_per_message: neighbouring tokens that vector cores post at once.

    Raises:
        ArgumentError: messages without a token, or of several where the AICPU posts blocks.
    """

    relays: bool = False
    posts_by_token: bool = False
    tokens_per_message: int = 1

    def __post_init__(self) -> None:
        tokens = self.tokens_per_message
        if tokens < 1:
            raise ArgumentError("tokens_per_message", tokens, "it must be at least 1", "Pass 1 or more.")
        if tokens > 1 and not self.posts_by_token:
            rule = "only the stage whose vector cores post has messages of tokens"
            raise ArgumentError("tokens_per_message", tokens, rule, "Pass 1, or price 'hierarchy-aiv'.")


FORMS = {
    "fullmesh": Form(),
    "hierarchy": Form(relays=True),
    "hierarchy-aiv": Form(relays=True, posts_by_token=True),
}
SCHEMES = tuple(FORMS)
"""Stage 1; stage 2, posts from the AICPU; stage 3, posts from the vector cores."""


ITEMS_PER_SERVER = 2  # of a hierarchy that the AICPU posts for: the rows, and their flag
_GB_PER_S = 1e3  # bytes in a microsecond
_NETWORK = *NETWORK, POST_AICPU
_ROW_IDS_ALIGN = 8
_BYTES_PER_ID = 16


@dataclass(frozen=True)
class Flow:
    """Rows that one card moves in a dispatch; combine moves the same ones back.

    Attributes:
        card: its number in its server.
        server: its server's number.
        tokens: of this rank.
        sent: (EP,) rows to each rank, one for each of its experts.
        received: (EP,) rows from each rank.
        copies: (S,) tokens with experts in each server: rows of a hierarchy to there.
        arriving: (S,) the same from the card with this number in each server.
        relayed: (C,) rows that this card hands on to each card of its server.
        gathered: (C,) rows that each card of its server hands on to it.
    """

    card: int
    server: int
    tokens: float
    sent: np.ndarray
    received: np.ndarray
    copies: np.ndarray
    arriving: np.ndarray
    relayed: np.ndarray
    gathered: np.ndarray

    @property
    def is_single_server(self) -> bool:
        """Whether there is no network."""
        return self.copies.size == 1

    @property
    def reversed(self) -> Flow:
        """Combine's: what was received goes back."""
        return replace(
            self,
            sent=self.received,
            received=self.sent,
            copies=self.arriving,
            arriving=self.copies,
            relayed=self.gathered,
            gathered=self.relayed,
        )


def flows_of(ids: np.ndarray, experts: int, cards: int) -> list[Flow]:
    """What every rank of a group moves.

    Args:
        ids: (EP, T, K) experts.
        experts: M.
        cards: of a server.

    Raises:
        ArgumentError: ranks are no whole servers, or do not share the experts evenly.
    """
    ranks, tokens, _ = ids.shape
    if cards < 1 or ranks % cards:
        rule = f"servers of {cards} cards are filled by a multiple of that many ranks"
        raise ArgumentError("ranks", ranks, rule, "Pass a multiple.")
    if experts % ranks:
        raise ArgumentError(
            "experts", experts, f"they are shared evenly by {ranks} ranks", "Pass a multiple."
        )
    servers, source = ranks // cards, np.arange(ranks)[:, None, None]
    to = ids // (experts // ranks)
    sent = np.bincount((source * ranks + to).ravel(), minlength=ranks * ranks).reshape(ranks, ranks)
    goes = np.zeros((ranks, tokens, servers), bool)
    np.put_along_axis(goes, to // cards, values=True, axis=2)
    copies = goes.sum(axis=1)
    # By server and card of the source, then of the receiver: the relay has the source's card's number.
    relayed = sent.reshape(servers, cards, servers, cards).sum(axis=0)
    arriving = copies.reshape(servers, cards, servers)
    return [
        Flow(
            card,
            server,
            tokens,
            sent=sent[server * cards + card],
            received=sent[:, server * cards + card],
            copies=copies[server * cards + card],
            arriving=arriving[:, card, server],
            relayed=relayed[card, server],
            gathered=relayed[:, server, card],
        )
        for server in range(servers)
        for card in range(cards)
    ]


def mean_flow(servers: int, cards: int, tokens: float, topk: float, servers_per_token: float) -> Flow:
    """What a rank moves on average where all experts are alike.

    Args:
        servers: S.
        cards: C, of each.
        tokens: of each rank.
        topk: experts of a token.
        servers_per_token: distinct servers that a token's experts lie in.
    """
    ranks = servers * cards
    by_rank = np.full(ranks, tokens * topk / ranks)
    by_server = np.full(servers, tokens * servers_per_token / servers)
    by_card = np.full(cards, tokens * topk / cards)
    return Flow(0, 0, tokens, by_rank, by_rank, by_server, by_server, by_card, by_card)


def token_bytes(row_bytes: int, topk: int) -> int:
    """Bytes of a token on its way through a hierarchy's dispatch: its row, and flag, ids, weights and scales.

    16 bytes for each of its experts, whose number is rounded up to 8: the size of the published window.
    """
    return row_bytes + _BYTES_PER_ID * -(-topk // _ROW_IDS_ALIGN) * _ROW_IDS_ALIGN


def operator_cost(
    scheme: str,
    operator: str,
    flow: Flow,
    machine: Machine,
    *,
    row_bytes: float,
    token_bytes: float = 0,
    tokens_per_message: int = 1,
) -> Cost:
    """What one fused operator takes on one rank, from its begin until the last rank's rows are arranged.

    Args:
        scheme: one of `SCHEMES`.
        operator: "dispatch" or "combine".
        flow: dispatch's, for both.
        machine: with an RDMA port.
        row_bytes: of a row that goes to an expert's rank, or back.
        token_bytes: of a row between servers in a hierarchy; row_bytes if not given.
        tokens_per_message: neighbouring tokens that a vector core posts at once; 1 in other schemes than
            "hierarchy-aiv".

    Returns:
        Parts: "pack", "sync", "posts", "rdma", "hccs", "latency", "sum" and "arrange", those that the scheme
        has. Steps that overlap are shown without what others hide of them.

    Raises:
        ArgumentError: no such scheme or operator, a machine without a network, or messages that the scheme
            does not have.
    """
    if scheme not in SCHEMES:
        raise ArgumentError("comm_alg", repr(scheme), f"A2 has {list(SCHEMES)}", "Name one of them.")
    if operator not in OPERATORS:
        raise ArgumentError(
            "operator", repr(operator), f"it is one of {list(OPERATORS)}", "Name one of them."
        )
    if missing := [name for name in _NETWORK if name not in machine.constants]:
        rule = f"A2's schemes need a network, and an AICPU that posts: {', '.join(missing)}"
        raise ArgumentError("machine", machine.name, rule, "Pass A2's constants, or a report of one.")
    form = _form_of(scheme, tokens_per_message)
    used = flow if operator == "dispatch" else flow.reversed
    if not form.relays:
        return _fullmesh(operator, used, machine, row_bytes)
    relayed = _hierarchy_dispatch if operator == "dispatch" else _hierarchy_combine
    return relayed(form, used, machine, row_bytes, token_bytes or row_bytes)


def _form_of(scheme: str, tokens_per_message: int) -> Form:
    return replace(FORMS[scheme], tokens_per_message=tokens_per_message)


def phases(
    scheme: str,
    operator: str,
    call: fused.Call,
    flow: Flow,
    machine: Machine,
    tokens_per_message: int = 1,
) -> fused.Phases:
    """What a whole operator across servers takes on one rank, with int8 rows in dispatch.

    What its cores compute before they send is that of Ascend's operators inside a server.

    Args:
        scheme, operator, flow, machine, tokens_per_message: as in `operator_cost`.
        call: sizes.
    """
    is_dispatch = operator == "dispatch"
    row_bytes = call.slot_bytes if is_dispatch else 2 * call.hidden
    between = token_bytes(row_bytes, call.topk) if is_dispatch else row_bytes
    sizes = {"row_bytes": row_bytes, "token_bytes": between}
    cost = operator_cost(scheme, operator, flow, machine, **sizes, tokens_per_message=tokens_per_message)
    computing = fused.counting(call, machine) + fused.quantising(call, machine) if is_dispatch else 0.0
    return {"start": {"start": machine.fused_start_us, "cores": computing}, scheme: cost.parts}


def memory_us(num_bytes: float, machine: Machine) -> float:
    """Time of bytes read or written in a device's own memory, by all its cores."""
    return num_bytes / 2 / (machine.memcpy_gb_per_s * _GB_PER_S)


def _fullmesh(operator: str, flow: Flow, machine: Machine, row_bytes: float) -> Cost:
    me = flow.server * flow.relayed.size + flow.card
    out, back = np.delete(flow.sent, me) * row_bytes, np.delete(flow.received, me) * row_bytes
    parts = {"pack": memory_us(2 * flow.sent.sum() * row_bytes, machine), "sync": machine.sync_all_us}
    if flow.is_single_server:
        parts["hccs"] = max(movement.wire(machine, way.sum(), way.max(initial=0)) for way in (out, back))
        latency = machine.hop_node_us
    else:
        posts = machine.post_aicpu_us * out.size, machine.post_aicpu_us
        parts |= _overlapping({"posts": posts, "rdma": _wire(out, back, machine)})
        latency = machine.rdma_latency_us
    parts["latency"] = latency + machine.flag_latency_us
    return _cost(parts | _last_step(operator, flow, machine, row_bytes), float(out.sum()))


def _hierarchy_dispatch(form: Form, flow: Flow, machine: Machine, row_bytes: float, between: float) -> Cost:
    copies, arriving = _to_others(flow.copies, flow.server), _to_others(flow.arriving, flow.server)
    handed, hccs_us = _inside(flow, machine, row_bytes)
    relay = _by_message(hccs_us, flow.arriving, form)
    parts = {"pack": memory_us(2 * flow.tokens * between, machine), "sync": machine.sync_all_us}
    if flow.is_single_server:
        parts |= {"hccs": relay[0]}
    elif form.posts_by_token:
        parts |= _overlapping(_network(form, copies, arriving, between, machine) | {"hccs": relay})
    else:
        parts |= _overlapping(_network(form, copies, arriving, between, machine)) | {"hccs": relay[0]}
    parts["latency"] = _latency(flow, machine)
    sent = float(copies.sum() * between + handed * row_bytes)
    return _cost(parts | _last_step("dispatch", flow, machine, row_bytes), sent)


def _hierarchy_combine(form: Form, flow: Flow, machine: Machine, row_bytes: float, between: float) -> Cost:
    copies, arriving = _to_others(flow.copies, flow.server), _to_others(flow.arriving, flow.server)
    handed, hccs_us = _inside(flow, machine, row_bytes, reads=True)
    partial = flow.copies.sum()  # sums for the tokens of this card and of those with its number
    inside = {
        "hccs": hccs_us,
        "sum": memory_us((flow.gathered.sum() + partial) * row_bytes, machine),
    }
    parts = {"sync": machine.sync_all_us}
    if flow.is_single_server:
        parts |= inside | {"latency": _latency(flow, machine)}
        return _cost(parts, float(handed * row_bytes))
    network = _network(form, copies, arriving, between, machine)
    if form.posts_by_token:
        parts = {"pack": _copied(flow, machine, row_bytes), **parts}
        of_tokens = {name: _by_message(us, flow.copies, form) for name, us in inside.items()}
        parts |= _overlapping(of_tokens | network)
    else:
        parts |= inside | _overlapping(network)
    parts["latency"] = _latency(flow, machine)
    parts["sum"] += memory_us((flow.arriving.sum() + flow.tokens) * row_bytes, machine)
    return _cost(parts, float(copies.sum() * between + handed * row_bytes))


def _copied(flow: Flow, machine: Machine, row_bytes: float) -> float:
    """Results to where the server's cards read them, row by row, by a core for each rank that gets them."""
    cores = min(flow.sent.size, int(machine.cores))
    rows = max(of_core.sum() for of_core in np.array_split(flow.sent, cores))
    row = sum(copy(machine, row_bytes, cores) for copy in (movement.load_cycles, movement.store_cycles))
    return float(movement.us_of(machine, rows * row))


def _by_message(us: float, tokens: np.ndarray, form: Form) -> tuple[float, float]:
    """Time of a step over all tokens, and over those of one message."""
    return us, us * form.tokens_per_message / max(float(tokens.sum()), form.tokens_per_message)


def _network(
    form: Form, copies: np.ndarray, arriving: np.ndarray, between: float, machine: Machine
) -> dict[str, tuple[float, float]]:
    """Posts and wire time between servers: all of it, and that of one item."""
    if not form.posts_by_token:
        posts = machine.post_aicpu_us * ITEMS_PER_SERVER * copies.size, machine.post_aicpu_us
        return {"posts": posts, "rdma": _wire(copies * between, arriving * between, machine)}
    # A core for each server posts its tokens, one message after the other; a message with fewer is one too.
    messages = np.ceil(copies / form.tokens_per_message)
    one = movement.rdma_us(machine, form.tokens_per_message * between)
    total = max(
        movement.rdma_us(machine, way.sum() * between, np.ceil(way / form.tokens_per_message).sum())
        for way in (copies, arriving)
    )
    posts = machine.post_aiv_us * messages.max(initial=0), machine.post_aiv_us
    return {"posts": posts, "rdma": (total, one)}


def _wire(out: np.ndarray, back: np.ndarray, machine: Machine) -> tuple[float, float]:
    """RDMA of blocks of bytes: of the busier direction, and of its largest block, which may be the last."""
    busier = out if out.sum() >= back.sum() else back
    blocks = float((busier > 0).sum())
    total = movement.rdma_us(machine, float(busier.sum()), blocks)
    return total, movement.rdma_us(machine, float(busier.max(initial=0)), min(1.0, blocks))


def _overlapping(steps: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Steps that items pass one after the other: each takes its first item, the longest the rest as well.

    Args:
        steps: microseconds of all items, and of one.
    """
    ones = {name: min(total, one) for name, (total, one) in steps.items()}
    rests = {name: total - ones[name] for name, (total, _) in steps.items()}
    longest = max(rests, key=lambda name: rests[name])
    return {name: one + rests[name] * (name == longest) for name, one in ones.items()}


def _last_step(operator: str, flow: Flow, machine: Machine, row_bytes: float) -> dict[str, float]:
    """Rows out of the window into expert order, or the results of each token summed."""
    received = float(flow.received.sum())
    if operator == "dispatch":
        return {"arrange": memory_us(2 * received * row_bytes, machine)}
    return {"sum": memory_us((received + flow.tokens) * row_bytes, machine)}


def _latency(flow: Flow, machine: Machine) -> float:
    """Hops of the last row, and the poll that sees each of them."""
    inside = machine.hop_node_us + machine.flag_latency_us
    return inside if flow.is_single_server else inside + machine.rdma_latency_us + machine.flag_latency_us


def _inside(flow: Flow, machine: Machine, row_bytes: float, *, reads: bool = False) -> tuple[float, float]:
    """Rows that this card sends inside its server, and how long the wire takes for the busier direction."""
    out, back = (_to_others(rows, flow.card) * row_bytes for rows in (flow.relayed, flow.gathered))
    us = [movement.wire(machine, way.sum(), way.max(initial=0), reads=reads) for way in (out, back)]
    return float(_to_others(flow.relayed, flow.card).sum()), float(max(us))


def _to_others(rows: np.ndarray, own: int) -> np.ndarray:
    return np.delete(rows, own)


def _cost(parts: Mapping[str, float], sent: float) -> Cost:
    return Cost({name: float(us) for name, us in parts.items()}, sent=round(sent))


def price(
    group: Group, machine: Machine, ids: np.ndarray | None = None, tokens_per_message: int = 1
) -> Point:
    """What dispatch and combine take on the slowest rank.

    A server by itself is the same for all schemes: its cards reach each other's memory.

    Args:
        group: the group, of product A2; up to 8 ranks, or whole servers of 8.
        machine: that each rank is.
        ids: (EP, T, K) experts, if they are drawn already.
        tokens_per_message: see `operator_cost`.

    Raises:
        ArgumentError: no such scheme, a group of parts of servers, rows of another format, a routing that
            cannot be drawn, or messages that the scheme does not have.
    """
    if group.comm_alg not in SCHEMES:
        raise ArgumentError("comm_alg", repr(group.comm_alg), f"A2 has {list(SCHEMES)}", "Name one of them.")
    if group.quantize != ROWS:
        rule = f"A2's schemes are priced with rows as {ROWS}"
        raise ArgumentError("quantize", repr(group.quantize), rule, f"Pass {ROWS!r}.")
    ids = group.draw() if ids is None else ids
    load = Load.of(group, ids, machine)
    _form_of(group.comm_alg, tokens_per_message)  # refused for one server too, which has no messages
    if group.ranks <= RANKS_PER_NODE["A2"]:
        operators = _one_server(group, machine, ids, load)
    else:
        operators = _servers(group, machine, ids, load, tokens_per_message)
    return Point(group, operators, load.imbalance, tuple(range(group.ranks)))


def fastest(group: Group, machine: Machine, ids: np.ndarray | None = None) -> tuple[int, Point]:
    """How many tokens a message should carry, and what dispatch and combine take then.

    Of 1, 2, 3, 4, 6, 8, ... up to the group's tokens; 1 where messages are no tokens.

    Args:
        group, machine, ids: as in `price`.

    Raises:
        ArgumentError: see `price`.
    """
    ids = group.draw() if ids is None else ids
    points = {1: price(group, machine, ids)}
    if FORMS[group.comm_alg].posts_by_token:
        longer = sorted(first << doubled for first in (2, 3) for doubled in range(group.tokens.bit_length()))
        for tokens in longer:
            if tokens <= group.tokens:
                points[tokens] = price(group, machine, ids, tokens)
    return min(points.items(), key=lambda each: each[1].us)


def _one_server(group: Group, machine: Machine, ids: np.ndarray, load: Load) -> dict[str, OperatorPoint]:
    call, slowest = _call(group, load), int(load.received.argmax())
    phases_by_operator = {"dispatch": fused.dispatch(call, machine), "combine": fused.combine(call, machine)}
    return {
        operator: _point(group, machine, slowest, phases, load.most(operator, _row_bytes(operator, call)))
        for operator, phases in phases_by_operator.items()
    }


def _servers(
    group: Group, machine: Machine, ids: np.ndarray, load: Load, tokens_per_message: int
) -> dict[str, OperatorPoint]:
    call = _call(group, load)
    flows = flows_of(ids, group.num_experts, RANKS_PER_NODE["A2"])
    points: dict[str, OperatorPoint] = {}
    for operator in OPERATORS:
        of_ranks = [
            phases(group.comm_alg, operator, call, flow, machine, tokens_per_message) for flow in flows
        ]
        slowest = max(range(len(flows)), key=lambda rank: fused.total(of_ranks[rank]))
        most = (
            _most_sent(group, operator, call, flows, machine),
            _most_sent(group, operator, call, [flow.reversed for flow in flows], machine),
        )
        points[operator] = _point(group, machine, slowest, of_ranks[slowest], most)
    return points


def _most_sent(group: Group, operator: str, call: fused.Call, flows: list[Flow], machine: Machine) -> int:
    """Bytes that the rank sends that sends most."""
    rows = _row_bytes(operator, call)
    between = token_bytes(rows, group.topk) if operator == "dispatch" else rows
    return max(
        operator_cost(group.comm_alg, operator, flow, machine, row_bytes=rows, token_bytes=between).sent
        for flow in flows
    )


def _call(group: Group, load: Load) -> fused.Call:
    sizes = group.ranks, group.tokens, group.topk, group.num_experts, group.hidden
    return fused.Call("A2", *sizes, most_rows=float(load.received.max()))


def _row_bytes(operator: str, call: fused.Call) -> int:
    return call.slot_bytes if operator == "dispatch" else 2 * call.hidden


def _point(
    group: Group, machine: Machine, slowest: int, phases: fused.Phases, most: tuple[int, int]
) -> OperatorPoint:
    """One operator; a captured graph's launch is part of its start."""
    parts = movement.merged(*phases.values())
    if group.mode == "stream":
        parts = {"launch": machine.launch_stream_us, **parts}
    return OperatorPoint(sum(parts.values()), slowest, parts, *most)
