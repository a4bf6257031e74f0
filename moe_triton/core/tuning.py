"""Settings of one rank that change speed and never results."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from moe_triton.core.ascendc import MAX_BLOCKS, MAX_POST_PARTS
from moe_triton.core.checks import check_choice, check_integer, check_record
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

# Native code counts tokens in 32 bits, adds spins and yields in 32, and has bytes in 64.
_RANGES: dict[str, tuple[int, int]] = {
    "dispatch_tokens": (1, 2**31 - 1),
    "combine_tokens": (1, 2**31 - 1),
    "cached_bytes": (0, 2**62),
    "spins": (0, 2**30),
    "yields": (0, 2**30),
    "post_parts": (1, MAX_POST_PARTS),
    "message_tokens": (1, 2**31 - 1),
    "return_pieces": (1, 2**31 - 1),
}

Posts = Literal["aiv", "aicpu"]
POSTS: tuple[Posts, ...] = ("aiv", "aicpu")
_WORDS = {"posts": POSTS}

ALL_BYTES = 1 << 62
"""More than any launch writes."""


def usual_on_cpu(num_ranks: int, cores: int) -> dict[str, int]:
    """What a rank on a CPU is set to where nobody says anything: its blocks, how it copies and waits.

    Args:
        num_ranks: that share the cores.
        cores: of the machine.

    Returns:
        By name; of ``cached_bytes`` what stands for less where `moe_triton.backends.cpu.row_copies` says so.
    """
    # A rank with a core of its own can keep polling without disturbing others, and reacts at once.
    yields = 2000 if num_ranks <= cores else 20
    blocks = min(max(1, cores // num_ranks), MAX_BLOCKS)
    return {"num_blocks": blocks, "cached_bytes": ALL_BYTES, "spins": 200, "yields": yields}


@dataclass(frozen=True)
class Tuning:
    """How an operator is cut into parts, how rows are copied and how flags are waited for.

    Attributes:
        dispatch_tokens: tokens of a part that is sent while what has come before is arranged, or, with
            fullmesh_v2 and in halves, while the next part is quantised. None: 64 on a CPU, on an NPU all of
            them in one part (`moe-triton plan` shows it).
        combine_tokens: tokens of a part that is summed while the results of the next one come in. None: as
            in dispatch.
        communication_blocks: of a rank's blocks, those that communicate while the others compute; 0 lets
            all of them do both in turn. On an NPU there is one part then, and before CANN 9 always.
        cached_bytes: CPU: bytes of rows that a launch writes through the caches before it uses streaming
            stores. None: as many as the second cache holds, on processors that are known or were timed to be
            faster at streaming more, and on others a rank's share of the last cache.
        spins: CPU: polls of missing flags with only a pause in between. None: the default of the machine.
        yields: CPU: polls after those that yield in between; then the waiter sleeps. None: many if ranks have
            cores of their own, few if they share them.
        receiving_blocks: of a rank's blocks, those that put received rows in their places while the others
            send, in a dispatch of fullmesh_v1; 0 lets all of them do one after the other. None: 0 on a CPU,
            on an NPU what `moe_triton.schemes.rank_context.RankContext.receiving_blocks` says.
        posts: hierarchy: who posts to other servers. "aiv": a core for each of them, some tokens at a time,
            while the other cores pass on what has come; "aicpu": all tokens for a server as one message, and
            nothing is passed on before all has come. None: "aiv".
        tables: folder of tables of kernels' settings that go before those of the package. None:
            $MOE_TRITON_TABLES, or where `moe-triton tune kernels` writes them.
        post_parts: A2's fullmesh between servers: parts of some ranks each in which blocks are made, each
            posted while the next one is made; 1 posts when all are made, and no more than ranks count. None:
            what `moe_triton.schemes.rank_context.usual_post_parts` says.
        message_tokens: hierarchy, posts="aiv": neighbouring tokens, or partial rows, of a message. None: what
            `moe_triton.schemes.rank_context.MESSAGE_TOKENS` says, but 1 of int8 tokens between hosts.
        return_pieces: hierarchy, posts="aiv": pieces of some servers each in which results are returned
            inside a server: what one has for other servers is under way while the next one is returned; no
            more than servers count. None: what `moe_triton.schemes.rank_context.usual_return_pieces` says.

    Examples:
        >>> tuning = Tuning(combine_tokens=16)
        >>> sizes = dict(num_max_tokens_per_rank=64, hidden=7168, num_topk=8, num_experts=32)
        >>> EPBuffer(**sizes, tuning=tuning).tuning_source()["combine_tokens"]
        '16: Tuning(combine_tokens=16)'
    """

    dispatch_tokens: int | None = None
    combine_tokens: int | None = None
    communication_blocks: int = 0
    cached_bytes: int | None = None
    spins: int | None = None
    yields: int | None = None
    receiving_blocks: int | None = None
    posts: Posts | None = None
    tables: str | os.PathLike[str] | None = None
    post_parts: int | None = None
    message_tokens: int | None = None
    return_pieces: int | None = None

    def __post_init__(self) -> None:
        """Makes every integer Python's.

        Raises:
            ArgumentError: a setting is no integer, ``posts`` none of its choices, or the folder no path.
        """
        if self.tables is not None and not isinstance(self.tables, str | os.PathLike):
            given, rule = f"a {type(self.tables).__name__}", "it must be a path or None"
            raise ArgumentError("tuning.tables", given, rule, "Pass a folder.", code=INVALID_ARGUMENT)
        if self.posts is not None:
            object.__setattr__(self, "posts", check_choice("tuning.posts", self.posts, POSTS))
        for name in ("communication_blocks", "receiving_blocks", *_RANGES):
            if (value := getattr(self, name)) is not None or name == "communication_blocks":
                object.__setattr__(self, name, check_integer(f"tuning.{name}", value))

    def check(self, num_blocks: int) -> None:
        """Checks the settings against a rank's blocks.

        Raises:
            ArgumentError: a setting is out of its range, or no block is left to compute.
        """
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ArgumentError(f"tuning.{name}", value, f"it must be {low} to {high}", "Leave it out.")
        for name in ("communication_blocks", "receiving_blocks"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < num_blocks:
                rule = f"it must be 0, or less than the rank's {num_blocks} blocks"
                raise ArgumentError(f"tuning.{name}", value, rule, "Pass 0, or more num_blocks.")

    def check_posts(self, num_max_tokens: int) -> None:
        """Checks that nothing cuts operators whose rows are posted to queues.

        Args:
            num_max_tokens: of a rank.

        Raises:
            ArgumentError: a setting cuts them into parts, or has blocks that receive meanwhile.
        """
        rule = "in a group of several servers operators have one part: rows are posted once all are written"
        remedy = "or make a group of each server's ranks."
        for name in ("dispatch_tokens", "combine_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < num_max_tokens:
                leave = f"Leave it out, pass {num_max_tokens} or more, {remedy}"
                raise ArgumentError(f"tuning.{name}", tokens, rule, leave)
        for name in ("communication_blocks", "receiving_blocks"):
            if getattr(self, name):
                raise ArgumentError(f"tuning.{name}", getattr(self, name), rule, f"Leave it out, {remedy}")

    def check_post_parts(self, scheme: str, offered: Collection[str], num_servers: int) -> None:
        """Checks that blocks are posted, if somebody says in how many parts.

        Args:
            scheme: how tokens travel.
            offered: which settings that has (`moe_triton.schemes.scheme.Scheme.settings`).
            num_servers: of the group.

        Raises:
            ArgumentError: another scheme, or nothing is posted.
        """
        if self.post_parts is not None and ("post_parts" not in offered or num_servers == 1):
            rule = "only A2's fullmesh between servers posts blocks, and here tokens travel by " + scheme
            rule += " inside one server" if num_servers == 1 else ""
            raise ArgumentError("tuning.post_parts", self.post_parts, rule, "Leave it out.")

    def check_messages(self, scheme: str, offered: Collection[str], num_servers: int) -> None:
        """Checks that tokens are posted in messages of some, if somebody says of how many.

        Args:
            scheme, offered, num_servers: as in `check_post_parts`.

        Raises:
            ArgumentError: another scheme, nothing is posted, or all of a server's tokens are one message.
        """
        for name in ("message_tokens", "return_pieces"):
            given = getattr(self, name)
            if given is None:
                continue
            if name not in offered or num_servers == 1:
                rule = f"only hierarchy between servers has it, and here tokens travel by {scheme}"
                rule += " inside one server" if num_servers == 1 else ""
                raise ArgumentError(f"tuning.{name}", given, rule, "Leave it out.")
            if self.posts == "aicpu":
                rule = "with posts='aicpu' all tokens for a server are one message, and phases are in series"
                raise ArgumentError(f"tuning.{name}", given, rule, "Leave it out, or pass posts='aiv'.")

    def check_poster(self, scheme: str, offered: Collection[str], posters: Collection[Posts]) -> None:
        """Checks that who posts may be chosen.

        Args:
            scheme, offered: as in `check_post_parts`.
            posters: who can post on the device.

        Raises:
            ArgumentError: another scheme, which has no choice, or a device that does not have this one.
        """
        if self.posts is None:
            return
        if "posts" not in offered:
            rule = f"only hierarchy between servers has a choice, and here tokens travel by {scheme}"
            raise ArgumentError("tuning.posts", repr(self.posts), rule, "Leave it out.")
        if self.posts not in posters:
            rule = "on an NPU the cores post: AICPU's batch writes would need HCCL's operator package"
            raise ArgumentError("tuning.posts", repr(self.posts), rule, "Leave it out, or pass 'aiv'.")


OPEN_FIELDS = tuple(f.name for f in fields(Tuning) if f.default is None and f.name != "tables")
"""Settings that are None where the caller leaves them open."""


def fields_of(settings: Mapping[str, int]) -> dict[str, Any]:
    """Fields of `Tuning` of settings as spaces and tables have them: a word is its number among its choices.

    Raises:
        ValueError: a word has no such number.
    """
    for name, words in _WORDS.items():
        if not 0 <= settings.get(name, 0) < len(words):
            raise ValueError(f"{name} must be 0 to {len(words) - 1}, for {' and '.join(words)}")
    return {name: _WORDS[name][value] if name in _WORDS else value for name, value in settings.items()}


def checked_tuning(tuning: object) -> Tuning:
    """The user's settings, or the defaults for None.

    Raises:
        ArgumentError: it is something else.
    """
    return check_record("tuning", tuning, Tuning)
