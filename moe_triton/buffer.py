"""`EPBuffer`: what users hold to dispatch tokens to experts and combine what comes back.

Shapes: T tokens of this rank, K experts per token, H hidden, M experts in the group, S shared experts,
EP ranks, E experts on this rank, A rows that a dispatch can deliver here at most.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from moe_triton.backends import make_backend
from moe_triton.core.checks import check_choice, check_flag, check_text
from moe_triton.core.config import Config, Product
from moe_triton.core.errors import BufferStateError
from moe_triton.core.row_formats import ROW_FORMATS, row_format_of
from moe_triton.core.tuning import Tuning
from moe_triton.handle import DispatchHandle, DispatchOutput
from moe_triton.limits import check_config, check_num_bytes, scheme_of
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.runtime import arguments, buffer_calls
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.construction import DEFAULT_TIMEOUT_S, Order, seconds_to_meet
from moe_triton.runtime.trace import TracePath
from moe_triton.schemes import layout_of

OPERATORS = ("dispatch", "combine")

_buffer_ids = itertools.count()


class EPBuffer:
    """Dispatch and combine for one expert-parallel group.

    Collective: every rank of the group constructs it, with the same settings, and calls `dispatch` and
    `combine` in the same order, with no tokens where it has none.

    Args:
        group: torch.distributed group with any back end; None is the default group. Only its store is used.
        num_max_tokens_per_rank: most tokens that a rank passes to one dispatch.
        hidden: H, a multiple of 32.
        num_topk: K.
        num_experts: M, routed experts in the whole group; expert e lives on rank R + e // (M / (EP - R)).
        num_shared_experts: S, experts that every token goes to as well.
        num_shared_ranks: R, ranks [0, R) that hold shared experts only.
        num_bytes: bytes that the data window may take, None for what is needed
            (`get_buffer_size_hint`), on the NPU at most HCCL_BUFFSIZE where that is set.
        product: whose limits apply: "A3".
        comm_alg: how tokens travel: "fullmesh_v1" (also ""); "fullmesh_v2", with flags in band; or
            "direct", which writes rows straight into the receivers' outputs and reads results where they
            are. It moves the fewest bytes. Its outputs lie in the window: see `dispatch`.
        relaxed: allow sizes below the product's minimum, for tests and demos.
        backend: "cpu"; or "npu" for the device that is current in this process (docs/npu.md): calls then
            return before they have run, the host reads no ids, and a later call raises what went wrong.
        kernels: "triton", or with "cpu" "torch" for machines without the Triton toolchain (slow).
        num_blocks: blocks per kernel, None for what suits the machine.
        tuning: how operators are cut into parts, how rows are copied and flags waited for; None for what
            suits the machine. Any setting gives the same bits.
        timeout_s: seconds that one wait may take before it raises, 1e-6 to 1e9.
        explicitly_destroy: warn if the buffer is dropped without `close`.
        trace: file that all ranks write to what ran when, for Perfetto (docs/traces.md); None for none.

    Raises:
        ArgumentError: an argument breaks a rule, or the trace's file cannot be written.
        ConfigMismatchError: ranks disagree, or another one cannot be constructed; it names fields and ranks.
        WindowError: no memory for the window.
        ToolchainError: something that the back end needs is missing.
        CommunicationTimeoutError: a rank did not come; it names the missing ranks.
    """

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
        num_bytes: int | None = None,
        product: Product = "A3",
        comm_alg: str = "",
        relaxed: bool = False,
        backend: str = "cpu",
        kernels: str = "triton",
        num_blocks: int | None = None,
        tuning: Tuning | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        explicitly_destroy: bool = False,
        trace: TracePath | None = None,
    ) -> None:
        self._closed = True  # until construction has succeeded
        self._explicitly_destroy = False

        def make_config() -> Config:
            self._explicitly_destroy = check_flag("explicitly_destroy", explicitly_destroy)
            sizes = num_max_tokens_per_rank, hidden, num_topk, num_experts
            return Config(
                *(meeting.num_ranks, *sizes, num_shared_experts, num_shared_ranks),
                product=product,
                scheme=scheme_of(check_text("product", product), check_text("comm_alg", comm_alg)),
                relaxed=relaxed,
            ).normalized()

        meeting = Meeting(group, seconds_to_meet(timeout_s))
        order = Order(
            make_config,
            lambda: make_backend(backend, kernels, tuning),
            lambda needed: check_num_bytes(num_bytes, needed),
            num_blocks,
            timeout_s,
            tuning,
            trace,
        )
        self._communicator = Communicator(meeting, order)
        self.config, self.rank = self._communicator.config, meeting.rank
        self.layout, self._backend = self._communicator.layout, self._communicator.backend
        self._id = next(_buffer_ids)
        self._is_in_window = self._communicator.has_outputs_in_window
        self._kinds: dict[tuple[torch.dtype, str | None, bool, bool], buffer_calls.DispatchKind] = {}
        self._dispatch_arguments = buffer_calls.dispatch_arguments(self.config)
        of_dtype = functools.partial(buffer_calls.combine_arguments, self.config)
        self._combine_arguments = {dtype: of_dtype((dtype,)) for dtype in buffer_calls.TOKEN_DTYPES}
        self._combine_variants: dict[tuple[object, ...], CombineVariant] = {}
        self._latest_dtype: torch.dtype | None = None
        self._keeps_own = self._communicator.site.keeps_own
        self._window_base = self._communicator.window_base
        try:
            self._calls = self._communicator.make_calls(self._id, DispatchOutput, DispatchHandle)
        except BaseException:
            self._communicator.close()
            raise
        self._closed = False

    @staticmethod
    def get_buffer_size_hint(
        num_ranks: int,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        num_shared_experts: int = 0,
        num_shared_ranks: int = 0,
        comm_alg: str = "",
    ) -> int:
        """Bytes of the data window that one rank needs, before anything is constructed.

        Raises:
            ArgumentError: a size breaks a limit.
        """
        scheme = scheme_of("A3", check_text("comm_alg", comm_alg))
        sizes = num_max_tokens_per_rank, hidden, num_topk, num_experts, num_shared_experts, num_shared_ranks
        config = Config(num_ranks, *sizes, scheme=scheme).normalized()
        check_config(config)
        return layout_of(config).data_bytes

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        quantize: str | None = None,
        smooth_scales: torch.Tensor | None = None,
    ) -> DispatchOutput:
        """Sends each token to its experts' ranks and returns what this rank's experts received.

        Args:
            x: (T, H) bf16 or fp16, T at most num_max_tokens_per_rank and 0 allowed.
            topk_idx: (T, K) int32 or int64, distinct in a row; -1 for no expert.
            topk_weights: (T, K) fp32; given here, each received row comes with its weight.
            quantize: "int8" sends rows as int8 with one fp32 scale each: s = 127 / max|x|,
                q = rint(x * s), scale = 1 / s.
            smooth_scales: (S + M, H) fp32, multiplied into a row before it is quantised: a row for each
                shared expert, then one for each routed one.

        Returns:
            Tokens in expert order, with counts and the handle that combine takes. With "direct", the tokens
            lie in the window and stay as they are until the dispatch after the next one begins: clone what
            is to live longer.

        Raises:
            ArgumentError: a bad argument. Nothing was sent and the buffer stays usable.
            BufferStateError: the buffer is closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank's tokens did not come in time. The buffer is then broken.
        """
        if self._calls is not None:
            output: DispatchOutput | None = self._calls.dispatch(
                x, topk_idx, topk_weights, quantize, smooth_scales
            )
            if output is not None:
                self._latest_dtype = output.handle.dtype
                return output
        self._communicator.check_usable()
        c, device = self.config, self._backend.device
        check, wanted, sizes = arguments.check, self._dispatch_arguments, arguments.Sizes()
        row_format = row_format_of(quantize, c.hidden)
        check(wanted["x"], x, sizes, device)
        num_tokens = sizes["T"]
        arguments.check_num_tokens("x", c, num_tokens)
        check(wanted["topk_idx"], topk_idx, sizes, device)
        ids = arguments.take_ids(c, topk_idx, self._backend)
        check(wanted["topk_weights"], topk_weights, sizes, device)
        arguments.check_smoothing(smooth_scales, row_format)
        check(wanted["smooth_scales"], smooth_scales, sizes, device)
        num_ids = num_tokens * c.num_topk
        key = x.dtype, row_format.name, smooth_scales is None, topk_weights is None
        kind = self._kinds.get(key) or self._kind(*key)
        made = self._backend.empty_all([((num_ids,), torch.int32), *kind.specs])
        outputs = dict(zip(kind.names, made, strict=True))
        if self._is_in_window:
            outputs["tokens"] = self._communicator.window_tensor("rows", kind.variant.row_dtype)
        handle = DispatchHandle(
            buffer_id=self._id,
            number=self._communicator.counts["dispatch"],
            dtype=x.dtype,
            topk_idx=ids,
            expand_idx=outputs["expand_idx"],
            recv_offsets=outputs["recv_offsets"],
            assist_info=outputs["origins"],
        )
        bindings: dict[str, Any] = {
            "x": x,
            "topk_idx": ids,
            "topk_weights": topk_weights,
            "smooth_scales": smooth_scales,
            "num_tokens": num_tokens,
            "num_ids": num_ids,
            **outputs,
        }
        self._communicator.run(kind.variant, bindings)
        self._latest_dtype = x.dtype
        get = outputs.get
        return DispatchOutput(
            outputs["tokens"], get("scales"), outputs["tokens_per_expert"], get("weights"), handle
        )

    def combine(
        self, y: torch.Tensor, handle: DispatchHandle, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sends each expert's output back to its token's rank and sums them there.

        ``out[t] = sum_k f32(y_k) * topk_weights[t, k] + sum_s f32(y_s)``: in fp32, k and then s ascending,
        rounded once to the dtype of the dispatched tokens (docs/operators.md, "Arithmetic of combine"). The
        order does not depend on which rank answers first, so the same inputs give the same bits.

        Args:
            y: (n, H) outputs in the order of ``DispatchOutput.tokens``, in the dispatched dtype, n at
                least the number of rows received.
            handle: of the latest dispatch.
            topk_weights: (T, K) fp32 to multiply with, or None for a sum without weights, even if dispatch
                was given some.

        Returns:
            (T, H). A token without experts gives zeros.

        Raises:
            ArgumentError: a bad argument. Nothing was sent and the buffer stays usable.
            BufferStateError: the buffer is closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank's results did not come in time. The buffer is then broken.
        """
        if self._calls is not None:
            result: torch.Tensor | None = self._calls.combine(y, handle, topk_weights)
            if result is not None:
                return result
        self._communicator.check_usable()
        c, device = self.config, self._backend.device
        arguments.check_handle(handle, self._id, self._communicator)
        wanted, sizes = self._combine_arguments[handle.dtype], {"T": handle.num_tokens}
        arguments.check(wanted["y"], y, sizes, device)
        arguments.check_results(y, handle, self._communicator.capacity)
        arguments.check(wanted["topk_weights"], topk_weights, sizes, device)
        in_place = False
        if self._is_in_window:
            in_place = arguments.starts_at(self._communicator.window_tensor("results", y.dtype), y)
        out = self._backend.empty((handle.num_tokens, c.hidden), handle.dtype)
        bindings: dict[str, Any] = {
            "y": y,
            "num_rows": y.shape[0],
            "origins": handle.assist_info,
            "recv_offsets": handle.recv_offsets,
            "topk_idx": handle.topk_idx,
            "topk_weights": topk_weights,
            "num_tokens": handle.num_tokens,
            "out": out,
        }
        if self._keeps_own:
            bindings["expand_idx"] = handle.expand_idx
            bindings["own_results"] = (y.data_ptr() - self._window_base) // y.element_size()
        self._communicator.run(self._combine_variant(y.dtype, topk_weights is not None, in_place), bindings)
        return out

    def expert_output(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor for the experts' outputs of the next combine: what combine moves least from.

        With "direct" it lies in this rank's window, where peers read it; results that are elsewhere are
        copied there first. Take one for each combine, after the combine before it: an earlier one may
        still be read, and holds what it held until the combine after the next one. With other schemes it
        is a tensor like any other.

        Args:
            dtype: of the results; None for that of the latest dispatch.

        Returns:
            (A, H), uninitialised. Rows at and past the number of received ones are not read.

        Raises:
            BufferStateError: the buffer is closed or broken, or there was no dispatch to take a dtype from.
            ArgumentError: a dtype that tokens cannot have.
        """
        self._communicator.check_usable()
        if dtype is not None:
            dtype = check_choice("dtype", dtype, buffer_calls.TOKEN_DTYPES)
        elif (dtype := self._latest_dtype) is None:
            raise BufferStateError("there was no dispatch yet. Pass a dtype.")
        if self._is_in_window:
            return self._communicator.window_tensor("results", dtype)
        return self._backend.empty((self._communicator.capacity, self.config.hidden), dtype)

    def _kind(
        self, dtype: torch.dtype, quantize: str | None, is_plain: bool, is_unweighted: bool
    ) -> buffer_calls.DispatchKind:
        smooth, weights = not is_plain, not is_unweighted
        variant = DispatchVariant(dtype, ROW_FORMATS[quantize], smooth, weights, keeps_own=self._keeps_own)
        kind = buffer_calls.DispatchKind.of(self._communicator.site, variant, not self._is_in_window)
        self._kinds[dtype, quantize, is_plain, is_unweighted] = kind
        return kind

    def _combine_variant(self, dtype: torch.dtype, weights: bool, in_place: bool) -> CombineVariant:
        key = dtype, weights, in_place
        if key not in self._combine_variants:
            self._combine_variants[key] = CombineVariant(
                dtype, weights, in_place=in_place, keeps_own=self._keeps_own
            )
        return self._combine_variants[key]

    def durations_us(self, operator: Literal["dispatch", "combine"]) -> dict[str, float]:
        """Microseconds that each step of this rank's last dispatch or combine took.

        Raises:
            BufferStateError: it has not run yet.
            ArgumentError: there is no such operator.
        """
        check_choice("operator", operator, OPERATORS)
        return self._communicator.durations_us(operator)

    def measure(self, on: bool = True) -> None:
        """Whether calls from now on note how long each step takes, for `durations_us`.

        The CPU back end always does; on an NPU it costs two events per step.
        """
        self._backend.measure(check_flag("on", on))

    def synchronize(self) -> None:
        """Waits for every call of this rank to end, those in graphs too, and raises what went wrong in one.

        The CPU back end's calls have ended when they return, and raise by themselves.

        Raises:
            BufferStateError: the buffer is closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank's data did not come in time. The buffer is then broken.
        """
        self._communicator.synchronize()

    def write_trace(self) -> None:
        """Adds what this rank has done since the last time to the trace. `close` does so too.

        Raises:
            BufferStateError: the buffer has no trace, is closed, or is in use by another thread.
            OSError: the file cannot be written.
        """
        self._communicator.write_trace()

    def close(self) -> None:
        """Gives the window back. Other calls raise afterwards; closing again does nothing.

        A call that another thread is inside of ends at once in a `BufferStateError`, and `close` waits for
        it. Tensors of the window, as dispatch returns them with "direct", hold what they held.
        """
        self._closed = True
        self._communicator.close()

    def __enter__(self) -> EPBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and self._explicitly_destroy:
            warnings.warn("EPBuffer was dropped without close()", ResourceWarning, stacklevel=2)
