"""`EPBuffer`: what users hold to dispatch tokens to experts and combine what comes back.

Shapes: T tokens of this rank, K experts per token, H hidden, M experts in the group, S shared experts,
EP ranks, E experts on this rank, A rows that a dispatch can deliver here at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from moe_triton.backends import has_windows_in_memory, make_backend, make_host
from moe_triton.core.checks import check_choice, check_flag, check_integer, check_tensor, check_text
from moe_triton.core.config import Config, Product
from moe_triton.core.deepep import with_names_of_deepep
from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.core.group_sizes import RanksPerServer
from moe_triton.core.handle import DispatchHandle, DispatchOutput, Pending
from moe_triton.core.health import RankHealth
from moe_triton.core.network import Network
from moe_triton.core.replicas import ReplicaBy
from moe_triton.core.row_formats import row_format_of
from moe_triton.core.tuning import Tuning, checked_tuning
from moe_triton.core.uncopied import Uncopied
from moe_triton.runtime import arguments
from moe_triton.runtime.buffer_plans import BufferPlans
from moe_triton.runtime.chosen_scheme import Asked, choose_scheme
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.construction import Order, meet, seconds_to_meet, servers_of_group
from moe_triton.runtime.expert_mapping import ExpertMapping
from moe_triton.runtime.on_lost import OnLost
from moe_triton.runtime.output_request import (
    LAYOUTS,
    USUAL,
    USUAL_PER_RANK,
    OutputLayout,
    make_request,
)
from moe_triton.runtime.owner import Owner
from moe_triton.runtime.peer_memory import OutBytes, PeerMemory, Wanted
from moe_triton.runtime.placed_calls import PlacedCalls
from moe_triton.runtime.programs.placed import Begun
from moe_triton.runtime.programs.shared import TOKEN_DTYPES
from moe_triton.runtime.size_hint import get_buffer_size_hint
from moe_triton.runtime.traces import TracePath
from moe_triton.runtime.tuning_source import tuning_source
from moe_triton.tables.schemes import Outputs

_buffer_ids = itertools.count()
_UNALIGNED, _ROWS = 1, LAYOUTS[0]


@with_names_of_deepep
class EPBuffer(Owner, Uncopied):
    """Dispatch and combine for one expert-parallel group.

    Collective: every rank of the group constructs it, with the same settings, and calls `dispatch` and
    `combine` in the same order, with no tokens where it has none.

    Args:
        group: torch.distributed group with any back end; None is the default group. Only its store is used.
        num_max_tokens_per_rank: most tokens that a rank passes to one dispatch.
        hidden: H, 1 to 8,192 on A3 and to 10,240 on A2. Where it is no multiple of 32, rows are padded
            inside, which takes copies (docs/speed.md, "Rows that are padded").
        num_topk: K, 1 to 32.
        num_experts: M, routed experts in the whole group, 1 to 2,048; expert e lives on rank
            R + e // (M / (EP - R)).
        num_shared_experts: S, experts that every token goes to as well.
        num_shared_ranks: R, ranks [0, R) that hold shared experts only.
        experts_per_rank: how many of the M each rank holds, in the order of the ranks, 0 allowed, and 0 for
            those of shared experts; None for as many on each. Experts are numbered in that order. The same
            on every rank.
        num_zero_experts: experts that give nothing, with the ids behind the routed ones.
        num_copy_experts: experts that give the token itself, with the ids behind those.
        num_const_experts: constant experts (C), with the ids behind those.
        tp_group: a group of two tensor-parallel ranks, each of another expert-parallel group, whose rows are
            exchanged; None for none. It takes one routed expert a rank.
        lost_ranks: ranks of ``group`` that take no part any more. Sizes are those of the whole group; ranks
            and experts are then numbered anew, without them (docs/operators.md, "Lost ranks").
        num_bytes: bytes that the data window may take, None for what is needed
            (`get_buffer_size_hint`), on the NPU at most HCCL_BUFFSIZE where that is set.
        product: whose limits and schemes: "A3" or "A2".
        ranks_per_server: how many ranks each server has: one number for all, of which the last may have
            fewer, or one for each in the order of the ranks; None for what the product's have: 8 on A2, on A3
            all ranks, with "hierarchy" 16. Where ranks are on several hosts, None for these. The same on
            every rank.
        comm_alg: how tokens travel; "" for the product's own. On A3 "fullmesh_v1"; "fullmesh_v2", with flags
            in band; "direct", which moves the fewest bytes, and whose outputs lie in the window: see
            `dispatch`; "hierarchy", which goes between super nodes, and sends a token once to each server.
            On A2 "fullmesh"; or between servers "hierarchy", which inside one server is "fullmesh".
            Or "auto", which None is too: what is fastest for these sizes on this machine (docs/speed.md);
            ``config.scheme`` has its name. What "" stands for on A2: docs/from-torch-npu.md, "Servers and
            schemes".
        outputs: what "auto" may leave outputs in: "own", tensors of their own; or "window", there too.
        relaxed: allow group sizes and servers that the product does not have, for tests and demos: on A3
            a buffer needs it for "hierarchy" alone.
        backend: "cpu"; or "npu" for the device that is current in this process (docs/npu.md): calls then
            return before they have run, the host reads no ids, and a later call raises what went wrong.
        kernels: "triton", or with "cpu" "torch" for machines without the Triton toolchain (slow).
        num_blocks: blocks per kernel, None for what suits the machine.
        tuning: how operators are cut into parts, how rows are copied and flags waited for; None for what
            suits the machine. Any setting gives the same bits.
        timeout_s: seconds that one wait may take before it raises, 1e-6 to 1e9.
        on_lost: what becomes of a rank that does not come within ``timeout_s``: "raise" a
            `CommunicationTimeoutError` on those that wait for it; or "mask" it inside the call, which goes on
            and returns without it (docs/lost-ranks.md). The same on every rank.
        explicitly_destroy: warn if the buffer is dropped without `close`.
        trace: file that all ranks write to what ran when, for Perfetto (docs/traces.md), on several hosts one
            for each, as trace.host0.json; None for none.
        network: by which ranks on several hosts reach each other (docs/hosts.md); None for what is found.

    Raises:
        ArgumentError: an argument breaks a rule, or the trace's file cannot be written.
        ConfigMismatchError: ranks disagree, or another one cannot be constructed; it names fields and ranks.
        WindowError: no memory for the window.
        ToolchainError: something that the back end needs is missing.
        RankLostError: a rank has died in the construction; it names it.
        CommunicationTimeoutError: a rank did not come; it names the missing ranks.

    Examples:
        >>> buffer = EPBuffer(num_max_tokens_per_rank=64, hidden=7168, num_topk=8, num_experts=32)
        >>> buffer.num_ranks, buffer.num_local_experts, buffer.capacity
        (2, 16, 1024)
    """

    _uncopied = (
        "it is this rank's part of its group, with memory that peers write to. Construct one where the copy "
        "is used, on every rank of a group; a module that holds it leaves it out of its own copies."
    )

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        num_shared_experts: int = 0,
        num_shared_ranks: int = 0,
        experts_per_rank: Sequence[int] | None = None,
        num_zero_experts: int = 0,
        num_copy_experts: int = 0,
        num_const_experts: int = 0,
        tp_group: dist.ProcessGroup | None = None,
        lost_ranks: Collection[int] = (),
        num_bytes: int | None = None,
        product: Product = "A3",
        ranks_per_server: RanksPerServer = None,
        comm_alg: str | None = "auto",
        outputs: Outputs = "own",
        relaxed: bool = False,
        backend: str = "cpu",
        kernels: str = "triton",
        num_blocks: int | None = None,
        tuning: Tuning | None = None,
        timeout_s: float = 60.0,
        on_lost: OnLost = "raise",
        explicitly_destroy: bool = False,
        trace: TracePath | None = None,
        network: Network | None = None,
    ) -> None:
        sizes = num_max_tokens_per_rank, hidden, num_topk, num_experts, num_shared_experts, num_shared_ranks
        special = num_zero_experts, num_copy_experts, num_const_experts

        def make_config() -> Config:
            self._explicitly_destroy = check_flag("explicitly_destroy", explicitly_destroy)
            asked: dict[str, Any] = {"product": product, "relaxed": relaxed}
            asked |= {"experts_per_rank": experts_per_rank, **servers_of_group(meeting, ranks_per_server)}
            whole = arguments.whole_config(len(meeting.of_group), sizes, special, **asked)
            scheme = Asked(comm_alg, outputs, backend, checked_tuning(tuning).tables)
            chosen = choose_scheme(scheme, whole, meeting.members, tp_group is not None)
            self._comm_alg_source = chosen.source
            return chosen.config

        meeting, exchange = meet(group, tp_group, lost_ranks, seconds_to_meet(timeout_s))
        make = partial(make_backend, backend, kernels, tuning)
        check = partial(arguments.check_num_bytes, num_bytes)
        order = Order(
            *(make_config, make, check, num_blocks, timeout_s, on_lost, tuning, trace),
            on_hosts=has_windows_in_memory(backend),
            network=network,
            servers=lambda: make_config().topology.servers,
        )
        self._communicator = Communicator(meeting, order, exchange)
        self.config, self.rank = self._communicator.config, meeting.rank
        self.layout, self._backend = self._communicator.layout, self._communicator.backend
        self._communicator.participants.owns_ids, self._queried = True, frozenset[int]()
        self._id = next(_buffer_ids)
        self._latest_dtype: torch.dtype | None = None
        try:
            self._plans = BufferPlans(self._communicator, make_host(backend), self._id, special)
            self._placed = PlacedCalls(self._plans)
            self._sent, self._mapping = self._plans.sent.calls, ExpertMapping(self._communicator, self.config)
            self._calls, self._posts = None, self._communicator.memory.posts
            if exchange is None and not self.config.num_special_experts and not self._plans.is_fitted:
                self._calls = self._communicator.make_calls(self._id)
        except BaseException:
            self._communicator.close()
            raise
        self._closed = False

    def __repr__(self) -> str:
        """In a line, whatever state it is in: sizes, how tokens travel, and whether it can be used."""
        communicator = self.__dict__.get("_communicator")
        if communicator is None:
            return "EPBuffer(not constructed)"
        c, rank = communicator.config, communicator.rank
        return (
            f"EPBuffer(rank {rank} of {c.num_ranks}, hidden={c.hidden}, num_topk={c.num_topk}, "
            f"num_experts={c.num_experts}, comm_alg={c.scheme!r}, backend={communicator.backend.name!r}, "
            f"window of {communicator.window_bytes / 1e6:.2f} MB, {communicator.state})"
        )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, while it exists: a buffer does not keep it. None for one process, and once closed."""
        return self._communicator.group

    @property
    def device(self) -> torch.device:
        """Where the tensors of its calls are.

        Examples:
            >>> buffer.device
            device(type='cpu')
        """
        return self._backend.device

    @property
    def num_ranks(self) -> int:
        """Ranks of the group (EP), without lost ones."""
        return self.config.num_ranks

    @property
    def num_local_experts(self) -> int:
        """Experts whose rows this rank receives: 1 on a rank of shared experts."""
        return self.config.experts_on(self.rank)

    @property
    def capacity(self) -> int:
        """Rows that a dispatch can deliver here at most (A)."""
        return self._communicator.capacity

    def peer_memory(self, asked: Wanted, out_bytes: OutBytes | None = None) -> PeerMemory:
        """Makes memory of each rank that all ranks read and write (`PeerMemory`). Collective.

        Args:
            asked: says how many bytes, the same on every rank, and what else has to be alike, by name. It is
                called once all ranks have come, which then hear of its errors.
            out_bytes: where ranks of other servers are to be posted to, says how many bytes behind these this
                rank posts from. None: they are read and written like others, on one host.

        Raises:
            ArgumentError: a number of bytes that cannot be; or None where ranks are on several hosts.
            BufferStateError: the buffer is closed, broken or in use by another thread.
            ConfigMismatchError: ranks ask for different things, or another one's request is refused.
            WindowError: no memory for it, or on an NPU a rank that is out of reach, or can only be posted to.
            CommunicationTimeoutError: a rank did not come.

        Examples:
            >>> memory = buffer.peer_memory(lambda: (64, {"what for": "an example"}))
            >>> memory.of(buffer.rank)[0] = 7
            >>> buffer.barrier()
            >>> memory.of(1 - buffer.rank)[0].item()
            7
            >>> memory.close()
        """
        return self._communicator.peer_memory(asked, out_bytes)

    def barrier(self) -> None:
        """Waits until every rank is here. Collective.

        What a rank has written before it, to memory that ranks share, is seen by all behind it. Nothing goes
        over the group. On an NPU it waits for the device as well, except where it is captured.

        Raises:
            BufferStateError: the buffer is closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank did not come in time. The buffer is then broken.

        Examples:
            >>> buffer.barrier()
        """
        self._communicator.barrier()

    def update_mask(self, rank: int, masked: bool) -> None:
        """Masks a rank: nothing is sent to it and nothing awaited from it until it is un-masked.

        Entries for its experts count as -1: their weight is missing from the sum, and nothing is
        renormalised; ``handle.lost`` says which. Its rows count as none. Every rank that goes on has to mask
        the same ones before the same call; with "hierarchy" what a masked rank would have passed on is lost
        as well. No plan changes.

        Args:
            rank: of the group.
            masked: whether it takes no part. NIXL EP's update_mask_buffer and DeepEP's low-latency mask have
                the same polarity; FlashInfer's mask says who is active.

        Raises:
            ArgumentError: no rank of the group, this rank itself, one of shared experts, or a buffer with
                tp_group.
            BufferStateError: a rank that has missed calls cannot be un-masked, and none while another thread
                is in a call; a call is not waited for; a graph has captured calls; or the buffer is closed or
                broken.

        Examples:
            >>> buffer.update_mask(1 - buffer.rank, True)
            >>> buffer.query_mask().tolist().count(1)
            1
            >>> buffer.update_mask(1 - buffer.rank, False)
        """
        self._communicator.participants.update_mask(check_integer("rank", rank), check_flag("masked", masked))

    def query_mask(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Which ranks are masked.

        Args:
            out: (EP,) int32, which is written and returned; None for a new tensor.

        Returns:
            (EP,) int32 on the buffer's device: 1 for a masked rank, 0 for one that takes part.

        Raises:
            ArgumentError: another shape, dtype or device of ``out``.

        Examples:
            >>> buffer.query_mask().tolist()
            [0, 0]
        """
        shape, device = (self.num_ranks,), self.device
        masked = self._communicator.masks.masked
        flags = [int(rank in masked) for rank in range(self.num_ranks)]
        said = torch.tensor(flags, dtype=torch.int32, device=device)
        if out is None:
            return said
        check_tensor("out", out, shape=shape, dtypes=(torch.int32,), device=device)
        return out.copy_(said)

    def query_fault(self) -> tuple[bool, torch.Tensor]:
        """Whether ranks have been masked, or un-masked, since the last query; and which are masked now.

        It is what vLLM's managers of an all-to-all that outlives faults ask after each step.

        Returns:
            Whether that has changed, and `query_mask`.

        Examples:
            >>> buffer.query_fault()[0]
            False
        """
        masked = self._communicator.masks.masked
        has_fault, self._queried = masked != self._queried, masked
        return has_fault, self.query_mask()

    def clean_mask(self) -> None:
        """Un-masks all ranks.

        Raises:
            BufferStateError: one of them has missed calls, and all stay masked; or as `update_mask`.

        Examples:
            >>> buffer.clean_mask()
            >>> buffer.query_mask().tolist()
            [0, 0]
        """
        self._communicator.participants.clean_mask()

    def leave(self, name: str, text: str) -> None:
        """Leaves a text for the other ranks, in place of what this rank has left under that name before.

        It goes to the process that hosts the group's store: there is no collective, and no call is disturbed.
        A store that does not answer is waited for; call it from another thread where that must not be.

        Args:
            name: of what it is for.
            text: small: all of a group's go through one process.

        Raises:
            ArgumentError: a name or a text that is none.
            BufferStateError: the buffer is closed.
            RuntimeError: torch's, where the process that hosts the store is gone.

        Examples:
            >>> buffer.leave("example", "here")
            >>> buffer.left("example")[buffer.rank]
            'here'
        """
        self._communicator.leave(check_text("name", name), check_text("text", text))

    def left(self, name: str) -> list[str]:
        """What each rank has left under a name (`leave`), by rank; "" of one that has left nothing yet.

        Raises:
            ArgumentError: a name that is none.
            BufferStateError: the buffer is closed.
            RuntimeError: torch's, where the process that hosts the store is gone.

        Examples:
            >>> buffer.left("nobody has")
            ['', '']
        """
        return self._communicator.left(check_text("name", name))

    def health(self) -> tuple[RankHealth, ...]:
        """What this rank knows of each rank of the group, itself included, by rank. Nobody is asked for it.

        From any thread, also while another one waits in a call: that says whom it waits for, which takes up
        to 0.2 s. By which signs ends are noticed, and how soon: docs/protocol.md, "Death".

        Raises:
            BufferStateError: the buffer is closed.

        Examples:
            >>> [each.state for each in buffer.health()]
            ['alive', 'alive']
        """
        return self._communicator.participants.health()

    def tuning_source(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
        """Which settings plain calls on tokens of ``dtype`` run with, by name, and who says so.

        Examples:
            >>> source = buffer.tuning_source()
            >>> source["combine_tokens"]
            '64: 64 tokens a part, unless set'
        """
        made = self._communicator
        said = tuning_source(made.scheme, made.kernel_settings, dtype)
        return {"comm_alg": self._comm_alg_source} | said

    def _forget(self) -> None:
        self._plans.forget()

    get_buffer_size_hint = staticmethod(get_buffer_size_hint)

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        *,
        quantize: str | None = None,
        smooth_scales: torch.Tensor | None = None,
        active_mask: torch.Tensor | None = None,
        performance_info: torch.Tensor | None = None,
        eplb_table: torch.Tensor | None = None,
        eplb_mode: ReplicaBy | None = None,
        handle: DispatchHandle | None = None,
        num_max_tokens_per_rank: int | None = None,
        num_recv_tokens: Literal["bound", "exact"] | int | None = None,
        layout: OutputLayout = "rows",
        expert_alignment: int = 1,
        do_zero_padding: bool = False,
        do_expand: bool = True,
        out: torch.Tensor | DispatchOutput | None = None,
        wait: Literal[True] = True,
    ) -> DispatchOutput: ...

    @overload
    def dispatch(self, *args: Any, wait: Literal[False], **options: Any) -> Pending[DispatchOutput]: ...

    def dispatch(  # type: ignore[misc]
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        *,
        quantize: str | None = None,
        smooth_scales: torch.Tensor | None = None,
        active_mask: torch.Tensor | None = None,
        performance_info: torch.Tensor | None = None,
        eplb_table: torch.Tensor | None = None,
        eplb_mode: ReplicaBy | None = None,
        handle: DispatchHandle | None = None,
        num_max_tokens_per_rank: int | None = None,
        num_recv_tokens: Literal["bound", "exact"] | int | None = None,
        layout: OutputLayout = "rows",
        expert_alignment: int = 1,
        do_zero_padding: bool = False,
        do_expand: bool = True,
        out: torch.Tensor | DispatchOutput | None = None,
        wait: bool = True,
    ) -> DispatchOutput | Pending[DispatchOutput]:
        """Sends each token to its experts' ranks and returns what this rank's experts received.

        Args:
            x: (T, H) bf16 or fp16, any number of tokens, 0 allowed. More than the buffer's
                num_max_tokens_per_rank go in rounds of so many each (docs/prefill.md): one call, one handle,
                rows in the order and with the bits of one large round. Other ranks may have any other number.
            topk_idx: (T, K) int32 or int64, distinct in a row; -1 for no expert. With eplb_table, of logical
                experts.
            topk_weights: (T, K) fp32, bf16 or fp16; given here, each received row comes with its weight.
                "hierarchy" needs them.
            cumulative_local_expert_recv_stats: (E,) int32, to which the number of rows of each local expert
                is added, without those of a tensor-parallel peer.
            quantize: "int8" sends rows as int8 with one fp32 scale each, "int8_128" with one for every 128
                elements, the last of which may be fewer: s = 127 / max|x|, q = rint(x * s), scale = 1 / s.
            smooth_scales: (S + M, H) fp32, multiplied into a row before it is quantised: a row for each
                shared expert, then one for each routed one.
            active_mask: bool, which take part: (T,) with its True first, or (T, K), each entry by itself.
                Combine goes by the same one.
            performance_info: (EP,) int64, raised to the microseconds, 1 at least, that each source rank was
                waited for.
            eplb_table: (N, F) int32, from logical experts to physical ones, which num_experts counts: how
                many replicas each has, and their ids. Or by "row" (r, N), of which token t takes row t % r. A
                call reads it once: it may change between calls, and in a graph. None for physical ids.
            eplb_mode: what chooses among the replicas of (N, F): "token", also None, deals a rank's tokens
                to them in turn; "rank" gives each rank one of them, as torch_npu's mode 0; "server" deals to
                those of the own server, if there are any; or "row" (docs/balance.md).
            handle: of an earlier dispatch of this buffer, on every rank: rows go by its routing, and topk_idx
                is left out. No kernel routes, and nothing is counted.
            num_max_tokens_per_rank: the most tokens that any rank passes to this call, the same on every
                rank. Then the host reads nothing to know how many rounds there are. None: it looks, which
                costs nothing where no rank has more than a round; on an NPU no rank may have more then.
            num_recv_tokens: rows that outputs have: "bound" for as many as there can be, (A, H) in one round;
                "exact" for as many as come, which the host reads before it takes memory for them; or a number
                of rows that there is room for, with layout="padded" of each expert. None for "bound", and
                "exact" where there are several rounds and nobody has said how many.
            layout: "rows" for one expert's rows behind the other's, or "padded" for (E, max, H) tokens, of
                which tokens_per_expert says how many there are (docs/layouts.md).
            expert_alignment: each expert's rows begin at a multiple of it, 1 to 65,536.
            do_zero_padding: zero the gaps that an alignment or padding leaves, which hold anything otherwise.
            do_expand: False for one row for each token and rank, in place of one for each expert; which of
                the rank's experts it is for, and their weights, are then in the handle (docs/layouts.md).
                With ``handle`` rows are as in its dispatch.
            out: where outputs are to go, in place of new tensors: an earlier `DispatchOutput`, of this buffer
                or another one; or a tensor for the tokens alone, (A, H). Each tensor may have more rows, of
                which the first are written, and shares memory with no input and no other output. What this
                call makes must be there; what it does not make is left alone. The handle that is returned
                has memory of its own. Not with "direct".
            wait: False to return as soon as all is sent, with what waits for the rows: `Pending`.

        With num_max_tokens_per_rank, num_recv_tokens, layout or expert_alignment on one rank, every rank
        passes one of them.

        Returns:
            Tokens in expert order, or with ``do_expand=False`` in that of their source ranks, with counts and
            the handle that combine takes. With "direct", the tokens lie in the window and stay as they are
            until the dispatch after the next one begins: clone what is to live longer.

        Raises:
            ArgumentError: a bad argument. Nothing was sent and the buffer stays usable. Or some rank receives
                more than num_recv_tokens: on every rank, which gets nothing. The buffer stays usable.
            BufferStateError: the buffer is closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank's tokens did not come in time. The buffer is then broken.

        Examples:
            >>> received = buffer.dispatch(x, topk_idx, quantize="int8")
            >>> received.tokens.dtype, int(received.tokens_per_expert.sum())
            (torch.int8, 128)
        """
        if eplb_table is not None or eplb_mode is not None:
            if handle is not None:
                rule = "the ids of handle are those of physical experts"
                raise ArgumentError("eplb_table", "given", rule, "Leave it out, and eplb_mode.")
            topk_idx = self._mapping.physical(topk_idx, active_mask, eplb_table, eplb_mode)
        sizes = num_max_tokens_per_rank, num_recv_tokens, expert_alignment, layout, do_zero_padding
        output: DispatchOutput | Begun | None = None
        if self._calls is not None and wait is True and not self._sent:
            usual = quantize, x, topk_idx, smooth_scales, topk_weights, cumulative_local_expert_recv_stats
            # What is equal to these need not be of their type: it is looked at elsewhere.
            has_places = not (
                num_max_tokens_per_rank is num_recv_tokens is None
                and expert_alignment is _UNALIGNED
                and layout is _ROWS
                and do_zero_padding is False
            )
            has_options = not (active_mask is performance_info is None and out is None and handle is None)
            if has_places and handle is None and out is None and do_expand is True:
                asked = self._placed.asked(*sizes)
                if asked is not None:
                    output = self._calls.dispatch_to_places(usual, active_mask, performance_info, asked)
            elif has_places:
                pass
            elif not has_options:
                if do_expand is True:
                    output = self._calls.dispatch(*usual)
                elif do_expand is False:
                    output = self._calls.dispatch_per_rank(*usual)
            elif do_expand is True:
                output = self._calls.dispatch_with(usual, active_mask, performance_info, out, handle)
            if type(output) is DispatchOutput:
                self._latest_dtype = x.dtype
                if self._posts:
                    output.handle.note_traffic(self.traffic("dispatch"))
                if has_places and not self._communicator.masks.known.masked:
                    return output
                if not has_places and (handle is not None or not self._communicator.is_rung):
                    return output
        with self._communicator.noting_refusals("dispatch"):
            row_format = row_format_of(quantize)
            arguments.check_smoothing(smooth_scales, row_format)
        tensors: dict[str, Any] = {
            "x": x,
            "topk_idx": topk_idx,
            "smooth_scales": smooth_scales,
            "active_mask": active_mask,
            "topk_weights": topk_weights,
            "performance_info": performance_info,
            "cumulative_local_expert_recv_stats": cumulative_local_expert_recv_stats,
        }
        if type(output) is DispatchOutput and has_places:
            return self._placed.leave_masked(output, tensors, row_format, make_request(*sizes, do_expand))
        if type(output) is DispatchOutput:
            # The first round of more, as another rank has said in the meantime.
            request = USUAL if do_expand is True else USUAL_PER_RANK
            return self._placed.join(output, tensors, row_format, request, out)
        if type(output) is Begun:  # there is more to it than native code knows
            self._latest_dtype = x.dtype
            return self._placed.go_on(output, tensors, row_format, make_request(*sizes, do_expand))
        with self._communicator.noting_refusals("dispatch"):
            self._communicator.check_usable()
            self._plans.sent.make_way_for("dispatch")
            request = make_request(*sizes, do_expand)
            if handle is not None:
                arguments.check_handle(handle, self._id, self._communicator)
            made = self._placed.any_dispatch(
                tensors, row_format, request, out, handle, check_flag("wait", wait)
            )
        self._latest_dtype = x.dtype
        return made

    @overload
    def combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None = None,
        *,
        comm_quantize: Literal["int8"] | None = None,
        shared_expert_x: torch.Tensor | None = None,
        ori_x: torch.Tensor | None = None,
        const_expert_alpha_1: torch.Tensor | None = None,
        const_expert_alpha_2: torch.Tensor | None = None,
        const_expert_v: torch.Tensor | None = None,
        performance_info: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        wait: Literal[True] = True,
    ) -> torch.Tensor: ...

    @overload
    def combine(self, *args: Any, wait: Literal[False], **options: Any) -> Pending[torch.Tensor]: ...

    def combine(  # type: ignore[misc]
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None = None,
        *,
        comm_quantize: Literal["int8"] | None = None,
        shared_expert_x: torch.Tensor | None = None,
        ori_x: torch.Tensor | None = None,
        const_expert_alpha_1: torch.Tensor | None = None,
        const_expert_alpha_2: torch.Tensor | None = None,
        const_expert_v: torch.Tensor | None = None,
        performance_info: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        wait: bool = True,
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """Sends each expert's output back to its token's rank and sums them there.

        ``out[t] = sum_k f32(y_k) * topk_weights[t, k] + sum_s f32(y_s)``: in fp32, k and then s ascending,
        rounded once to the dtype of the dispatched tokens (docs/operators.md, "Arithmetic of combine").
        After ``do_expand=False``, ``out[t] = sum_r f32(y_r)`` over the ranks of its experts, ascending. With
        "hierarchy" each server sums its experts' first, ascending, by dispatch's weights, and rounds; the
        sums of the servers, ascending, are then added and rounded ("A2" there). The order does not depend on
        which rank answers first, so the same inputs give the same bits.

        Args:
            y: (n, H) outputs in the order of ``DispatchOutput.tokens``, in the dispatched dtype, n at
                least the number of rows received, with gaps of all those tokens; padded, (E, max, H). Gaps
                may hold anything. Contiguous, or strided as `expert_output` gives it.
            handle: of a dispatch of this buffer; with "direct" of the latest one.
            topk_weights: (T, K) fp32, bf16 or fp16 to multiply with, or None for a sum without weights, even
                if dispatch was given some. With "hierarchy" dispatch's, and no others. After
                ``do_expand=False`` None: rows come weighted and summed over their rank's experts.
            comm_quantize: "int8" sends results as int8, in blocks of 8 with a scale each; not with A2's
                "fullmesh", and with "hierarchy" the sums of the servers.
            shared_expert_x: (T, H), or (a, b, H) with a * b = T, a shared expert's results, added without
                weight; not with ranks of shared experts.
            ori_x: (T, H), the tokens: copy and constant experts compute with them.
            const_expert_alpha_1: (C,) or (C, H), of each constant expert (docs/operators.md, "Special
                experts").
            const_expert_alpha_2: like const_expert_alpha_1.
            const_expert_v: (C, H).
            performance_info: (EP,) int64, raised to the microseconds, 1 at least, that each rank was waited
                for.
            out: (T, H) or more rows, of which the first T are written: where sums are to go; None for a new
                tensor. It shares no memory with an input.
            wait: False to return as soon as all is sent, with what waits for the results: `Pending`.

        Returns:
            (T, H). A token without experts gives zeros, and so does one that a mask leaves out.

        Raises:
            ArgumentError: a bad argument. Nothing was sent and the buffer stays usable.
            BufferStateError: the buffer is closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank's results did not come in time. The buffer is then broken.

        Examples:
            >>> received = buffer.dispatch(x, topk_idx)
            >>> out = buffer.combine(received.tokens, received.handle, topk_weights)
            >>> out.shape, out.dtype
            (torch.Size([16, 7168]), torch.bfloat16)
        """
        if (
            self._calls is not None
            and shared_expert_x is ori_x is None
            and const_expert_alpha_1 is const_expert_alpha_2 is const_expert_v is None
            and wait is True
            and not self._sent
        ):
            result: torch.Tensor | None
            is_plain = comm_quantize is None and performance_info is out is None
            if is_plain and type(handle) is DispatchHandle:
                result = self._calls.combine(y, handle, topk_weights)
            else:
                options = comm_quantize, performance_info, out
                result = self._calls.combine_with(y, handle, topk_weights, options)
            if result is not None:
                return result
        with self._communicator.noting_refusals("combine"):
            self._communicator.check_usable()
            self._plans.sent.make_way_for("combine")
            arguments.check_handle(handle, self._id, self._communicator)
            tensors = {
                "y": y,
                "topk_weights": topk_weights,
                "performance_info": performance_info,
                "shared_expert_x": shared_expert_x,
                "ori_x": ori_x,
                "const_expert_alpha_1": const_expert_alpha_1,
                "const_expert_alpha_2": const_expert_alpha_2,
                "const_expert_v": const_expert_v,
            }
            comm_quantize = check_choice("comm_quantize", comm_quantize, (None, "int8"))
            return self._placed.any_combine(tensors, handle, comm_quantize, out, check_flag("wait", wait))

    def expert_output(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor for the experts' outputs of the next combine: what combine moves least from.

        With "direct" it lies in this rank's window, where peers read it; results that are elsewhere are
        copied there first. Take one for each combine, after the combine before it: an earlier one may
        still be read, and holds what it held until the combine after the next one. With other schemes it
        is a tensor like any other.

        Args:
            dtype: of the results; None for that of the latest dispatch.

        Returns:
            (A, H), uninitialised: of one round without gaps. Beside other tokens take ``torch.empty_like``
            of them. Rows at and past the number of received ones are not read. Where rows are
            padded, so many elements apart as a padded row has: ``stride(0)``.

        Raises:
            BufferStateError: the buffer is closed or broken, or there was no dispatch to take a dtype from.
            ArgumentError: a dtype that tokens cannot have.

        Examples:
            >>> received = buffer.dispatch(x, topk_idx)
            >>> y = buffer.expert_output()
            >>> out = buffer.combine(y.copy_(received.tokens), received.handle, topk_weights)
        """
        self._communicator.check_usable()
        if dtype is not None:
            dtype = check_choice("dtype", dtype, TOKEN_DTYPES)
        elif (dtype := self._latest_dtype) is None:
            raise BufferStateError("there was no dispatch yet. Pass a dtype.")
        if self._communicator.has_outputs_in_window:
            made = self._communicator.window_tensor("results", dtype)
        else:
            made = self._backend.empty((self._communicator.capacity, self.config.padded.hidden), dtype)
        return made[: self.capacity, : self.config.hidden] if self._plans.is_fitted else made
