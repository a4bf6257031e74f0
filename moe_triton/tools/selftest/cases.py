"""Cases of dispatch and combine: what a group is built for, and what every rank brings to each round.

Shapes: T tokens of a rank, K experts per token, H hidden, S shared experts, M routed experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moe_triton import EPBuffer, reference
from moe_triton.backends.base import Backend
from moe_triton.core.config import Config
from moe_triton.core.handle import DispatchOutput
from moe_triton.reference import Received

Routing = Literal["uniform", "skewed", "one expert set", "sparse", "none"]


@dataclass(frozen=True)
class Case:
    """A group and its rounds. Everything that a rank brings follows from the seed.

    Attributes:
        config: the group's settings.
        seed: of tokens, routing and weights.
        routing: how experts are chosen; "sparse" and "none" have ids of -1.
        tokens: of each rank in round 0; in the next round each rank has its neighbour's number.
        quantize: how rows travel, as `EPBuffer.dispatch` takes it.
        weights: routing weights are given.
        smooth: smooth scales are given.
        dtype: of the tokens.
        rounds: of dispatch and combine.
        num_blocks: blocks per kernel, None for what suits the machine.
        kernels: of the CPU back end.
    """

    config: Config
    seed: int
    routing: Routing
    tokens: tuple[int, ...]
    quantize: str | None = None
    weights: bool = True
    smooth: bool = False
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 2
    num_blocks: int | None = None
    kernels: str = "triton"


@dataclass(frozen=True)
class Inputs:
    """What one rank brings to one round."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device) -> Inputs:
        """The same on a device."""
        return Inputs(self.x.to(device), self.topk_idx.to(device), self.topk_weights.to(device))


def ids_of(case: Case, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """(T, K) int32 routing."""
    c = case.config
    if case.routing == "one expert set":
        # The same K experts for every token of every rank: all other experts get nothing.
        own = torch.Generator().manual_seed(case.seed)
        return torch.randperm(c.num_experts, generator=own)[: c.num_topk].int().repeat(num_tokens, 1)
    popularity = torch.rand(num_tokens, c.num_experts, generator=generator)
    if case.routing == "skewed":
        popularity += torch.linspace(2, 0, c.num_experts) ** 3
    ids = popularity.topk(c.num_topk, dim=1).indices.int()
    if case.routing == "none":
        ids[:] = -1
    if case.routing == "sparse":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    return ids


def inputs_of(case: Case, rank: int, round_number: int) -> Inputs:
    """A rank's tokens, routing and weights in one round."""
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + rank * 1_009 + round_number)
    num_tokens = case.tokens[(rank + round_number) % len(case.tokens)]
    c = case.config
    x = (torch.randn(num_tokens, c.hidden, generator=generator) * 3).to(case.dtype)
    weights = torch.rand(num_tokens, c.num_topk, generator=generator)
    return Inputs(x, ids_of(case, num_tokens, generator), weights)


def smooth_scales_of(case: Case) -> torch.Tensor | None:
    """(S + M, H) fp32, the same on every rank."""
    if not case.smooth:
        return None
    generator = torch.Generator().manual_seed(case.seed + 17)
    rows = case.config.num_shared_experts + case.config.num_experts
    return torch.rand(rows, case.config.hidden, generator=generator) + 0.5


def experts_of(case: Case, rank: int, tokens: torch.Tensor) -> torch.Tensor:
    """A stand-in for experts: different on every rank, and bit-exact wherever it is computed."""
    return (tokens.float() * (0.25 + rank) + rank).to(case.dtype)


def make_buffer(case: Case, **options: Any) -> EPBuffer:
    """The buffer of a case. Collective."""
    alike = (
        *("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts", "num_shared_experts"),
        *("num_shared_ranks", "experts_per_rank", "product", "ranks_per_server"),
    )
    given: dict[str, Any] = {name: getattr(case.config, name) for name in alike}
    given |= {"num_blocks": case.num_blocks, "kernels": case.kernels, "timeout_s": 30.0, **options}
    return EPBuffer(comm_alg=case.config.scheme, relaxed=True, **given)


def dispatched(
    buffer: EPBuffer,
    case: Case,
    inputs: Inputs,
    smooth: torch.Tensor | None = None,
    out: DispatchOutput | None = None,
) -> DispatchOutput:
    """Dispatches a rank's inputs as the case says, to new tensors or to those of an earlier output."""
    weights = inputs.topk_weights if case.weights else None
    return buffer.dispatch(
        inputs.x, inputs.topk_idx, weights, quantize=case.quantize, smooth_scales=smooth, out=out
    )


def combined(
    buffer: EPBuffer, case: Case, inputs: Inputs, output: DispatchOutput, y: torch.Tensor | None = None
) -> torch.Tensor:
    """Combines the experts' results for a dispatch; those of `experts_of` if none are given."""
    if y is None:
        y = experts_of(case, buffer.rank, output.tokens)
    return buffer.combine(y, output.handle, inputs.topk_weights if case.weights else None)


def one_round(
    buffer: EPBuffer, case: Case, inputs: Inputs, smooth: torch.Tensor | None
) -> tuple[DispatchOutput, torch.Tensor]:
    """Dispatch, experts, combine."""
    output = dispatched(buffer, case, inputs, smooth)
    return output, combined(buffer, case, inputs, output)


def finish(buffer: EPBuffer, backend: Backend) -> None:
    """Waits until all that was run has ended, and raises what the buffer's runs met.

    Args:
        buffer: whose runs may return before they have ended.
        backend: of this rank's device.
    """
    backend.synchronize()
    buffer.synchronize()


def expected_dispatch(case: Case, everyone: Sequence[Inputs]) -> list[reference.Received]:
    """What every rank must receive of all ranks' inputs, by the reference model."""
    x, ids = [i.x for i in everyone], [i.topk_idx for i in everyone]
    weights = [i.topk_weights for i in everyone] if case.weights else None
    smooth = smooth_scales_of(case)
    return reference.dispatch(case.config, x, ids, weights, quantize=case.quantize, smooth_scales=smooth)


def expected_round(case: Case, round_number: int) -> tuple[list[reference.Received], list[torch.Tensor]]:
    """What every rank must receive, and what it must get back, by the reference model."""
    everyone = [inputs_of(case, rank, round_number) for rank in range(case.config.num_ranks)]
    weights = [i.topk_weights for i in everyone] if case.weights else None
    ids = [i.topk_idx for i in everyone]
    received = expected_dispatch(case, everyone)
    y = [experts_of(case, rank, r.tokens) for rank, r in enumerate(received)]
    return received, reference.combine(case.config, y, received, ids, weights)


def wrong_parts(
    output: DispatchOutput, combined: torch.Tensor, received: Received, expected: torch.Tensor
) -> list[str]:
    """Names of the parts of a round that differ in any bit, and how. Waits for the device.

    Args:
        output: of dispatch.
        combined: (T, H), of combine.
        received: the expected result of dispatch.
        expected: the expected result of combine.
    """
    wrong = wrong_received(output, received)
    text = difference("combined", combined.cpu(), expected)
    return [*wrong, text] if text else wrong


def wrong_received(output: DispatchOutput, received: Received) -> list[str]:
    """Names of the parts of a dispatch that differ in any bit, and how. Waits for the device.

    Args:
        output: of dispatch.
        received: the expected result.
    """
    n = len(received.origins)
    handle = output.handle
    pairs: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {
        "tokens": (output.tokens[:n], received.tokens),
        "scales": (None if output.scales is None else output.scales[:n], received.scales),
        "weights": (None if output.weights is None else output.weights[:n], received.weights),
        "tokens_per_expert": (output.tokens_per_expert, received.tokens_per_expert),
        "recv_offsets": (handle.recv_offsets, received.recv_offsets),
        "origins": (handle.origins[:n], received.origins),
        "expand_idx": (handle.expand_idx, received.expand_idx),
    }
    wrong = []
    for name, (have, want) in pairs.items():
        if have is not None and want is not None:
            text = difference(name, have.cpu(), want)
        else:
            text = None if have is want else f"{name} is {'missing' if have is None else 'not asked for'}"
        if text:
            wrong.append(text)
    return wrong


def difference(name: str, have: torch.Tensor, want: torch.Tensor) -> str | None:
    """How a tensor differs in its bits, or None. Zeros of different signs differ."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return f"{name} is {have.dtype} {tuple(have.shape)} instead of {want.dtype} {tuple(want.shape)}"
    ours, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (have, want))
    if torch.equal(ours, theirs):
        return None
    at = (ours != theirs).view(-1, have.element_size()).any(dim=1).nonzero().flatten()
    first = int(at[0])
    pair = f"{have.reshape(-1)[first].item()} instead of {want.reshape(-1)[first].item()}"
    return f"{name} differs in {len(at)} of {have.numel()} elements, first in {first}: {pair}"
