"""An MoE layer over several ranks, from gate to output, against a dense layer that computes the same.

    torchrun --nproc-per-node 4 examples/moe_layer.py

Without torchrun it is one rank by itself.

Each rank has tokens of its own and a share of the experts. Exits with 1 if the two layers differ.

Shapes: T tokens of this rank, H hidden, F inner size of an expert, E experts of this rank (all of them in the
dense layer), K experts per token, A rows that a rank can receive at most.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe_triton import EPBuffer

MAX_TOKENS, HIDDEN, INNER, NUM_EXPERTS, TOPK = 64, 1024, 512, 16, 4
SEED = 7
# Both layers round to bf16 at the same places. Their matrix products add in different orders.
TOLERANCE = 0.01  # of the largest output


class Experts(nn.Module):
    """Gated feed-forward networks, one for each expert: ``down(silu(gate(x)) * up(x))``.

    Args:
        gate_up: (E, 2 F, H) bf16.
        down: (E, H, F) bf16.
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)

    def one(self, expert: int, rows: Tensor) -> Tensor:
        """An expert's output for (n, H) rows."""
        gate, up = functional.linear(rows, self.gate_up[expert]).chunk(2, dim=1)
        return functional.linear(functional.silu(gate) * up, self.down[expert])

    def forward(self, rows: Tensor, counts: Tensor, out: Tensor) -> None:
        """Writes the experts' outputs for (A, H) rows, which stand expert by expert, to (A, H) out.

        On a device this is one grouped GEMM, which reads the (E,) counts there.
        """
        first = 0
        for expert, count in enumerate(counts.tolist()):
            out[first : first + count] = self.one(expert, rows[first : first + count])
            first += count


class Gate(nn.Module):
    """Chooses each token's K experts, and their weights, which add up to one."""

    def __init__(self, weight: Tensor, topk: int) -> None:
        super().__init__()
        self.weight, self.topk = nn.Parameter(weight), topk

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, K) fp32 weights and (T, K) ids of (T, H) tokens."""
        scores = functional.linear(x.float(), self.weight).softmax(dim=1)
        weights, ids = scores.topk(self.topk, dim=1)
        return weights / weights.sum(dim=1, keepdim=True), ids


class MoELayer(nn.Module):
    """The layer over all ranks of a buffer's group: this rank holds the experts `experts`."""

    def __init__(self, buffer: EPBuffer, gate: Gate, experts: Experts) -> None:
        super().__init__()
        self.buffer, self.gate, self.experts = buffer, gate, experts

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) of (T, H). Collective: every rank calls it, with no tokens where it has none."""
        weights, ids = self.gate(x)
        received = self.buffer.dispatch(x, ids)
        y = self.buffer.expert_output()
        self.experts(received.tokens, received.tokens_per_expert, y)
        return self.buffer.combine(y, received.handle, weights)


class DenseLayer(nn.Module):
    """The same on one rank, with all experts: every expert computes every token."""

    def __init__(self, gate: Gate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) of (T, H)."""
        weights, ids = self.gate(x)
        factors = torch.zeros(len(x), len(self.experts.down)).scatter(1, ids, weights)
        out = torch.zeros(x.shape)
        for expert, factor in enumerate(factors.T):
            out += self.experts.one(expert, x).float() * factor[:, None]
        return out.to(x.dtype)


def all_weights() -> tuple[Tensor, Tensor, Tensor]:
    """The gate's and all experts' weights, alike on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = (NUM_EXPERTS, HIDDEN), (NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER)
    gate, gate_up, down = (torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes)
    return gate, gate_up.bfloat16(), down.bfloat16()


@torch.no_grad()
def main() -> int:
    """Runs both layers on this rank's tokens: 0 if they agree on every rank, else 1."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    gate, gate_up, down = all_weights()
    num_tokens = max(MAX_TOKENS - 8 * rank, 0)  # ranks need not have as many
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(SEED + 1 + rank)).bfloat16()
    with EPBuffer(
        num_max_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=NUM_EXPERTS
    ) as buffer:
        mine = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
        layer = MoELayer(buffer, Gate(gate, TOPK), Experts(gate_up[mine], down[mine]))
        out = layer(x)
    expected = DenseLayer(Gate(gate, TOPK), Experts(gate_up, down))(x)
    difference = (out.float() - expected.float()).abs()
    # The worst of all ranks, on all ranks, so that all exit alike. A NaN is no agreement.
    figures = torch.stack([difference.nan_to_num(torch.inf), expected.float().abs()]).flatten(1)
    worst = figures.max(dim=1).values if num_tokens else torch.zeros(2)
    # With its end, in one write: torchrun's ranks do not buffer, and print writes a line's end by itself.
    print(f"rank {rank}: {num_tokens} tokens, largest difference {worst[0]:.1e} of {worst[1]:.2f}\n", end="")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    agree = bool(worst[0] <= TOLERANCE * worst[1])
    if rank == 0:
        print(f"{'same as' if agree else 'DIFFERS FROM'} the dense layer, within {TOLERANCE:.0%}")
    return 0 if agree else 1


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
