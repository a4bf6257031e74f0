"""What the kernels do whose formulas are compared with them."""

from __future__ import annotations

from tests.ascendc.blocks_case import BlocksCase
from tests.ascendc.case import Case
from tests.ascendc.direct import DirectCase
from tests.ascendc.exchange import ExchangeCase
from tests.ascendc.posts import PostingCase
from tests.ascendc.receiving import ReceivingCase

FULLMESH = {
    "one_block": Case(tokens=(3, 2), blocks=1, topk=1),
    "weights_and_scales": Case(tokens=(13, 8, 1), blocks=3, topk=4, scaled=True, timed=True, absent=0.2),
    "special_ids": Case(tokens=(7, 9), blocks=5, topk=4, experts_per_rank=3, special=0.3, weighted=False),
    "masked": Case(tokens=(11, 9), blocks=3, topk=3, experts_per_rank=4, inactive=0.4, timed=True),
    "no_rows": Case(tokens=(0, 4), blocks=2, topk=2, absent=0.9),
    "nothing_at_all": Case(tokens=(3, 2), blocks=2, absent=1.0, timed=True),
    "skewed": Case(tokens=(6, 3, 1, 2), blocks=4, topk=2, skewed=True),
    "several_launches": Case(tokens=(9, 10), blocks=3, topk=4, launches=3),
    "row_per_result": Case(tokens=(9, 10), blocks=3, topk=4, row_per_result=True),
    "many_scales": Case(tokens=(5, 8), blocks=3, topk=3, scaled=True, num_scales=9, hidden=96),
    "full_wait": Case(tokens=(5, 8, 2), blocks=2, topk=3, full_wait=True, timed=True),
    "many_results": Case(tokens=(3, 2), blocks=2, topk=40, experts_per_rank=24, hidden=32),
    "many_ranks": Case(tokens=(4,) * 18, blocks=4, topk=6, experts_per_rank=4),
    "many_blocks": Case(tokens=(40, 16), blocks=48, topk=8, experts_per_rank=16, hidden=128),
    "real_rows": Case(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, scaled=True),
    "tables_in_chunks": Case(tokens=(300, 150), blocks=2, topk=8, experts_per_rank=8, hidden=32, timed=True),
    "entries_in_chunks": Case(tokens=(2, 3), blocks=1, experts_per_rank=1100, hidden=32, timed=True),
    "row_in_pieces": Case(tokens=(3, 2), blocks=2, hidden=48 * 1024),
}
IN_PARTS = {
    "one_block": Case(tokens=(9, 7), blocks=1, topk=1, part_tokens=2),
    "timed": Case(tokens=(13, 8, 1), blocks=3, topk=4, part_tokens=5, timed=True, absent=0.2),
    "masked": Case(
        tokens=(31, 9), blocks=3, topk=3, experts_per_rank=4, inactive=0.4, timed=True, part_tokens=8
    ),
    "special_ids": Case(tokens=(17, 9), topk=4, experts_per_rank=3, special=0.3, part_tokens=4),
    "no_rows": Case(tokens=(0, 4), topk=2, absent=0.9, part_tokens=2),
    "more_blocks_than_tokens": Case(tokens=(6, 3), blocks=5, part_tokens=2),
    "tables_in_chunks": Case(
        tokens=(300, 150), blocks=2, topk=8, experts_per_rank=8, hidden=32, timed=True, part_tokens=256
    ),
    "origins_in_chunks": Case(tokens=(200, 150), topk=8, experts_per_rank=8, hidden=32, part_tokens=64),
    "real_rows": Case(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, part_tokens=4),
}
TAKEN = {
    "two_parts": Case(tokens=(7, 9), blocks=3, topk=3, experts_per_rank=4, takes=2),
    "timed": Case(tokens=(13, 8, 1), blocks=2, topk=4, takes=3, timed=True, absent=0.2, hidden=64),
    "no_rows": Case(tokens=(0, 4), topk=2, absent=0.9, takes=2),
    "many_rows": Case(tokens=(2500, 2300), blocks=2, topk=1, experts_per_rank=1, hidden=32, takes=3),
    "entries_in_chunks": Case(tokens=(4, 3), blocks=1, experts_per_rank=1100, hidden=32, takes=2),
    "real_rows": Case(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, takes=4),
}
RECEIVED = {
    "one_block": ReceivingCase(tokens=(3, 2), blocks=1, topk=1),
    "timed": ReceivingCase(tokens=(13, 8, 1), blocks=3, topk=4, scaled=True, timed=True, absent=0.2),
    "no_rows": ReceivingCase(tokens=(0, 4), blocks=2, topk=2, absent=0.9, weighted=False),
    "more_blocks_than_entries": ReceivingCase(tokens=(3, 2), blocks=7, experts_per_rank=1, topk=1),
    "many_scales": ReceivingCase(tokens=(5, 8), blocks=3, topk=3, scaled=True, num_scales=9, hidden=96),
    "many_rows": ReceivingCase(tokens=(2500, 2300), blocks=2, topk=1, experts_per_rank=1, hidden=32),
    "many_entries": ReceivingCase(tokens=(9, 8), blocks=3, experts_per_rank=500, topk=8, hidden=32),
    "real_rows": ReceivingCase(
        tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, scaled=True
    ),
}
INBAND = {
    "one_block": Case(tokens=(3, 2), blocks=1, topk=1),
    "scales": Case(tokens=(40, 30), blocks=3, topk=3, scaled=True, absent=0.2, timed=True, hidden=300),
    "real_rows": Case(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, scaled=True),
    "no_scales": Case(tokens=(9, 5, 7), blocks=4, hidden=241, weighted=False, experts_per_rank=3),
    "many_scales": Case(tokens=(9, 8), topk=3, scaled=True, num_scales=57, hidden=900),
    "scales_over_blocks": Case(tokens=(9, 8), topk=3, scaled=True, num_scales=150, hidden=460),
    "stamp_alone": Case(tokens=(2, 3), hidden=240 * 3),
    "no_rows": Case(tokens=(3, 2), absent=1.0, timed=True),
    "several_launches": Case(tokens=(9, 10), blocks=3, topk=4, launches=3, row_per_result=True),
    "many_rows": Case(tokens=(300, 200), blocks=2, topk=8, experts_per_rank=8, hidden=32, timed=True),
    "entries_in_chunks": Case(tokens=(2, 3), blocks=1, experts_per_rank=1100, hidden=32, timed=True),
    "row_in_pieces": Case(tokens=(7, 8), blocks=1, hidden=48 * 1024, scaled=True),
}
DIRECT = {
    "plain": DirectCase(tokens=(7, 9), blocks=3, topk=3, experts_per_rank=4),
    "one_scale": DirectCase(tokens=(7, 9, 2), blocks=2, topk=3, scaled=True, absent=0.2),
    "many_scales": DirectCase(tokens=(7, 9), blocks=3, topk=4, scaled=True, num_scales=9, hidden=96),
    "row_per_result": DirectCase(tokens=(7, 3), blocks=3, row_per_result=True, scaled=True, weighted=False),
    "many_experts": DirectCase(tokens=(2, 3), blocks=1, experts_per_rank=1100, hidden=32),
    "no_rows": DirectCase(tokens=(3, 2), absent=1.0),
    "more_blocks_than_ranks": DirectCase(tokens=(3, 2), blocks=6),
    "real_rows": DirectCase(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, scaled=True),
    "long_rows": DirectCase(tokens=(2, 3), hidden=48 * 1024),
    "many_ranks": DirectCase(tokens=(4,) * 18, blocks=4, topk=6, experts_per_rank=4),
    "sources_in_chunks": DirectCase(tokens=(2,) * 5, blocks=2, topk=3, experts_per_rank=300, hidden=32),
    "offsets_in_chunks": DirectCase(tokens=(300, 150), blocks=2, topk=8, experts_per_rank=8, hidden=32),
}
OFFSETS = {
    "one_block": (Case(tokens=(3, 2), topk=1), {"blocks": 1}),
    "blocks": (Case(tokens=(9, 7, 5), topk=3, experts_per_rank=5), {"blocks": 4}),
    "no_table": (Case(tokens=(9, 7, 5), topk=3, experts_per_rank=5), {"blocks": 4, "tabled": False}),
    "stats": (Case(tokens=(9, 7, 5), topk=3, experts_per_rank=5), {"blocks": 4, "stats": True}),
    "kept": (Case(tokens=(9, 7, 5), topk=3, experts_per_rank=5), {"blocks": 4, "kept": True}),
    "kept_alone": (Case(tokens=(9, 7, 5), topk=3), {"blocks": 1, "kept": True, "cumulative": True}),
    "little_room": (Case(tokens=(9, 7, 5), topk=3, experts_per_rank=4), {"blocks": 2, "room": 0.2}),
    "skewed": (Case(tokens=(6, 3, 1, 2), skewed=True), {"blocks": 5}),
    "nothing_at_all": (Case(tokens=(3, 2), absent=1.0), {"blocks": 2, "stats": True, "kept": True}),
    "more_blocks_than_entries": (Case(tokens=(3, 2), experts_per_rank=1, topk=1), {"blocks": 7}),
    "many_blocks": (Case(tokens=(16,) * 16, topk=8, experts_per_rank=16, hidden=32), {"blocks": 48}),
    "entries_in_chunks": (
        Case(tokens=(2, 3, 4), topk=40, experts_per_rank=1500, hidden=32),
        {"blocks": 2, "stats": True, "kept": True},
    ),
    "long_runs": (Case(tokens=(300, 700, 80), topk=3), {"blocks": 4}),
    "long_runs_and_kept": (Case(tokens=(70, 90), experts_per_rank=2), {"blocks": 3, "kept": True}),
    "long_sums": (Case(tokens=(9000, 9000), topk=2, experts_per_rank=2, hidden=32), {"blocks": 3}),
    "rows_in_pieces": (
        Case(tokens=(9000, 9000), topk=2, experts_per_rank=1, hidden=32),
        {"blocks": 1, "kept": True},
    ),
}
EXCHANGE = {
    "plain": ExchangeCase(),
    "no_first_row": ExchangeCase(first_row=None, header_words=0, num_scales=0),
    "scales": ExchangeCase(rows=(700, 90), num_scales=12, blocks=1),
    "header": ExchangeCase(rows=(0, 33), header_words=3000, blocks=4),
    "long_rows": ExchangeCase(rows=(3, 4), row_bytes=96 * 1024, num_scales=0),
}
BLOCKS = {
    "one_block": BlocksCase(tokens=(3, 2), blocks=1, topk=1),
    "weights_and_scales": BlocksCase(
        tokens=(13, 8, 1), blocks=3, topk=4, scaled=True, timed=True, absent=0.2
    ),
    "special_ids": BlocksCase(
        tokens=(7, 9), blocks=5, topk=4, experts_per_rank=3, special=0.3, weighted=False
    ),
    "no_rows": BlocksCase(tokens=(0, 4), blocks=2, topk=2, absent=0.9),
    "old_limits": BlocksCase(tokens=(6, 3), blocks=2, topk=2, experts_per_rank=24, old_limits=True),
    "row_per_result": BlocksCase(tokens=(9, 10), blocks=3, topk=4, row_per_result=True),
    "vector_sums": BlocksCase(tokens=(4,) * 8, blocks=5, topk=6, experts_per_rank=12),
    "many_entries": BlocksCase(tokens=(2,) * 8, blocks=3, experts_per_rank=300, topk=4, hidden=32),
    "many_ranks": BlocksCase(tokens=(4,) * 18, blocks=4, topk=6, experts_per_rank=4),
    "more_blocks_than_ranks": BlocksCase(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=128),
    "row_in_pieces": BlocksCase(tokens=(3, 2), blocks=2, hidden=48 * 1024),
}
POSTED_BLOCKS = {
    "two_ranks": BlocksCase(tokens=(3, 2), servers=(1, 1), blocks=1, topk=1),
    "one_server_takes_posts": BlocksCase(tokens=(13, 8, 1), servers=(2, 1), blocks=3, topk=4, scaled=True),
    "messages_of_two": BlocksCase(
        tokens=(6, 3, 2, 9), servers=(2, 2), blocks=3, topk=2, keeps_order=True, timed=True
    ),
    "many_ranks": BlocksCase(tokens=(4,) * 10, servers=(5, 5), blocks=4, topk=6, experts_per_rank=4),
}
POSTED_ROWS = {
    "two_ranks": PostingCase(tokens=(3, 2), blocks=1, topk=1),
    "servers_of_two": PostingCase(tokens=(6, 3, 2, 9), servers=(2, 2), blocks=3, topk=3, timed=True),
    "three_and_one": PostingCase(tokens=(3, 0, 2, 5), servers=(3, 1), topk=4, scaled=True, absent=0.3),
    "full_wait": PostingCase(tokens=(3, 2, 1), servers=(2, 1), blocks=2, full_wait=True),
    "many_ranks": PostingCase(tokens=(4,) * 10, servers=(5, 5), blocks=4, topk=6, experts_per_rank=4),
    "origins_in_chunks": PostingCase(tokens=(300, 200), topk=8, experts_per_rank=8, hidden=32, blocks=2),
    "entries_in_chunks": PostingCase(tokens=(2, 3), blocks=1, experts_per_rank=1024, hidden=32),
}
