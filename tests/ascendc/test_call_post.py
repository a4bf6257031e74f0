"""What ranks say before a call in rounds: every rank has it, each in its place, nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from moe_triton.core.config import Config
from moe_triton.core.records import CALL_HEADER, FLAG_BITS, TRAFFIC
from moe_triton.layout import CallRegions
from moe_triton.schemes.fullmesh.layout import WindowLayout

from .case import check_reports
from .library import Library
from .memory import GARBAGE, Guarded
from .one_sender import one_sender

CALL = 77
CASES = {
    "usual": (4, 8, 0, 2),
    "one block": (3, 4, 1, 1),
    "more blocks than ranks": (2, 5, 0, 5),
    "several pieces": (2, 2048, 0, 2),
    "shared ranks": (4, 8, 2, 3),
}


def layout_of(
    num_ranks: int, experts: int, shared: int, servers: tuple[int, ...] | None = None
) -> tuple[WindowLayout, CallRegions]:
    moe_ranks = num_ranks - shared
    sizes = num_ranks, 4, 32, 2, experts * moe_ranks, min(shared, 1), shared
    layout = WindowLayout(Config(*sizes, is_of_buffer=True, relaxed=True, ranks_per_server=servers))
    assert layout.calls is not None
    return layout, layout.calls


def post(
    library: Library,
    case: tuple[int, int, int, int],
    sender: int,
    zone: int,
    bell: int,
    servers: tuple[int, ...] | None = None,
) -> tuple[list[Guarded], np.ndarray, np.ndarray]:
    """What one rank leaves in all windows; what it says, and what it has posted."""
    num_ranks, experts, shared, blocks = case
    layout, calls = layout_of(num_ranks, experts, shared, servers)
    rng = np.random.default_rng(sender)
    words = rng.integers(0, 999, calls.counts.extent("entry"), dtype=np.int32)
    header, shared_counts, counts = np.split(words, [CALL_HEADER.num_words, CALL_HEADER.num_words + shared])
    with one_sender(library, layout, sender, blocks, first_seed=1 + sender) as to:
        report = library.launch(
            "call_post",
            blocks,
            header=header.copy(),
            counts=counts.copy(),
            shared_counts=shared_counts.copy() if shared else 0,
            num_experts=len(counts),
            num_shared_ranks=shared,
            bell=bell,
            call=CALL,
            zone=zone,
            slots=calls.counts,
            status=calls.status,
            bells=calls.bell,
            **to.arguments,
        )
    check_reports(report)
    for window in to.windows:
        window.check_guards()
    return to.windows, words, to.traffic


def check(
    windows: list[Guarded], case: tuple[int, int, int, int], sender: int, zone: int, bell: int,
    words: np.ndarray, servers: tuple[int, ...] | None = None,
) -> None:  # fmt: skip
    """Forgets what is to be there, and finds nothing else but the out part."""
    layout, calls = layout_of(*case[:3], servers)
    for rank, window in enumerate(windows):
        memory = window.array
        at = calls.counts.offset(zone=zone, source=sender)
        assert memory[at : at + words.nbytes].tobytes() == words.tobytes()
        is_posted = servers is not None and rank not in layout.config.topology.neighbours(sender)
        # Whole units go to a queue.
        memory[at : at + (calls.counts.stride("source") if is_posted else words.nbytes)] = GARBAGE
        at = calls.status.offset(zone=zone, source=sender)
        assert memory[at : at + 12].view(np.int32).tolist() == [FLAG_BITS, 0, CALL]
        memory[at : at + 32] = GARBAGE
        at = calls.bell.offset(zone=zone)
        if bell:
            assert memory[at : at + 32].view(np.int32).tolist() == [bell] * 8
            memory[at : at + 32] = GARBAGE
        assert (memory[: layout.in_bytes] == GARBAGE).all()


@pytest.mark.parametrize("bell", [0, 5])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_hears_it(library: Library, name: str, bell: int) -> None:
    case = CASES[name]
    for sender in range(case[0]):
        windows, words, _ = post(library, case, sender, sender % 2, bell)
        check(windows, case, sender, sender % 2, bell, words)


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("bell", [0, 5])
def test_ranks_of_other_servers_hear_it_by_posts(library: Library, blocks: int, bell: int) -> None:
    case, servers = (4, 8, 0, blocks), (2, 2)
    for sender in range(4):
        windows, words, traffic = post(library, case, sender, 1, bell, servers)
        check(windows, case, sender, 1, bell, words, servers)
        found = {name: int(traffic[:, i].sum()) for i, (name, _) in enumerate(TRAFFIC.fields)}
        messages = 3 if bell else 2
        framing = -(-words.nbytes // 32) * 32 + 32 * (messages - 1)
        posted = {"posts_between": 2 * messages, "framing_between": 2 * framing}
        assert found == dict.fromkeys(found, 0) | posted
