"""Bitwise comparison of a round with the reference."""

from __future__ import annotations

import torch

from moe_triton.core.handle import DispatchOutput
from moe_triton.reference import Received


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
