"""Checks on what users pass to a call. Each raises `ArgumentError` before anything is sent."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from moe_triton.backends.base import Backend
from moe_triton.core.checks import check_choice, check_integer, check_tensor
from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.handle import DispatchHandle
from moe_triton.layout import TRAILER_WORDS
from moe_triton.runtime.communicator import Communicator

TOKEN_DTYPES = (torch.bfloat16, torch.float16)
HANDLE_FIELDS = tuple(field.name for field in fields(DispatchHandle))


def check_tokens(config: Config, x: torch.Tensor, device: torch.device) -> int:
    """Checks dispatch's tokens and returns how many there are."""
    check_tensor("x", x, shape=("T", config.hidden), dtypes=TOKEN_DTYPES, device=device)
    num_tokens = int(x.shape[0])
    check_num_tokens("x", config, num_tokens)
    return num_tokens


def check_num_tokens(name: str, config: Config, num_tokens: int) -> None:
    """Checks that the buffer has room for so many tokens of a rank."""
    if num_tokens > config.num_max_tokens_per_rank:
        raise ArgumentError(
            name,
            f"of {num_tokens} tokens",
            f"the buffer was made for at most {config.num_max_tokens_per_rank} per rank",
            "Split the batch, or rebuild the buffer with a larger num_max_tokens_per_rank.",
        )


def check_ids(config: Config, topk_idx: torch.Tensor, num_tokens: int, backend: Backend) -> torch.Tensor:
    """Checks the routing and returns it as int32.

    A duplicate is refused for memory's sake: a source has as many slots per expert as it has tokens.
    """
    check_tensor(
        "topk_idx",
        topk_idx,
        shape=(num_tokens, config.num_topk),
        dtypes=(torch.int32, torch.int64),
        device=backend.device,
    )
    # A private copy: combine reads it again, after the user may have written over theirs.
    ids, bad = backend.take_ids(topk_idx, config.num_experts)
    if bad is None:
        return ids
    raise bad_id_error("topk_idx", topk_idx, bad, config.num_experts)


def bad_id_error(name: str, ids: torch.Tensor, bad: tuple[int, str], num_experts: int) -> ArgumentError:
    """What to say of an id.

    Args:
        name: of the argument.
        ids: (T, K), as the user passed them.
        bad: position in the flattened ids, and which rule it breaks.
        num_experts: ids below it name experts.
    """
    position, rule = bad
    token, k = divmod(position, ids.shape[1])
    value = f"{int(ids[token, k])} at token {token}, k {k}"
    if rule == "duplicate":
        return ArgumentError(
            name, value, "the experts of a token are distinct", "Use -1 where there is no expert."
        )
    return ArgumentError(name, value, f"ids are 0 to {num_experts - 1}, or -1 for none", "Check the gate.")


def check_weights(
    config: Config, topk_weights: torch.Tensor | None, num_tokens: int, device: torch.device
) -> None:
    """Checks the routing weights, where there are any."""
    if topk_weights is not None:
        shape = (num_tokens, config.num_topk)
        check_tensor("topk_weights", topk_weights, shape=shape, dtypes=(torch.float32,), device=device)


def check_smooth_scales(
    config: Config, smooth_scales: torch.Tensor | None, quantize: str | None, device: torch.device
) -> None:
    """Checks the smooth scales, where there are any."""
    if smooth_scales is None:
        return
    if quantize is None:
        raise ArgumentError(
            "smooth_scales",
            "given",
            "only quantised rows are smoothed",
            "Pass quantize='int8', or no scales.",
        )
    shape = (config.num_shared_experts + config.num_experts, config.hidden)
    check_tensor("smooth_scales", smooth_scales, shape=shape, dtypes=(torch.float32,), device=device)


def check_handle(handle: DispatchHandle, buffer_id: int, communicator: Communicator) -> None:
    """Checks that a handle is this buffer's own and of its latest dispatch, and in one piece."""
    if not isinstance(handle, DispatchHandle):
        raise ArgumentError(
            "handle",
            f"a {type(handle).__name__}",
            "it must come from dispatch",
            "Pass output.handle.",
            code=INVALID_ARGUMENT,
        )
    found = {name: _field(handle, name) for name in HANDLE_FIELDS}
    for name in ("buffer_id", "number"):
        check_integer(f"handle.{name}", found[name])
    if found["buffer_id"] != buffer_id:
        raise ArgumentError(
            "handle",
            "of another buffer",
            "combine needs this buffer's own",
            "Use the buffer that dispatched.",
        )
    latest = communicator.counts["dispatch"] - 1
    if found["number"] != latest:
        raise ArgumentError(
            "handle",
            f"of dispatch {found['number']}",
            f"the latest is dispatch {latest}",
            "Combine before the next dispatch.",
        )
    check_choice("handle.dtype", found["dtype"], TOKEN_DTYPES)
    config, device = communicator.config, communicator.backend.device
    ids = check_tensor(
        "handle.topk_idx",
        found["topk_idx"],
        shape=("T", config.num_topk),
        dtypes=(torch.int32,),
        device=device,
    )
    lengths = {
        "expand_idx": ids.numel(),
        "recv_offsets": communicator.site.num_entries,
        "assist_info": 3 * communicator.capacity + TRAILER_WORDS,
    }
    for name, length in lengths.items():
        check_tensor(f"handle.{name}", found[name], shape=(length,), dtypes=(torch.int32,), device=device)
    check_num_tokens("handle.topk_idx", config, int(ids.shape[0]))


def _field(handle: DispatchHandle, name: str) -> Any:
    try:
        return getattr(handle, name)
    except AttributeError:
        raise ArgumentError(
            f"handle.{name}",
            "missing",
            "a handle is passed as dispatch made it",
            "Pass output.handle.",
            code=INVALID_ARGUMENT,
        ) from None


def check_results(
    config: Config, y: torch.Tensor, handle: DispatchHandle, capacity: int, device: torch.device
) -> None:
    """Checks the expert outputs: a row for each received one."""
    check_tensor("y", y, shape=("n", config.hidden), dtypes=(handle.dtype,), device=device)
    # Counting received rows waits for the device: a full-sized y needs no count.
    if y.shape[0] < capacity and y.shape[0] < handle.num_received():
        raise ArgumentError(
            "y",
            f"of {y.shape[0]} rows",
            f"{handle.num_received()} rows were received and each has to go back",
            "Pass one output row per received row, in the same order.",
        )
