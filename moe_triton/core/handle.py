"""What dispatch gives back.

Shapes: T tokens of this rank, K experts per token, H hidden, EP ranks, E experts on this rank (1 on a
rank of shared experts), A rows that a dispatch can deliver here at most (`Config.receive_capacity`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from moe_triton.core.records import ORIGIN, TRAILER, TRAILER_MARK
from moe_triton.core.traffic import Traffic
from moe_triton.core.uncopied import Uncopied, Unpickled

OF_RANKS = "results_idx", "local_topk_idx", "local_topk_weights"
"""Fields that a dispatch with ``do_expand=False`` sets."""
_NOT_ALWAYS = (*OF_RANKS, "active_mask")


@dataclass(frozen=True, eq=False, init=False)
class DispatchHandle(Unpickled):
    """What combine needs to send rows back and to know what it waits for. Made by dispatch only.

    Attributes:
        buffer_id: which buffer made it.
        number: which dispatch of that buffer, from 0. Only the latest one can be combined.
        dtype: of the tokens that were dispatched, and so of combine's input and result.
        topk_idx: (T, K) int32, this rank's routing, -1 for no expert; on an NPU also for entries that
            ``active_mask`` leaves out; ``-2 - id`` for an expert that is lost (`lost`). With
            `experts_per_rank` experts are numbered as if each rank had as many as the one with most; E and A
            of the others are that rank's then.
        expand_idx: (T * K,) int32, how many earlier entries of this rank chose the same expert.
        recv_offsets: (E * EP,) int32, inclusive prefix sums of the rows received, expert by expert and
            within an expert source by source (ep_recv_counts in torch_npu). The last one is the total. With
            ``do_expand=False`` all rows count as the first expert's.
        assist_info: (3 A + 2,) int32, ``origins`` and behind them their trailer (`moe_triton.layout`).
        num_ranks: of the group.
        num_local_experts: of this rank, 1 on a rank of shared experts.
        num_shared_experts: S, of the group.
        digest: stands for the entries of ``topk_idx`` that take part, which combine looks whether they still
            do; None on an NPU, where the host does not read them.
        exchange_counts: (2,) int32, rows of each tensor-parallel rank, or None where there is one only.
        active_mask: (T,) or (T, K) bool, a copy of what dispatch was given, or None.
        tables: int32, what the scheme keeps for combine besides (`moe_triton.schemes.scheme.KeptTables`), or
            None where it keeps nothing.
        results_idx: (T, K) int32 of a dispatch with ``do_expand=False``: the first expert of each rank that a
            token went to, ascending, -1 behind them. By it combine finds the ranks' rows.
        local_topk_idx: (n, K) int32 of such a dispatch: the experts of this rank that each received row is
            for, counted from its first one, at the token's k; -1 at the k of other ranks, and where there is
            none. Rows at and past the total are undefined, here and in the weights.
        local_topk_weights: (n, K) fp32: the weights of these, 0 where there is none; None where dispatch was
            given none.
        traffic: what the dispatch has posted to queues, in all of its rounds; None where they lead to no
            peer, and on an NPU, where it has not run yet: `EPBuffer.traffic` waits for it.

    Examples:
        >>> handle = buffer.dispatch(x, topk_idx).handle
        >>> handle.num_tokens, handle.origins.shape
        (16, torch.Size([1024, 3]))
    """

    _uncopied: ClassVar[str] = (
        "it belongs to the latest dispatch of a buffer of this process, and no other process can combine it. "
        "Send the tensors of it that are needed; copies within the process work."
    )

    made_when_read: ClassVar[frozenset[str]] = frozenset()
    """Fields that nobody but their readers needs, and that take time to make."""

    buffer_id: int
    number: int
    dtype: torch.dtype
    topk_idx: torch.Tensor = field(repr=False)
    expand_idx: torch.Tensor = field(repr=False)
    recv_offsets: torch.Tensor = field(repr=False)
    assist_info: torch.Tensor = field(repr=False)
    digest: int | None = field(repr=False)
    num_ranks: int = field(repr=False)
    num_local_experts: int = field(repr=False)
    num_shared_experts: int = field(default=0, repr=False)
    exchange_counts: torch.Tensor | None = field(default=None, repr=False)
    tables: torch.Tensor | None = field(default=None, repr=False)
    traffic: Traffic | None = field(default=None, repr=False)
    # Without defaults: a plain dispatch does not set them, and `__getattr__` says that they are None.
    active_mask: torch.Tensor | None = field(repr=False)  # type: ignore[misc]
    results_idx: torch.Tensor | None = field(repr=False)  # type: ignore[misc]
    local_topk_idx: torch.Tensor | None = field(repr=False)  # type: ignore[misc]
    local_topk_weights: torch.Tensor | None = field(repr=False)  # type: ignore[misc]

    def __init__(self, **values: Any) -> None:
        # Frozen dataclasses set field by field, which costs three times as much, in every dispatch.
        self.__dict__.update(values)

    @property
    def dispatched(self) -> int:
        """The dispatch of the buffer that began it: the first round of several."""
        return self.number

    def note_traffic(self, traffic: Traffic | None) -> None:
        """For the buffer that made it: what its dispatch has posted."""
        self.__dict__["traffic"] = traffic

    def __getattr__(self, name: str) -> Any:
        # Native calls keep combine's inputs as memory, and make tensors and numbers of it on first access.
        memory = self.__dict__.get("_memory")
        try:
            if memory is None:
                raise AttributeError(name, name=name, obj=self)
            made = memory.get(name)
        except AttributeError:
            if name not in _NOT_ALWAYS:
                raise
            made = None
        self.__dict__[name] = made
        return made

    def _state(self) -> dict[str, Any]:
        """With all tensors, without the memory that belongs to the buffer."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __copy__(self) -> DispatchHandle:
        return DispatchHandle(**self._state())

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchHandle:
        return DispatchHandle(**copy.deepcopy(self._state(), memo))

    @property
    def origins(self) -> torch.Tensor:
        """(A, 3) int32, (source rank, token, k) of each received row (assist_info_for_combine).

        Rows at and past the total are undefined.
        """
        return self.assist_info[: -TRAILER.num_words].view(-1, ORIGIN.num_words)

    @property
    def lost(self) -> torch.Tensor:
        """(T, K + S) bool: which results the sum of a token is without, because a rank was masked.

        Of a dispatch those that were not sent, and once combine has begun those that did not come back, too.
        The S columns of shared experts are False: their ranks cannot be masked. A new tensor each time.

        Examples:
            >>> buffer.dispatch(x, topk_idx).handle.lost.any().item()
            False
        """
        ids = self.topk_idx
        lost = ids < -1
        if self.results_idx is not None and len(ids):
            lost |= _are_lost_with(ids, self.results_idx)
        if (mask := self.active_mask) is not None:
            lost &= mask if mask.dim() == 2 else mask[:, None]
        return torch.cat([lost, lost.new_zeros(len(ids), self.num_shared_experts)], 1)

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank dispatched (T)."""
        return int(self.topk_idx.shape[0])

    @property
    def tokens_per_expert_list(self) -> list[int]:
        """Rows of each of this rank's experts. Reads device memory: on an NPU this waits for the stream.

        Examples:
            >>> buffer.dispatch(x, topk_idx).handle.tokens_per_expert_list[:2]
            [8, 8]
        """
        if self.local_topk_idx is not None:
            local = self.local_topk_idx[: self.num_received()].flatten()
            return local[local >= 0].bincount(minlength=self.num_local_experts).tolist()
        entries = self.num_ranks * self.num_local_experts
        ends = [0, *self.recv_offsets[:entries][self.num_ranks - 1 :: self.num_ranks].tolist()]
        return [last - first for first, last in pairwise(ends)]

    def num_received(self) -> int:
        """Rows that arrived. Reads device memory: on an NPU this waits for the stream.

        Examples:
            >>> buffer.dispatch(x, topk_idx).handle.num_received()
            128
        """
        return int(self.recv_offsets[-1])


def _are_lost_with(ids: torch.Tensor, results_idx: torch.Tensor) -> torch.Tensor:
    """(T, K) bool: which entries share a rank's result that is lost; its first expert stands for the rank."""
    firsts = torch.where(results_idx < -1, -2 - results_idx, results_idx)
    whole = torch.where(ids < -1, -2 - ids, ids)
    is_before = (firsts[:, None] <= whole[:, :, None]) & (firsts[:, None] >= 0)
    own = torch.where(is_before, firsts[:, None], -1).argmax(2)
    return (results_idx < -1).gather(1, own) & is_before.any(2)


class Round(NamedTuple):
    """One round of a dispatch that was sent in rounds, or whose rows have places: as its combine takes it.

    Attributes:
        first_token: of this rank's tokens the first that went in it.
        topk_idx: (t, K) int32, of its t tokens; with ``do_expand=False`` their ``results_idx``.
        expand_idx: (t * K,) int32, how many earlier entries of the round chose the same expert.
        recv_offsets: (E * EP,) int32, inclusive prefix sums of the rows received in it.
        assist_info: (3 A + 2,) int32, their origins, whose tokens count from the round's first.
        places: (A,) int32, the row of the outputs that each of them is.
        send_counts: int32, this rank's rows for each expert of the group.
        active_mask: (t,) or (t, K) bool, or None; with ``do_expand=False`` None.
        tables: int32, what the scheme keeps for combine, or None.
        exchange_counts: None.
    """

    first_token: int
    topk_idx: torch.Tensor
    expand_idx: torch.Tensor
    recv_offsets: torch.Tensor
    assist_info: torch.Tensor
    places: torch.Tensor
    send_counts: torch.Tensor
    active_mask: torch.Tensor | None
    tables: torch.Tensor | None
    exchange_counts: None = None


def memory_of(rounds: tuple[Round, ...]) -> list[object]:
    """Where the tensors of rounds are, and their sizes: the same for the same ones, until one is changed."""
    tensors = (tensor for each in rounds for tensor in each if type(tensor) is torch.Tensor)
    return [what for tensor in tensors for what in (tensor.data_ptr(), tensor.shape)]


class PlacedHandle(DispatchHandle):
    """Of a dispatch in rounds, or one whose rows have places: with gaps, or experts' blocks of one size.

    ``recv_offsets`` and ``topk_idx`` are of the whole call; ``expand_idx`` counts in each round anew.

    Attributes:
        rounds: in their order, the same number on every rank.
        tokens_of_round: that a rank has in one at most.
        num_rows: rows of the outputs, gaps included; of combine's input at least so many.
        alignment: experts' rows begin at multiples of it.
        stride: rows from one expert's to the next one's; 0 where they follow one another.
        tokens_per_expert: (E,) int64, rows of each local expert.
        first_starts: (E * EP,) int32, the row at which those of each expert and source begin.
        limits: (E * EP,) int32, behind their last one.
    """

    made_when_read: ClassVar[frozenset[str]] = frozenset({"assist_info"})

    rounds: tuple[Round, ...]
    tokens_of_round: int
    num_rows: int
    alignment: int
    stride: int
    tokens_per_expert: torch.Tensor
    first_starts: torch.Tensor
    limits: torch.Tensor

    @property
    def dispatched(self) -> int:
        """The dispatch of the buffer that was its first round."""
        return self.number - len(self.rounds) + 1

    def __getattr__(self, name: str) -> Any:
        made: Any
        if name == "assist_info":  # for users: combine takes the rounds'
            made = self._assist_info()
        elif name == "rounds" and "_memory" in self.__dict__:
            made = (self._only_round(),)
        else:
            return super().__getattr__(name)
        self.__dict__[name] = made
        return made

    def _only_round(self) -> Round:
        """That of a native call, of whose memory it is made."""
        own = {name: getattr(self, name) for name in ("topk_idx", "expand_idx", "active_mask", "tables")}
        names = "recv_offsets", "assist_info", "places", "send_counts"
        memory = self.__dict__["_memory"]
        return Round(first_token=0, **own, **{name: memory.get(f"round_{name}") for name in names})

    def _state(self) -> dict[str, Any]:
        names: tuple[str, ...] = (
            "rounds",
            "tokens_of_round",
            "num_rows",
            "alignment",
            "stride",
            "tokens_per_expert",
        )
        names += "first_starts", "limits"
        return super()._state() | {name: getattr(self, name) for name in names}

    def __copy__(self) -> PlacedHandle:
        return PlacedHandle(**self._state())

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedHandle:
        return PlacedHandle(**copy.deepcopy(self._state(), memo))

    def _assist_info(self) -> torch.Tensor:
        """Origins of all rows of the outputs, -1 of gaps, as `assist_info` has them; reads device memory."""
        offsets = self.recv_offsets
        made = offsets.new_full((ORIGIN.num_words * self.num_rows + TRAILER.num_words,), -1)
        origins = made[: -TRAILER.num_words].view(-1, ORIGIN.num_words)
        for number, each in enumerate(self.rounds):
            count = int(each.recv_offsets[-1])
            of_round = each.assist_info[: ORIGIN.num_words * count].view(-1, ORIGIN.num_words).clone()
            of_round[:, ORIGIN.word("token")] += number * self.tokens_of_round
            origins[each.places[:count].long()] = of_round
        made[-TRAILER.num_words] = TRAILER_MARK
        made[-TRAILER.num_words + 1] = int(offsets[-1])
        return made


class DispatchOutput(NamedTuple):
    """Tokens for this rank's experts.

    Attributes:
        tokens: (A, H), the dispatched dtype or int8, by local expert, then source rank, then the source's
            token order. Rows at and past the total are undefined. Where H is no multiple of 32, rows are as
            many elements apart as a padded row has: ``stride(0)``. With a tensor-parallel group (2 A, H): the
            rows of its first rank, and right behind them those of its second one. With ``do_expand=False``
            (n, H), n at most EP * num_max_tokens_per_rank in one round: one row for each token that has
            experts here, by source rank, then its token order.
        scales: (A,) fp32 so that ``tokens * scales[:, None]`` approximates the input, with "int8_128"
            (A, ceil(H/128)), one for every 128 elements; or None if not quantised.
        tokens_per_expert: (E,) int64 on the device: rows of each local expert. With ``do_expand=False`` a row
            counts for each of its experts.
        weights: (A,) fp32, the routing weight of each row (0 for shared experts), or None where dispatch
            was given none, and with ``do_expand=False``.
        handle: for combine.

    Examples:
        >>> received = buffer.dispatch(x, topk_idx, topk_weights)
        >>> received.weights.shape, received.scales is None
        (torch.Size([1024]), True)
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    weights: torch.Tensor | None
    handle: DispatchHandle

    def __repr__(self) -> str:
        """In a line: tensors by dtype and shape, which an NPU need not be waited for to know."""
        return f"DispatchOutput({', '.join(f'{n}={_shown(v)}' for n, v in self._asdict().items())})"


def _shown(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


Result = TypeVar("Result")


class Pending(Generic[Result], Uncopied):
    """A dispatch or a combine that has been sent: what `wait=False` returns.

    Its inputs are free again; what it gives back is valid after `wait`. Until then the buffer takes no other
    call of the same operator. Where it was dropped, the buffer's next dispatch or combine waits in its place.

    Args:
        finish: waits for the rows, and returns what they become.
    """

    _uncopied = "it is waited for once. Call wait(), and copy what that returns."

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._result: Result

    def __repr__(self) -> str:
        """Whether it was waited for."""
        return f"Pending({'sent' if self._finish is not None else 'done'})"

    def wait(self) -> Result:
        """Waits until all is there. Waiting again gives the same.

        Raises:
            BufferStateError: the buffer is closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank's rows did not come in time. The buffer is then broken.

        Examples:
            >>> sent = buffer.dispatch(x, topk_idx, wait=False)
            >>> received = sent.wait()  # what does not need the rows goes before it
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result
