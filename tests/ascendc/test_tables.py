"""Tables ahead of rows that come once for each rank: every rank has them, each in its place, nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from moe_triton.core.config import Config
from moe_triton.core.records import TRAFFIC
from moe_triton.schemes.fullmesh.layout import WindowLayout

from .case import check_reports
from .library import Library
from .memory import GARBAGE, Guarded
from .one_sender import one_sender

CASES = {
    "usual": (4, 8, 3, 2),
    "one block": (3, 4, 5, 1),
    "more blocks than ranks": (2, 8, 1, 5),
    "no tokens": (2, 8, 0, 2),
    "several pieces": (2, 32, 300, 2),
}
Sent = tuple[list[Guarded], np.ndarray, np.ndarray, np.ndarray]


def layout_of(num_ranks: int, topk: int, tokens: int, servers: tuple[int, ...] | None = None) -> WindowLayout:
    sizes = num_ranks, tokens + 1, 32, topk, 32 * num_ranks
    return WindowLayout(Config(*sizes, is_of_buffer=True, relaxed=True, ranks_per_server=servers))


def send(
    library: Library,
    layout: WindowLayout,
    case: tuple[int, int, int, int],
    weighted: bool,
    sender: int,
    zone: int,
    servers: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Sent:
    """What one rank sends to all: their windows, ids and weights, and what it has posted."""
    _, topk, tokens, blocks = case
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 64, (tokens, topk), dtype=np.int32)
    weights = rng.random((tokens, topk), dtype=np.float32)
    with one_sender(library, layout, sender, blocks, first_seed=1 + seed) as to:
        report = library.launch(
            "tables_send",
            blocks,
            row_ids=ids,
            row_weights=weights if weighted else 0,
            num_tokens=tokens,
            topk=topk,
            zone=zone,
            tables=layout.row_tables,
            **to.arguments,
        )
    check_reports(report)
    for window in to.windows:
        window.check_guards()
    return to.windows, ids, weights, to.traffic


def check(
    windows: list[Guarded], layout: WindowLayout, sender: int, zone: int, words: list[np.ndarray]
) -> None:
    """Forgets what is to be there, and finds nothing else but the out part."""
    tables = layout.row_tables
    assert tables is not None
    for window in windows:
        for table, want in enumerate(words):
            at = tables.offset(zone=zone, source=sender, table=table)
            found = window.array[at : at + want.nbytes]
            assert found.tobytes() == want.tobytes()
            found[:] = GARBAGE
        assert (window.array[: layout.in_bytes] == GARBAGE).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_them(library: Library, name: str, weighted: bool) -> None:
    case = CASES[name]
    layout = layout_of(*case[:3])
    for sender in range(case[0]):
        zone = sender % 2
        windows, ids, weights, _ = send(library, layout, case, weighted, sender, zone)
        check(windows, layout, sender, zone, [ids, weights] if weighted else [ids])


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_ranks_of_other_servers_have_them_by_posts(library: Library, blocks: int) -> None:
    case, servers = (4, 8, 3, blocks), (2, 2)
    layout = layout_of(*case[:3], servers)
    for sender in range(4):
        windows, ids, weights, traffic = send(library, layout, case, True, sender, 1, servers, sender)
        check(windows, layout, sender, 1, [ids, weights])
        found = {name: int(traffic[:, i].sum()) for i, (name, _) in enumerate(TRAFFIC.fields)}
        posted = {"posts_between": 4, "framing_between": 2 * (ids.nbytes + weights.nbytes)}
        assert found == dict.fromkeys(found, 0) | posted
