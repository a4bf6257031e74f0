"""Memory of one large call: what it adds to its process at most, against what has to be there.

Each rank is a fresh process, in which a small buffer has made calls in rounds and was closed, so that kernels
are compiled and libraries loaded. Then its peak is set back, a buffer is constructed, and one dispatch of the
whole batch runs. What has to be there is: its outputs, the buffer's window, and rows of two rounds, of which
one is received while the next is sent. Of windows only pages count that this rank has touched, its peers'
among them. What of the memory is private is compared with the outputs alone: the rest of it are tables of
the call (ids, places, origins), a few bytes of a row.

Where Linux does not set peaks back, the peak of a process is that of all its life, and what it had before the
call is taken off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.sizes import HIDDEN, ROUND_TOKENS, sizes
from benchmarks.sizes import EXPERTS, TOPK
from moe_triton import EPBuffer
from moe_triton.processes import RankGroup

ITEMSIZE = 2
PIECE = 1024  # of tokens, in which routing is drawn
STATUS = Path("/proc/self/status")
# To set "VmHWM" back to what is resident now (proc_pid_clear_refs(5)).
CLEAR_REFS, RESET_PEAK = Path("/proc/self/clear_refs"), "5"


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        ranks, tokens, round_tokens, hidden: W, T, B, H.
    """

    ranks: int = 2
    tokens: int = 32_768
    round_tokens: int = ROUND_TOKENS
    hidden: int = HIDDEN


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        peak: that buffer and call added at most to what was resident.
        private: that they have added once the call is over, and no other process shares.
        outputs: of the dispatch.
        window: of the buffer.
        rounds: rows of two rounds.
    """

    peak: int
    private: int
    outputs: int
    window: int
    rounds: int

    @property
    def needed(self) -> int:
        """What has to be there."""
        return self.outputs + self.window + self.rounds

    @property
    def ratio(self) -> float:
        """What was there over what has to be."""
        return self.peak / self.needed

    def figures(self) -> dict[str, float]:
        """Ratios."""
        return {"peak_vs_needed": self.ratio, "private_vs_outputs": self.private / self.outputs}


@dataclass(frozen=True)
class Measured:
    """Of a setting, the rank whose ratio is largest."""

    setting: Setting
    memory: Memory

    @staticmethod
    def from_json(loaded: dict[str, Any]) -> Measured:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        return Measured(Setting(**loaded["setting"]), Memory(**loaded["memory"]))


def resident_bytes(field: str = "VmRSS") -> int:
    """What of this process is in memory, or was at most ("VmHWM")."""
    match = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text(encoding="ascii"))
    assert match
    return int(match[1]) * 1024


def _reset_peak() -> None:
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # a container that may not: nothing was larger before than the call will be
        return


def measure(rank: int, num_ranks: int, setting: Setting) -> Memory:
    """One call on this rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rank)
    x = torch.empty(setting.tokens, setting.hidden, dtype=torch.bfloat16).normal_(generator=generator)
    # In pieces: scores of all tokens at once would be the largest tensor that this process ever has.
    pieces = (min(PIECE, setting.tokens - first) for first in range(0, setting.tokens, PIECE))
    scores = (torch.randn(piece, EXPERTS, generator=generator) for piece in pieces)
    ids = torch.cat([each.topk(TOPK, dim=1).indices.int() for each in scores])
    with EPBuffer(**sizes(1, setting.hidden), comm_alg="fullmesh_v1") as small:
        for _ in range(2):
            small.dispatch(x[:2], ids[:2], num_recv_tokens="exact")
    _reset_peak()
    before, private = resident_bytes(), resident_bytes("RssAnon")
    with EPBuffer(**sizes(setting.round_tokens, setting.hidden), comm_alg="fullmesh_v1") as buffer:
        received = buffer.dispatch(x, ids, num_recv_tokens="exact")
        peak, private = resident_bytes("VmHWM") - before, resident_bytes("RssAnon") - private
        tensors = [each for each in received if isinstance(each, torch.Tensor)]
        outputs = sum(each.numel() * each.element_size() for each in tensors)
        rows = 2 * setting.round_tokens * TOPK * setting.hidden * ITEMSIZE
        return Memory(peak, private, outputs, buffer._communicator.window_bytes, rows)


def run(setting: Setting) -> Measured:
    """Starts the ranks, each a fresh process, and measures."""
    with RankGroup(setting.ranks) as group:
        per_rank = group.run(measure, setting, timeout_s=300)
    return Measured(setting, max(per_rank, key=lambda memory: memory.ratio))
