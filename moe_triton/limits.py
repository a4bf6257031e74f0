"""The rules on a `Config`, each with its message: the one table of limits.

Rules follow operators.md, section 6. `relaxed` lifts lower bounds that only a real product has, so that
tests and demos can be small; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_triton.config import Config
from moe_triton.errors import ArgumentError
from moe_triton.layout import STATE_COMBINE_OFFSET, STATUS_ENTRY_BYTES

IMPLEMENTED: dict[str, tuple[str, ...]] = {"A3": ("fullmesh_v1",)}

MAX_STATUS_ENTRIES = STATE_COMBINE_OFFSET // STATUS_ENTRY_BYTES
MIN_HIDDEN, MIN_HIDDEN_RELAXED, MAX_HIDDEN, HIDDEN_STEP = 1024, 32, 8192, 32


@dataclass(frozen=True)
class Rule:
    """One rule: which field it is about, when it holds, and what to say when it does not."""

    argument: str
    holds: Callable[[Config], bool]
    rule: Callable[[Config], str]
    remedy: str


def _between(argument: str, low: int, high: int, remedy: str) -> Rule:
    return Rule(
        argument,
        lambda c: low <= getattr(c, argument) <= high,
        lambda c: f"{c.product} takes {low} to {high}",
        remedy,
    )


def _min_hidden(c: Config) -> int:
    return MIN_HIDDEN_RELAXED if c.relaxed else MIN_HIDDEN


# In this order: a later rule may rely on the earlier ones (no division by zero).
A3_RULES: tuple[Rule, ...] = (
    _between("num_ranks", 2, 768, "Use a group of at least two ranks; on one rank there is nothing to send."),
    _between("num_max_tokens_per_rank", 1, 512, "Split larger batches into several dispatches."),
    Rule(
        "hidden",
        lambda c: _min_hidden(c) <= c.hidden <= MAX_HIDDEN,
        lambda c: f"{c.product} takes {_min_hidden(c)} to {MAX_HIDDEN}",
        f"relaxed=True allows {MIN_HIDDEN_RELAXED} and up for tests on the CPU.",
    ),
    Rule(
        "hidden",
        lambda c: c.hidden % HIDDEN_STEP == 0,
        lambda c: f"it must be a multiple of {HIDDEN_STEP}: rows move in 32-byte blocks",
        "Pad the hidden dimension.",
    ),
    _between("num_topk", 1, 16, "Send a token to fewer experts."),
    _between("num_experts", 1, 1024, "Use fewer routed experts."),
    Rule(
        "num_topk",
        lambda c: c.num_topk <= c.num_experts,
        lambda c: f"a token's experts are distinct and there are {c.num_experts}",
        "Lower num_topk or raise num_experts.",
    ),
    _between("num_shared_experts", 0, 4, "Use at most four shared experts."),
    Rule(
        "num_shared_ranks",
        lambda c: 0 <= c.num_shared_ranks < c.num_ranks,
        lambda c: f"at least one of the {c.num_ranks} ranks must hold routed experts",
        "Lower num_shared_ranks.",
    ),
    Rule(
        "num_shared_ranks",
        lambda c: (c.num_shared_ranks == 0) == (c.num_shared_experts == 0),
        lambda c: f"it and num_shared_experts ({c.num_shared_experts}) must be both zero or both positive",
        "Give shared experts ranks of their own, or neither.",
    ),
    Rule(
        "num_shared_ranks",
        lambda c: c.num_shared_experts == 0 or c.num_shared_ranks % c.num_shared_experts == 0,
        lambda c: f"each of the {c.num_shared_experts} shared experts needs the same number of replicas",
        "Make num_shared_ranks a multiple of num_shared_experts.",
    ),
    Rule(
        "num_experts",
        lambda c: c.num_experts % c.num_moe_ranks == 0,
        lambda c: f"it must be a multiple of the {c.num_moe_ranks} ranks that hold routed experts",
        "Change num_experts, the group's size or num_shared_ranks.",
    ),
    Rule(
        "num_experts",
        lambda c: c.num_local_experts * c.num_ranks <= MAX_STATUS_ENTRIES,
        lambda c: (
            f"experts per rank times ranks ({c.num_local_experts} * {c.num_ranks}) must be at most "
            f"{MAX_STATUS_ENTRIES}: the status area of a zone is {STATE_COMBINE_OFFSET // 1024} KB"
        ),
        "Use fewer experts per rank.",
    ),
)


def check_config(config: Config) -> None:
    """Checks every rule.

    Raises:
        ArgumentError: the first rule that does not hold.
    """
    if config.product not in IMPLEMENTED:
        raise ArgumentError(
            "product",
            repr(config.product),
            f"only {sorted(IMPLEMENTED)} can be served yet",
            "Use product='A3'.",
        )
    schemes = IMPLEMENTED[config.product]
    if config.scheme not in schemes:
        raise ArgumentError(
            "comm_alg",
            repr(config.scheme),
            f"{config.product} has {list(schemes)} here yet",
            f"Use comm_alg={schemes[0]!r}, or '' for the default.",
        )
    for rule in A3_RULES:
        if not rule.holds(config):
            raise ArgumentError(rule.argument, getattr(config, rule.argument), rule.rule(config), rule.remedy)
