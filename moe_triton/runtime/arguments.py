"""Checks on what users pass, whichever way a call is spelled, and what kernels get of its tensors.

Each check raises `ArgumentError` before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist

from moe_triton.core.checks import check_choice, check_integer, check_tensor, shown
from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT, ArgumentError
from moe_triton.core.handle import DispatchHandle, DispatchOutput, PlacedHandle, Round, memory_of
from moe_triton.core.records import ORIGIN, TRAILER
from moe_triton.core.row_formats import AS_THEY_ARE, RowFormat
from moe_triton.limits import Call
from moe_triton.limits.common import MAX_IDS
from moe_triton.operators.description import Symbols, TensorArgument
from moe_triton.runtime import rows_per_rank
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.programs.shared import KEPT_TENSORS, TOKEN_DTYPES
from moe_triton.schemes import rules, scheme_type

SPECIAL = "num_zero_experts + num_copy_experts + num_const_experts"
Sizes = tuple[int, int, int, int, int, int]
_NO_EXPERT = torch.tensor(-1, dtype=torch.int32, device="cpu")
ORIGIN_WORDS, TRAILER_WORDS = ORIGIN.num_words, TRAILER.num_words
HANDLE_FIELDS = tuple(field.name for field in fields(DispatchHandle))


def check_special(counts: Sequence[object]) -> int:
    """Checks the numbers of zero, copy and constant experts, and returns their sum.

    Raises:
        ArgumentError: one is no integer, or negative.
    """
    names = "num_zero_experts", "num_copy_experts", "num_const_experts"
    numbers = [check_integer(name, count) for name, count in zip(names, counts, strict=True)]
    for name, number in zip(names, numbers, strict=True):
        if not 0 <= number < MAX_IDS:
            rule = "it counts experts, whose ids are of 32 bits"
            raise ArgumentError(name, number, rule, "Pass 0 where there are none.")
    return sum(numbers)


def whole_config(num_ranks: int, sizes: Sizes, special: Sequence[int], **chosen: Any) -> Config:
    """Settings of a buffer's whole group, which may break rules, but for those on special experts.

    Args:
        num_ranks: of the group.
        sizes: the next six fields of `Config`.
        special: numbers of zero, copy and constant experts.
        chosen: other fields.

    Raises:
        ArgumentError: numbers of special experts are none, or the product has no constant experts.
    """
    whole = Config(num_ranks, *sizes, num_special_experts=check_special(special), is_of_buffer=True, **chosen)
    call = Call(num_tokens=1, num_const_experts=special[2], is_of_buffer=True, group="expert-parallel")
    rules.check_argument("num_const_experts", whole, call)
    return whole


def is_group(name: str, value: object) -> bool:
    """Whether a group is given.

    Raises:
        ArgumentError: something else is.
    """
    if value is not None and not isinstance(value, dist.ProcessGroup):
        rule = "it must be a torch.distributed group or None"
        raise ArgumentError(name, shown(value), rule, "Pass a group.", code=INVALID_ARGUMENT)
    return value is not None


def left_of(whole: Config, members: Sequence[int], exchange: bool) -> Config:
    """Settings without the ranks that are lost, once those of the whole group keep every rule.

    Args:
        whole: of the group.
        members: its ranks that are left.
        exchange: whether there is a tensor-parallel group.

    Raises:
        ArgumentError: they do not, or the scheme lacks what they ask for.
    """
    try:
        rules.check_config(whole)
    except ArgumentError as error:
        raise error.renamed({"num_special_experts": SPECIAL}) from None
    offers = scheme_type(whole).check_offers
    if whole.num_special_experts:
        offers("special experts", SPECIAL, whole.num_special_experts)
    if exchange:
        offers("tp_group", "tp_group", "given")
        groups = "expert-parallel", "tensor-parallel"
        call = Call(num_tokens=1, tp_world_size=2, is_of_buffer=True, group=groups[0], tp_group=groups[1])
        try:
            rules.check_call(whole, call)
        except ArgumentError as error:
            raise ArgumentError("tp_group", "given", error.rule, error.remedy) from None
    shared = sum(map(whole.is_shared_rank, members))
    counts = [0 if whole.is_shared_rank(member) else whole.experts_on(member) for member in members]
    return replace(
        whole,
        num_ranks=len(members),
        num_shared_ranks=shared,
        num_experts=sum(counts),
        ranks_per_server=whole.topology.left(members).sizes,
        experts_per_rank=None if whole.experts_per_rank is None else counts,
    ).normalized()


def check_num_bytes(num_bytes: int | None, needed: int) -> None:
    """Checks the bytes of a data window against what a buffer's user allows, None for any number.

    Raises:
        ArgumentError: it is too large, or ``num_bytes`` no integer.
    """
    if num_bytes is not None and check_integer("num_bytes", num_bytes) < needed:
        rule = f"these sizes need {needed} bytes"
        remedy = f"Pass num_bytes={needed} or None, or lower num_max_tokens_per_rank."
        raise ArgumentError("num_bytes", num_bytes, rule, remedy)


def check_num_tokens(name: str, config: Config, num_tokens: int) -> None:
    """Checks that the buffer has room for so many tokens of a rank."""
    if num_tokens > config.num_max_tokens_per_rank:
        rule = f"the buffer was made for at most {config.num_max_tokens_per_rank} per rank"
        remedy = "Split the batch, or rebuild the buffer with a larger num_max_tokens_per_rank."
        raise ArgumentError(name, f"of {num_tokens} tokens", rule, remedy)


def check_order(ids: object, weights: object) -> None:
    """Checks that dispatch's ids and weights are not in each other's places.

    Raises:
        ArgumentError: they are, by their dtypes.
    """
    if not isinstance(ids, torch.Tensor) or not isinstance(weights, torch.Tensor):
        return
    if ids.is_floating_point() and not weights.is_floating_point():
        rule = f"ids are integers, and topk_weights is of {weights.dtype}: they are in each other's places"
        remedy = "The order is dispatch(x, topk_idx, topk_weights)."
        raise ArgumentError("topk_idx", f"of dtype {ids.dtype}", rule, remedy, code=INVALID_ARGUMENT)


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
        rule = "only quantised rows are smoothed"
        raise ArgumentError("smooth_scales", "given", rule, "Pass quantize='int8', or no scales.")


def check_handle(handle: DispatchHandle, buffer_id: int, communicator: Communicator) -> None:
    """Checks that a handle is this buffer's own and of its latest dispatch, and in one piece."""
    if not isinstance(handle, DispatchHandle):
        raise ArgumentError(
            "handle",
            f"a {type(handle).__name__}",
            "it must come from dispatch",
            f"Pass output.handle, the last of the fields {', '.join(DispatchOutput._fields)} of a "
            "DispatchOutput, as in combine(y, output.handle, topk_weights).",
            code=INVALID_ARGUMENT,
        )
    names = HANDLE_FIELDS
    if isinstance(handle, PlacedHandle):
        names = tuple(name for name in names if name not in handle.made_when_read)
        _check_rounds(handle, communicator)
    handle_fields = {name: _field(handle, name) for name in names}
    for name in ("buffer_id", "number"):
        check_integer(f"handle.{name}", handle_fields[name])
    if handle_fields["buffer_id"] != buffer_id:
        rule = "it has to be this buffer's own"
        raise ArgumentError("handle", "of another buffer", rule, "Use the buffer that dispatched.")
    latest = communicator.counts["dispatch"] - 1
    is_kept = communicator.has_outputs_in_window  # and written over by later dispatches
    if not (latest if is_kept else 0) <= handle_fields["number"] <= latest:
        raise ArgumentError(
            "handle",
            f"of dispatch {handle_fields['number']}",
            f"the latest is dispatch {latest}",
            "Combine before the next dispatch." if is_kept else "Pass output.handle as dispatch made it.",
        )
    check_choice("handle.dtype", handle_fields["dtype"], TOKEN_DTYPES)
    for name in KEPT_TENSORS:
        if name in handle_fields and handle_fields[name] is None:  # what else it may be, plans look at
            raise ArgumentError(
                f"handle.{name}", None, "it is needed", "Pass output.handle.", code=NULL_ARGUMENT
            )


def _check_rounds(handle: PlacedHandle, communicator: Communicator) -> None:
    """Checks what each round of a handle keeps: plans look at what the whole call has only."""
    rounds, device = _field(handle, "rounds"), communicator.backend.device
    context, config = communicator.context, communicator.context.config
    names = "num_rows", "stride", "alignment", "tokens_of_round"
    numbers = {name: check_integer(f"handle.{name}", _field(handle, name)) for name in names}
    is_whole = isinstance(rounds, tuple) and len(rounds) > 0 and all(type(each) is Round for each in rounds)
    sizes = numbers["alignment"] > 0 and min(numbers.values()) >= 0
    if not is_whole or not sizes or numbers["tokens_of_round"] != config.num_max_tokens_per_rank:
        rule = "a handle is passed as dispatch made it"
        raise ArgumentError(
            "handle.rounds", shown(rounds), rule, "Pass output.handle.", code=INVALID_ARGUMENT
        )
    if handle.__dict__.get("memory_of_rounds") == memory_of(rounds):  # as dispatch has made it
        return
    check_tensor(
        "handle.topk_idx", handle.topk_idx, shape=("T", config.num_topk), dtypes=(torch.int32,), device=device
    )
    for name in ("first_starts", "limits"):
        sizes_of_entries = (context.num_entries,)
        value = _field(handle, name)
        check_tensor(f"handle.{name}", value, shape=sizes_of_entries, dtypes=(torch.int32,), device=device)
    total = handle.num_tokens
    for number, each in enumerate(rounds):
        first, last = (min(n * config.num_max_tokens_per_rank, total) for n in (number, number + 1))
        shapes: dict[str, tuple[int, ...]] = {
            "topk_idx": (last - first, config.num_topk),
            "expand_idx": ((last - first) * config.num_topk,),
            "recv_offsets": (context.num_entries,),
            "assist_info": (ORIGIN_WORDS * context.capacity + TRAILER_WORDS,),
            "places": (context.capacity,),
            "send_counts": (config.num_experts,),
        }
        if check_integer("handle.rounds.first_token", each.first_token) != first:
            rule = f"round {number} begins with token {first}"
            name = f"handle.rounds[{number}].first_token"
            raise ArgumentError(name, each.first_token, rule, "Pass output.handle.")
        for name, shape in shapes.items():
            called, dtypes = f"handle.rounds[{number}].{name}", (torch.int32,)
            check_tensor(called, getattr(each, name), shape=shape, dtypes=dtypes, device=device)
        if (mask := each.active_mask) is not None:
            name, value = f"handle.rounds[{number}].active_mask", (last - first, config.num_topk)
            shape = value[: mask.dim()] if isinstance(mask, torch.Tensor) and mask.dim() == 1 else value
            check_tensor(name, mask, shape=shape, dtypes=(torch.bool,), device=device)


def check_routing(handle: DispatchHandle, communicator: Communicator) -> None:
    """Checks what a dispatch reads of a handle whose routing it has: nothing else says how long that is.

    Raises:
        ArgumentError: it is not as dispatch has left it.
    """
    device, topk = communicator.backend.device, communicator.context.config.num_topk
    integers, ids, mask = (torch.int32,), handle.topk_idx, handle.active_mask
    check_tensor("handle.topk_idx", ids, shape=("T", topk), dtypes=integers, device=device)
    name, numbers = "handle.expand_idx", handle.expand_idx
    check_tensor(name, numbers, shape=(ids.numel(),), dtypes=integers, device=device)
    if (firsts := handle.results_idx) is not None:
        check_tensor("handle.results_idx", firsts, shape=tuple(ids.shape), dtypes=integers, device=device)
    if mask is not None:
        is_flat = isinstance(mask, torch.Tensor) and mask.dim() == 1
        shape = (len(ids),) if is_flat else (len(ids), topk)
        check_tensor("handle.active_mask", mask, shape=shape, dtypes=(torch.bool,), device=device)
    if handle.digest != communicator.digest_ids(ids, mask):
        remedy = "Pass output.handle as dispatch made it."
        raise other_ids_error("handle.topk_idx", f"dispatch {handle.number}", remedy)


def _field(handle: DispatchHandle, name: str) -> Any:
    try:
        return getattr(handle, name)
    except AttributeError:
        rule = "a handle is passed as dispatch made it"
        remedy = "Pass output.handle."
        raise ArgumentError(f"handle.{name}", "missing", rule, remedy, code=INVALID_ARGUMENT) from None


def check_results(y: torch.Tensor, handle: DispatchHandle, communicator: Communicator) -> None:
    """Checks that there is an expert's output for each received row.

    Raises:
        ArgumentError: there is not. Tensor-parallel ranks add their rows before anybody knows how many there
            are, and so need all.
    """
    if communicator.context.exchange_rank is not None:
        needed = 2 * communicator.capacity
        rule = "tensor-parallel ranks add all {} rows that dispatch's tokens have"
    elif y.shape[0] >= rows_per_rank.capacity_of(handle, communicator):
        return  # counting received rows waits for the device
    else:
        needed, rule = handle.num_received(), "{} rows were received and each has to go back"
    if y.shape[0] < needed:
        raise ArgumentError(
            "y",
            f"of {y.shape[0]} rows",
            rule.format(needed),
            "Pass one output row per received row, in the same order.",
        )


def starts_at(place: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether results are where peers will read them. Elsewhere there, copying would overwrite them."""
    ahead = y.data_ptr() - place.data_ptr()
    if 0 < ahead < place.nbytes:
        rule = "peers read results from its start on"
        remedy = "Write them from its first row on, or pass a tensor of your own."
        raise ArgumentError("y", f"{ahead} bytes past the start of expert_output()", rule, remedy)
    return ahead == 0


CONST_ARGUMENTS = {"const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"}


def check_argument(s: Symbols, argument: TensorArgument, tensor: Any, device: torch.device) -> None:
    """Checks a tensor, where it is given and anybody looks at it. One that is not written to may be strided.

    Raises:
        ArgumentError: it is not as its description says.
    """
    if not s.is_given(argument.name) or not argument.shape or argument.of_setup:
        return
    tensor = tensor if argument.is_written else tensor.contiguous()
    name = s.operator.called(argument.name)
    check_tensor(name, tensor, shape=s.expected(argument), dtypes=s.dtypes(argument), device=device)


def inputs_of(
    s: Symbols, named: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, torch.dtype], ...]]:
    """Placeholder and argument of each tensor that kernels read; placeholders of those to copy, by dtype."""
    given = [t for t in s.operator.tensors if s.is_given(t.name)]
    inputs = tuple((placeholder, t.name) for t in given for placeholder in t.placeholders)
    copied = []
    for argument in given:
        tensor = named[argument.name]
        dtype = argument.read_as or tensor.dtype
        if not tensor.is_contiguous() or tensor.dtype != dtype:
            copied += [(placeholder, dtype) for placeholder in argument.placeholders]
    return inputs, tuple(copied)


def call_of(s: Symbols) -> Call:
    """What the rules of calls are about."""
    given = {*s.given, *(name for name in ("y_dtype", "x_dtype", "scales_dtype") if s.get(name) is not None)}
    values = {
        "version": s.operator.version,
        "operator": s.operator.name,
        "num_tokens": s["BS"],
        "quant_mode": s["quant_mode"] or s.get("row_format", AS_THEY_ARE).quant_mode,
        "has_active_mask": "active_mask" in given and bool(s["BS"] != 0),  # one of no tokens is none
        "mask_dims": len(s.given.get("active_mask", (1,))),
        "has_const_args": given >= CONST_ARGUMENTS,
    }
    for field in fields(Call):
        if field.name.startswith("has_"):
            values.setdefault(field.name, field.name.removeprefix("has_") in given)
        elif field.name in s:
            values.setdefault(field.name, s[field.name])
    return Call(**values)


def taken_ids(
    communicator: Communicator,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    num_ids: int,
    called: Callable[[str], str],
    keep: bool = False,
) -> torch.Tensor:
    """Ids as kernels read them, those of masked ranks' experts marked; see `checked_ids`.

    Raises:
        ArgumentError: an id is not, or a mask of tokens has a True after a False.
    """
    return communicator.masks.marked(checked_ids(communicator, ids, mask, num_ids, called, keep))


def checked_ids(
    communicator: Communicator,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    num_ids: int,
    called: Callable[[str], str],
    keep: bool = False,
) -> torch.Tensor:
    """Ids in int32, once they are below their number and distinct in a row.

    A duplicate is refused for memory's sake: a source has as many slots per expert as it has tokens. A host
    whose device works on reads neither ids nor mask: kernels send no id that names no expert, and take the
    tokens up to a mask's first False.

    Args:
        communicator: which calls.
        ids: (T, K) int32 or int64.
        mask: (T,) or (T, K) bool, or None.
        num_ids: legal ids.
        called: what the caller calls an argument.
        keep: whether the caller may write over ``ids`` before they are read for the last time.

    Raises:
        ArgumentError: an id is not, or a mask of tokens has a True after a False.
    """
    backend, bad = communicator.backend, None
    taken = ids
    if keep or ids.dtype != torch.int32:
        taken, bad = backend.take_ids(ids, num_ids)
    elif mask is None:
        bad = backend.first_bad_id(ids, num_ids)
    if mask is not None and not backend.is_asynchronous:
        # What an inactive entry holds does not matter.
        if mask.dim() == 1:
            active = taken[: _active_tokens(mask, called)]
        else:
            active = active_entries(communicator, taken, mask)
        bad = backend.first_bad_id(active, num_ids)
    if bad is not None:
        raise bad_id_error(called("topk_idx"), ids, bad, num_ids)
    return taken


def active_entries(communicator: Communicator, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Ids, with -1 for those that a mask leaves out, in recycled memory. For hosts that read ids.

    Args:
        communicator: which calls.
        ids: (T, K) int32.
        mask: (T, K) or (T, 1) bool.
    """
    active = communicator.backend.empty(ids.shape, ids.dtype)
    return torch.where(mask, ids, _NO_EXPERT, out=active)


def other_ids_error(name: str, dispatch: str, remedy: str) -> ArgumentError:
    """What to say of a combine by other ids than its dispatch's, which waits for what nobody sends."""
    value = f"other than what {dispatch} had (entries that a mask leaves out aside)"
    rule = "combine takes the ids and the mask of its dispatch: it is their results that come"
    return ArgumentError(name, value, rule, remedy)


def _active_tokens(mask: torch.Tensor, called: Callable[[str], str]) -> int:
    """How many tokens a 1-D mask leaves.

    Raises:
        ArgumentError: they do not come first.
    """
    flags = mask.tolist()  # so few that torch's operators would take longer
    active = flags.count(True)
    if False in flags[:active]:
        token = flags.index(True, flags.index(False))
        rule = "active tokens come first in a 1-D mask"
        remedy = "Sort the tokens, or pass a (BS, K) mask."
        raise ArgumentError(called("active_mask"), f"True at token {token} after a False", rule, remedy)
    return active
