"""Kernels that read scalars out of a cache that nobody invalidated, or that end before their copies."""

from __future__ import annotations

from .announced import CallCase, TablesCase
from .direct import DirectCase
from .exchange import ExchangeCase
from .library import Patch
from .mutants import FLAGS, MUTANT_TIMEOUT_US, ROW_COPY, AnyCase, Mutant, case_of, without
from .mutants_calls import EXCHANGE_SEND, POST_STATUS
from .offsets import OffsetsCase

LAUNCHERS = "launch/moe_kernels.asc"

_FULL_WAIT = case_of(full_wait=True, tokens=(3, 3))
_EXCHANGE = ExchangeCase(timeout_us=MUTANT_TIMEOUT_US)
_DIRECT = DirectCase(tokens=(4, 4), hidden=512, timeout_us=MUTANT_TIMEOUT_US)


def _old(what: str, file: str, fresh: str, old: str, case: AnyCase) -> Mutant:
    return Mutant(f"{what} read from an old cache line", (Patch(file, fresh, old),), case)


CACHE = (
    _old(
        "the zone",
        FLAGS,
        "args.zone = ReadFresh<int32_t>(args.zone_at);",
        "args.zone = GlobalAt<int32_t>(args.zone_at).GetValue(0);",
        case_of(),
    ),
    _old(
        "an earlier report",
        FLAGS,
        "return ReadFresh<int32_t>(address_, OffsetOfBlock()) != 0;",
        "return GlobalAt<int32_t>(address_).GetValue(static_cast<uint64_t>(OffsetOfBlock())) != 0;",
        case_of(),
    ),
    _old(
        "the number of results",
        ROW_COPY,
        "ReadFresh<int32_t>(args.recv_offsets, args.num_entries - 1);",
        "GlobalAt<int32_t>(args.recv_offsets).GetValue(static_cast<uint64_t>(args.num_entries - 1));",
        case_of(),
    ),
    _old(
        "the number of rows",
        EXCHANGE_SEND,
        "ReadFresh<int32_t>(args_.num_rows);",
        "GlobalAt<int32_t>(args_.num_rows).GetValue(0);",
        _EXCHANGE,
    ),
    _old(
        "the first row",
        EXCHANGE_SEND,
        "ReadFresh<int32_t>(args_.first_row);",
        "GlobalAt<int32_t>(args_.first_row).GetValue(0);",
        _EXCHANGE,
    ),
    _old(
        "the peer's window",
        EXCHANGE_SEND,
        "ReadFresh<uint64_t>(args.peers, args.peer);",
        "GlobalAt<uint64_t>(args.peers).GetValue(static_cast<uint64_t>(args.peer));",
        _EXCHANGE,
    ),
    _old(
        "the count of a status",
        POST_STATUS,
        "ReadFresh<int32_t>(args_.count)",
        "GlobalAt<int32_t>(args_.count).GetValue(0)",
        _FULL_WAIT,
    ),
    Mutant(
        "the windows' addresses read from old cache lines",
        (without(FLAGS, "            DropCachedLine(windows_[rank]);\n"),),
        case_of(),
    ),
    Mutant(
        "only the first line of the windows' addresses invalidated",
        (Patch(FLAGS, "WORDS_PER_LINE - (first + rank) % WORDS_PER_LINE", "WORDS_PER_LINE"),),
        case_of(),
    ),
)


def _without_barrier(name: str, case: AnyCase) -> Mutant:
    """The launcher as the macro writes it, less its last statement."""
    kernel = "".join(part.capitalize() for part in name.split("_"))
    launcher = f"""
MOE_KERNEL({name}, moe::{kernel}Args) {{
    MOE_KERNEL_BEGIN
    AscendC::TPipe pipe;
    moe::{kernel} kernel;
    kernel.Init(args, &pipe);
    kernel.Process();
}}
extern "C" int moe_{name}(uint32_t blocks, void* stream, const moe::{kernel}Args* args) {{
    MOE_LAUNCH({name}, blocks, stream, *args);
}}
"""
    patch = Patch(LAUNCHERS, f"\nMOE_LAUNCHER({kernel}, {name})\n", launcher)
    return Mutant(f"{name} ends before its copies", (patch,), case)


# inband_send, dispatch_wait and combine_ready have waited for their copies before, to use a buffer again; and
# so has dispatch_send if it has rows.
ENDS = (
    _without_barrier("dispatch_send", case_of(tokens=(0, 3))),
    _without_barrier("dispatch_rows", case_of()),
    _without_barrier("counts_send", _DIRECT),
    _without_barrier("direct_send", _DIRECT),
    _without_barrier("dispatch_offsets", OffsetsCase()),
    _without_barrier("inband_receive", case_of(inband=True)),
    _without_barrier("combine_send", case_of()),
    _without_barrier("combine_wait", case_of()),
    _without_barrier("post_status", _FULL_WAIT),
    _without_barrier("exchange_send", _EXCHANGE),
    _without_barrier("call_post", CallCase(timeout_us=MUTANT_TIMEOUT_US)),
    _without_barrier("tables_send", TablesCase(timeout_us=MUTANT_TIMEOUT_US)),
)

MEMORY_MUTANTS = CACHE + ENDS
