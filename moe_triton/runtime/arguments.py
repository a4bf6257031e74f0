"""Checks on what users pass to a call. Each raises `ArgumentError` before anything is sent."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from moe_triton.backends.base import Backend
from moe_triton.core.call_program import Argument
from moe_triton.core.checks import check_choice, check_integer, check_tensor
from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.row_formats import RowFormat
from moe_triton.handle import DispatchHandle
from moe_triton.runtime.buffer_calls import TOKEN_DTYPES, handle_arguments
from moe_triton.runtime.communicator import Communicator

HANDLE_FIELDS = tuple(field.name for field in fields(DispatchHandle))
Sizes = dict[str, int]


def check(argument: Argument, value: object, sizes: Sizes, device: torch.device) -> None:
    """Checks a tensor that a call was given.

    Args:
        argument: what it must be like.
        value: what the user passed.
        sizes: those that are known by now, by name; what this tensor is first to show is added.
        device: where it must be.
    """
    if value is None and argument.optional:
        return
    shape = [sizes.get(size, size) if isinstance(size, str) else size for size in argument.shape]
    tensor = check_tensor(argument.name, value, shape=shape, dtypes=argument.dtypes, device=device)
    for want, size in zip(argument.shape, tensor.shape, strict=True):
        if isinstance(want, str):
            sizes[want] = size


def check_num_tokens(name: str, config: Config, num_tokens: int) -> None:
    """Checks that the buffer has room for so many tokens of a rank."""
    if num_tokens > config.num_max_tokens_per_rank:
        raise ArgumentError(
            name,
            f"of {num_tokens} tokens",
            f"the buffer was made for at most {config.num_max_tokens_per_rank} per rank",
            "Split the batch, or rebuild the buffer with a larger num_max_tokens_per_rank.",
        )


def take_ids(config: Config, topk_idx: torch.Tensor, backend: Backend) -> torch.Tensor:
    """Checks the routing's ids and returns them as int32.

    A duplicate is refused for memory's sake: a source has as many slots per expert as it has tokens.
    """
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


def check_smoothing(smooth_scales: torch.Tensor | None, row_format: RowFormat) -> None:
    """Checks that there are smooth scales for quantised rows only."""
    if smooth_scales is not None and not row_format.is_quantized:
        raise ArgumentError(
            "smooth_scales",
            "given",
            "only quantised rows are smoothed",
            "Pass quantize='int8', or no scales.",
        )


def check_handle(handle: DispatchHandle, buffer_id: int, communicator: Communicator) -> None:
    """Checks that a handle is this buffer's own and of its latest dispatch, and in one piece."""
    if not isinstance(handle, DispatchHandle):
        is_tensor = isinstance(handle, torch.Tensor)
        raise ArgumentError(
            "handle",
            f"a {type(handle).__name__}",
            "it must come from dispatch",
            "The order is combine(y, handle, topk_weights)." if is_tensor else "Pass output.handle.",
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
    sizes: Sizes = {}
    for argument in handle_arguments(communicator.site):
        check(argument, found[argument.name.removeprefix("handle.")], sizes, communicator.backend.device)
        if "T" in sizes:
            sizes["ids"] = sizes["T"] * communicator.config.num_topk
    check_num_tokens("handle.topk_idx", communicator.config, sizes["T"])


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


def check_results(y: torch.Tensor, handle: DispatchHandle, capacity: int) -> None:
    """Checks that there is an expert's output for each received row."""
    # Counting received rows waits for the device: a full-sized y needs no count.
    if y.shape[0] < capacity and y.shape[0] < handle.num_received():
        raise ArgumentError(
            "y",
            f"of {y.shape[0]} rows",
            f"{handle.num_received()} rows were received and each has to go back",
            "Pass one output row per received row, in the same order.",
        )


def starts_at(place: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether results are where peers will read them. Elsewhere there, copying would overwrite them."""
    ahead = y.data_ptr() - place.data_ptr()
    if 0 < ahead < place.nbytes:
        raise ArgumentError(
            "y",
            f"{ahead} bytes past the start of expert_output()",
            "peers read results from its start on",
            "Write them from its first row on, or pass a tensor of your own.",
        )
    return ahead == 0
