"""A run in which ranks are masked: what it has to know before it goes on, and what has to be taken back.

Kernels that wait go on as soon as a rank is masked. Each block may have seen something else of it by then, so
nothing of it counts: a dispatch has all rows of a source or none, a combine leaves out each of its results
that is not summed yet.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch

from moe_triton.backends.base import Bindings, Executable
from moe_triton.core.ascendc import DISPATCH_WAIT
from moe_triton.core.checks import CPU
from moe_triton.core.errors import BufferStateError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Launch, Part, Phases, Placeholder
from moe_triton.core.records import ORIGIN, TRAILER, WORD_BYTES
from moe_triton.operators.buffer import DISPATCHED, TABLES
from moe_triton.operators.variants import DispatchVariant
from moe_triton.runtime.executables import Phase
from moe_triton.runtime.masks import Masks
from moe_triton.schemes.fullmesh.ascendc import INBAND_COLLECT, INBAND_RECEIVE
from moe_triton.schemes.scheme import Scheme

IDS, ACTIVE_IDS, SUM = "topk_idx", "active_ids", "sum"
_WHOLE = "whole", "setup", "teardown", "mend"
_BEGINNING = *_WHOLE, "routing", "ask", "ring"
PLACES, LOCAL_COUNTS = "places", "local counts"


class MaskedRun:
    """One run, from the moment on at which it has stopped.

    Args:
        scheme: of the communicator.
        masks: of its communicator.
        fixed: what placeholders hold in every run.
        bindings: what the others do.
        variant: what the run is specialised for.
        owns_ids: whether marks may be left in the ids.

    Attributes:
        bindings: for what is still to run.
    """

    def __init__(
        self,
        scheme: Scheme,
        masks: Masks,
        fixed: Bindings,
        bindings: Bindings,
        variant: object,
        *,
        owns_ids: bool,
    ) -> None:
        self._scheme, self._context, self._masks = scheme, scheme.context, masks
        self._fixed, self._owns_ids = fixed, owns_ids
        self.bindings, self._variant = bindings, variant
        self._before = masks.known.masked
        self._has_received = False

    def mending(
        self, operator: str, executable: Executable, phase: Phase
    ) -> Literal["mend", "recount"] | None:
        """Has the launches that are left go by what is masked now; or says which phase runs in their place.

        "recount" runs before them.

        Args:
            operator: which one.
            executable: what has stopped.
            phase: which one it is of the operator.

        Raises:
            BufferStateError: the scheme, or this kind of call, cannot go on without them.
        """
        ran = [launch for phases in executable.ran for launch in phases]
        if phase not in _WHOLE and operator in self._scheme.goes_on and self._scheme.goes_on_in_rounds:
            return self._recounting(operator, ran)
        kernels = {launch.kernel.name for launch in ran}
        # What an operator in one piece begins with may come late, and so may what counts a call's rows.
        is_early = not ran and (operator == "combine" or phase in _BEGINNING)
        is_whole = phase in _WHOLE and INBAND_COLLECT.name not in kernels
        if operator == "combine" and self._scheme.relays:  # what others have summed is marked in the ids
            is_whole &= self._owns_ids
        if not (is_early or (is_whole and operator in ("barrier", *self._scheme.goes_on))):
            raise BufferStateError(
                f"rank(s) {self._newly_masked()} were masked during a {operator} that cannot go on without "
                f"them. Mask between calls."
            )
        if operator == "combine":
            self._mark_results(executable.ran)
        elif operator == "dispatch" and not ran:
            self._mark_ids(self._ids(), self._masks.marked)
        if operator != "dispatch":
            return None
        if INBAND_RECEIVE.name in kernels:
            self._has_received = True
        elif DISPATCH_WAIT.name in kernels and self._scheme.recounts:
            self._take_back_counts()
            if LOCAL_COUNTS in {launch.step for launch in ran}:
                self._count_back(self._per_expert())
            return "mend"
        return None

    def _recounting(self, operator: str, ran: list[Launch]) -> Literal["recount"] | None:
        """The same of a phase of a call in rounds: at its end rows are taken out that have places
        (`moe_triton.runtime.lost_rows`).
        """
        is_counted = DISPATCH_WAIT.name in {launch.kernel.name for launch in ran}
        is_placed = PLACES in {launch.step for launch in ran}
        if operator == "dispatch" and self._scheme.recounts and is_counted and not is_placed:
            self._take_back_counts()
            return "recount"
        return None

    def mark_results(self) -> None:
        """Marks what a combine will go by of which nothing has run."""
        self._mark_results(())

    def end(self, operator: str) -> None:
        """What is left once all has run.

        Args:
            operator: which one.
        """
        if operator != "dispatch":
            return
        if self._has_received:
            self._drop_rows()
        if self._owns_ids:
            self._mark_ids(self._ids(), self._masks.marked_cut_off)

    def _memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """What a placeholder holds, as so many elements; None where it holds nothing."""
        held = self.bindings.get(name, self._fixed.get(name))
        address = held.data_ptr() if isinstance(held, torch.Tensor) else held
        if not address:
            return None
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=CPU)
        memory = (ctypes.c_char * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def _words(self, name: str, *shape: int) -> torch.Tensor | None:
        return self._memory(name, shape, torch.int32)

    def _ids(self, name: str = IDS) -> torch.Tensor | None:
        tokens = self.bindings.get("num_tokens", 0)
        assert isinstance(tokens, int)
        return self._words(name, tokens, self._context.config.num_topk)

    def _mark_ids(
        self,
        ids: torch.Tensor | None,
        mark: Callable[[torch.Tensor], torch.Tensor],
        pending: torch.Tensor | None = None,
    ) -> None:
        """Marks ids of experts that are lost, of all tokens or of those that are pending."""
        if ids is None:
            return
        marked = mark(ids)
        if pending is not None:
            marked = torch.where(pending[:, None], marked, ids)
        if self._owns_ids:
            ids.copy_(marked)
        else:
            self.bindings = {**self.bindings, IDS: marked}

    def _mark_results(self, ran: Sequence[Phases]) -> None:
        """Results that are not summed yet come no more. What has been summed, has been."""
        tokens = self.bindings["num_tokens"]
        assert isinstance(tokens, int)
        pending = torch.ones(tokens, dtype=torch.bool, device=CPU)
        for launch in itertools.chain.from_iterable(ran):
            if launch.step == SUM:
                for token in self._summed_by(launch, tokens):
                    pending[token] = False
        dispatched = self.bindings.get(DISPATCHED)
        assert dispatched is None or isinstance(dispatched, int)
        mark = partial(self._masks.marked_cut_off, dispatched=dispatched)
        self._mark_ids(self._ids(), mark, pending)
        active = self._ids(ACTIVE_IDS)
        if active is not None:  # what a mask of the caller's has left of them
            active.copy_(torch.where(pending[:, None], mark(active), active))
        if TABLES in self.bindings and (tables := self._scheme.tables_of(self._context.config)):
            self._masks.mark_tables(tables, {**self._fixed, **self.bindings}, ran)

    def _summed_by(self, launch: Launch, tokens: int) -> Iterator[int]:
        """Tokens of a launch that sums."""
        assert isinstance(launch.kernel, TritonKernel)
        values = {arg.name: value for arg, value in zip(launch.kernel.args, launch.values, strict=True)}
        if "bounds" in values:
            bounds = values["bounds"]
            assert isinstance(bounds, Placeholder)
            at = bounds.offset // WORD_BYTES
            held, listed = self._words(bounds.name, at + 2), self._words("ready_tokens", tokens)
            assert held is not None
            assert listed is not None
            first, last = held[at:].tolist()
            yield from (token for token in listed[first:last].tolist() if 0 <= token < tokens)
            return
        first, number = (_number(values[name], tokens) for name in ("first_token", "num_tokens"))
        yield from range(first, first + number)

    def _newly_masked(self) -> list[int]:
        return sorted(self._masks.known.masked - self._before)

    def _by_entry(self, name: str) -> torch.Tensor | None:
        """(E, EP) a number for each expert and source."""
        return self._words(name, self._context.num_local_experts, self._context.config.num_ranks)

    def _take_back_counts(self) -> None:
        """No rows of the ranks that are silent: where the others' belong is to be found anew."""
        for name in ("recv_counts", "all_counts"):
            counts = self._by_entry(name)
            if counts is not None:
                counts[:, self._masks.silent()] = 0
        ends = self._by_entry("recv_offsets")
        assert ends is not None
        if not self._is_per_rank:  # whose rows are counted for each expert once all are there
            last = ends[:, -1]
            self._count_back(last.diff(prepend=last.new_zeros(1)))

    def _count_back(self, rows: torch.Tensor) -> None:
        stats = self._words("recv_stats", len(rows))
        if stats is not None:
            stats -= rows.int()

    def _per_expert(self) -> torch.Tensor:
        held = self._memory("tokens_per_expert", (self._context.num_local_experts,), torch.int64)
        assert held is not None
        return held

    @property
    def _is_per_rank(self) -> bool:
        return isinstance(self._variant, DispatchVariant) and self._variant.per_rank

    def _received(self, total: int) -> Iterator[torch.Tensor]:
        """(rows, bytes) of all that has been received, as far as this call has outputs for it."""
        config, variant = self._context.config, self._variant
        assert isinstance(variant, DispatchVariant)
        row_format = variant.row_format
        per_row = {
            "tokens": config.hidden * variant.row_dtype.itemsize,
            "scales": WORD_BYTES * -(-config.hidden // (row_format.elements_per_scale or config.hidden)),
            "weights": WORD_BYTES,
            "origins": ORIGIN.num_bytes,
            **dict.fromkeys(("local_topk_idx", "local_topk_weights"), WORD_BYTES * config.num_topk),
        }
        for name, num_bytes in per_row.items():
            rows = self._memory(name, (total, num_bytes), torch.uint8)
            if rows is not None:
                yield rows

    def _drop_rows(self) -> torch.Tensor:
        """Takes rows of masked ranks out of what has been received.

        Returns:
            (rows,) bool: which of them are left.
        """
        capacity = self._context.capacity
        ends, variant = self._by_entry("recv_offsets"), self._variant
        assert ends is not None
        assert isinstance(variant, DispatchVariant)
        counts = ends.flatten().diff(prepend=ends.new_zeros(1)).view_as(ends)
        masked, total = sorted(self._masks.known.masked), int(ends[-1, -1])
        sources = torch.arange(ends.shape[1], device=CPU).repeat(len(ends))
        source = sources.repeat_interleave(counts.flatten().long())
        keep = ~torch.isin(source, torch.tensor(masked, device=CPU))
        left = int(keep.sum())
        dropped = counts[:, masked].sum(1)
        if self._is_per_rank:
            dropped = self._local_counts(total, ~keep)
        for rows in self._received(total):
            rows[:left] = rows[keep]
        trailer = self._words("origins", ORIGIN.num_words * capacity + TRAILER.num_words)
        assert trailer is not None
        trailer[ORIGIN.num_words * capacity + TRAILER.word("num_rows")] = left
        counts[:, masked] = 0
        ends.copy_(counts.flatten().cumsum(0).view_as(ends))
        number = self._per_expert() - dropped if self._is_per_rank else counts.sum(1)
        self._per_expert().copy_(number.cumsum(0) if variant.cumulative else number)
        self._count_back(dropped)
        return keep

    def _local_counts(self, total: int, which: torch.Tensor) -> torch.Tensor:
        """How many of some rows, that came once for each rank, each expert has."""
        ids = self._words("local_topk_idx", total, self._context.config.num_topk)
        assert ids is not None
        return local_counts_of(ids[which], self._context.num_local_experts)


def local_counts_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """(E,) int64 how often each expert of a rank is in ids of its rows; others count for nothing."""
    ids = ids[(ids >= 0) & (ids < num_experts)].long()
    return torch.bincount(ids, minlength=num_experts)


def _number(value: object, tokens: int) -> int:
    """What stands for a number of tokens, in a call of so many."""
    if isinstance(value, Part):
        return value.of(tokens)
    return value if isinstance(value, int) else tokens
