"""Records of words that host, Triton kernels and C++ read: which word is what, by name; and sizes.

`moe_triton.tools.codegen` gives C++ the same names (``Stamp::TOKEN``). This is not in `moe_triton.layout`
because the headers are generated where torch is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

# Increased whenever window contents or flags change meaning: ranks with different versions must not
# communicate.
PROTOCOL_VERSION = 8

WORD_BYTES = 4
UB_ALIGN = 32
FLAG_BITS = 0x3F800000  # 1.0f, as kernels sum flags

# A slot with flags in band: 512-byte blocks, each 480 bytes of the slot and then its flag.
BLOCK_BYTES = 512
BLOCK_DATA_BYTES = 480


@dataclass(frozen=True)
class Record:
    """Words in a row.

    Attributes:
        name: of the C++ struct, in snake case.
        num_words: with those that stand for nothing yet.
        fields: name and element type of each word that is used, from the first on.
        word_bytes: of each word.
    """

    name: str
    num_words: int
    fields: tuple[tuple[str, str], ...]
    word_bytes: int = WORD_BYTES

    @property
    def num_bytes(self) -> int:
        """Size."""
        return self.word_bytes * self.num_words

    def word(self, field: str) -> int:
        """Index of a field's word."""
        return [name for name, _ in self.fields].index(field)


# Where a row comes from, and so where its result goes.
ORIGIN = Record("origin", 3, (("source", "i32"), ("token", "i32"), ("k", "i32")))
# What travels with a row. The scale is behind it only where rows are followed by nothing else (direct), the
# flag says that row and stamp are there where nothing else does (fullmesh_v1).
STAMP = Record("stamp", 8, (*ORIGIN.fields, ("weight", "fp32"), ("scale", "fp32"), ("flag", "i32")))
# What a rank posts to another. The call word says of which call (`moe_triton.layout.call_word`).
STATUS_ENTRY = Record("status_entry", 8, (("flag", "i32"), ("count", "i32"), ("call", "i32")))
# What a rank says of a call that it has in rounds, before its counts: how many rounds its tokens take, tokens
# of a rank at most (0: nobody says), rows that its outputs have room for (0: for all), and where in them each
# expert's begin: at multiples of a number, or so many rows apart (0: one behind the other).
CALL_HEADER = Record(
    "call_header",
    8,
    tuple((name, "i32") for name in ("rounds", "max_tokens", "capacity", "alignment", "stride")),
)
MAX_CALL_TOKENS = 1 << 24
"""Tokens of a rank in a call at most: what a count says beyond them, nobody has sent."""
# The count in an entry of a source whose rows did not reach the one that relays them.
LOST_COUNT = -(2**31 - 1)
# What a token begins with on a rail, and what ends a rank's tokens or partial rows there. `lost`: 1 + the
# rank without which there are none; 0. `lost_call`: that rank's call word, if it made another call; 0.
# `left_out`: bit d: rank d of the sender's server is masked, and the partial rows are without its results.
# An end's number lies where on the CPU all else is there before it (`CopyBlock`).
# `tokens`: of each message of this source but the last one.
RAIL_HEAD = Record("rail_head", 8, (("number", "i32"), ("token", "i32"), ("call", "i32"), ("tokens", "i32")))
RAIL_END = Record(
    "rail_end",
    8,
    tuple((name, "i32") for name in ("count", "call", "lost", "lost_call", "number", "left_out")),
)
MAX_LEFT_OUT = 32
"""Ranks of a server at most of which that word can say so."""
# A token's choice on a rail: an expert's id, and above it its number among its rank's tokens for that.
POSITION_SHIFT = 16
# The error of a block; code 0 for none. It fills a cache line, so that no write of a block can overwrite
# another block's report. For a mismatch: the expected call word, and the first other one.
REPORT = Record(
    "block_report",
    16,
    tuple((name, "i32") for name in ("code", "first", "number", "zone", "expected_call", "found_call")),
)
# Behind the origins of received rows: a mark ("moe " in ASCII) that identifies them as ours, and their
# number.
TRAILER = Record("trailer", 2, (("mark", "i32"), ("num_rows", "i32")))
TRAILER_MARK = 0x6D6F6520

# How far a block of a combine in parts is, in parts: those that it sent, those of whose tokens it has taken
# all, those of whose tokens it knows what they wait for; and how long it last sent. Whole 32-byte units.
PART_PROGRESS = Record("part_progress", 8, tuple((n, "i32") for n in ("sent", "taken", "noted", "send_us")))

# What a block of a launch has posted to queues: messages, bytes of rows, and all other bytes; to ranks of
# other servers and to those of its own. It fills a cache line, like a report.
TRAFFIC = Record(
    "traffic",
    8,
    tuple(
        (f"{what}_{where}", "i64")
        for where in ("between", "inside")
        for what in ("posts", "payload", "framing")
    ),
    word_bytes=8,
)

# Records that device code in C++ uses.
DEVICE_RECORDS = (
    ORIGIN,
    STAMP,
    STATUS_ENTRY,
    CALL_HEADER,
    RAIL_HEAD,
    RAIL_END,
    REPORT,
    TRAILER,
    PART_PROGRESS,
    TRAFFIC,
)
