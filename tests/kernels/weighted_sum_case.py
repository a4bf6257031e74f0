"""A weighted sum with features: its arguments, and what each token's sum must be."""

from __future__ import annotations

import numpy as np
import torch

from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from tests.kernels.models import entry_model, sum_of_entries_model
from tests.kernels.routes import Guarded, Launch, assert_same_bits

NUM_EXPERTS, MAX_INDEX = 5, 7
FIRST_OWN, NUM_OWN, NUM_RANKS = 1, 2, 3


class Case:
    """Every argument of a sum with features, by its name in the kernel, and each token's sum.

    What no sum should hold is NaN by the time the kernel runs.
    """

    def __init__(
        self,
        features: SumFeatures,
        dtype: torch.dtype,
        hidden: int,
        topk: int,
        num_shared: int,
        has_weights: bool,
        seed: int,
        tokens: int,
        special: tuple[int, int, int] = (2, 1, 2),
        gap: int = 0,
    ) -> None:
        self.features, self.dtype, self.hidden = features, dtype, hidden
        self.topk, self.num_shared, self.has_weights = topk, num_shared, has_weights
        self.special = special if features.special else (0, 0, 0)
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = tokens
        # -2 and the ids behind the special experts are of no expert
        self.ids = self.integers(-2, NUM_EXPERTS + sum(self.special) + 2, tokens, topk)
        self.weights = torch.rand((tokens, topk), generator=self.generator) * 2 - 0.5
        self.active_index = self.integers(-2, 3, tokens)
        self.expand_idx = self.integers(-3, MAX_INDEX + 3, tokens, topk)  # clamped
        self.shared_x, self.ori_x = self.rows(tokens), self.rows(tokens)
        self.alphas = torch.randn((tokens, topk, 2), generator=self.generator)
        self.const_v = self.rows(self.special[2])
        # some are listed twice, some entries are no tokens
        self.listed = self.integers(-1, tokens + 1, tokens)
        self.bounds = self.integers(-1, tokens + 2, 2)
        self.zone, self.turned = self.integers(0, 2, 1), Guarded((1,), torch.int32)
        self.rank = seed % NUM_RANKS
        self.ends = self.integers(0, 5, NUM_OWN * NUM_RANKS).cumsum(0, dtype=torch.int32)
        self.make_slots(0 if features.own else gap)  # own results lie close together

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def rows(self, *shape: int) -> torch.Tensor:
        return torch.randn((*shape, self.hidden), generator=self.generator).to(self.dtype)

    def make_slots(self, gap: int) -> None:
        """Slots, packed as they lie in a window, and what the receiver reads in each of them."""
        width = self.topk + self.num_shared
        # by offset, results lie anywhere before and behind where the sum starts to count
        self.order = torch.randperm(self.tokens * width, generator=self.generator).view(self.tokens, width)
        self.origin = self.tokens * width // 2 if self.features.by_offset else 0
        # own results lie before the slots
        self.own_tokens = -(-int(self.ends[-1]) // width) if self.features.own else 0
        self.origin += self.own_tokens * width
        if self.features.by_expert:
            shape: tuple[int, ...] = (NUM_EXPERTS + self.num_shared, max(MAX_INDEX, self.tokens))
        else:
            shape = (self.own_tokens + self.tokens, width)
        if self.features.quantized:
            self.scale_offset = self.hidden + gap
            self.slot_width = self.scale_offset + self.hidden // 4 + gap
            self.slots = self.integers(-128, 128, *shape, self.slot_width).to(torch.int8)
            scales = torch.rand((*shape, self.hidden // 8), generator=self.generator).to(self.dtype)
            end = self.scale_offset + self.hidden // 4
            self.slots[..., self.scale_offset : end] = scales.view(torch.int8)
            products = self.slots[..., : self.hidden].float() * scales.float().repeat_interleave(8, -1)
            self.values = products.to(self.dtype).float()
        else:
            self.slot_width = self.hidden + gap
            self.slots = torch.randn((*shape, self.slot_width), generator=self.generator).to(self.dtype)
            self.values = self.slots[..., : self.hidden].float()

    def where(self, token: int, k: int) -> tuple[int, int]:
        """The slot of entry k, or of a shared result from topk on."""
        if self.features.by_offset:
            first, second = divmod(int(self.order[token, k]), self.topk + self.num_shared)
            return first, second
        if self.features.own and (row := self.own_row(token, k)) is not None:
            return row // (self.topk + self.num_shared), row % (self.topk + self.num_shared)
        if not self.features.by_expert:
            return self.own_tokens + token, k
        if k >= self.topk:
            return NUM_EXPERTS, token
        return int(self.ids[token, k]), int(self.expand_idx[token, k].clamp(0, MAX_INDEX - 1))

    def own_row(self, token: int, k: int) -> int | None:
        """Where an own expert left a result, if there is room for it among this rank's rows."""
        expert = int(self.ids[token, k]) if k < self.topk else -1
        if not FIRST_OWN <= expert < FIRST_OWN + NUM_OWN:
            return None
        entry = (expert - FIRST_OWN) * NUM_RANKS + self.rank
        row = (int(self.ends[entry - 1]) if entry else 0) + int(self.expand_idx[token, k])
        return row if 0 <= row < int(self.ends[entry]) else None

    def spoil(self) -> None:
        """NaN where nothing was sent, and for weights and alphas of ids that have no use for them."""
        read = {
            self.where(t, k)
            for t in range(self.tokens)
            for k in range(self.topk + self.num_shared)
            if (k >= self.topk or 0 <= self.ids[t, k] < NUM_EXPERTS) and self.takes_part(t)
        }
        spoiled = self.slots.view(self.dtype) if self.features.quantized else self.slots
        for i in range(spoiled.shape[0]):
            for j in range(spoiled.shape[1]):
                if (i, j) not in read:
                    spoiled[i, j] = float("nan")
        is_expert = (self.ids >= 0) & (self.ids < NUM_EXPERTS + sum(self.special))
        self.weights[~is_expert] = float("nan")
        first_const = NUM_EXPERTS + sum(self.special[:2])
        self.alphas[(self.ids < first_const) | ~is_expert] = float("nan")

    def is_asked_for(self, token: int) -> bool:
        begin, end = (max(bound, 0) for bound in self.bounds.tolist())
        return not self.features.listed or token in self.listed[begin:end].tolist()

    def takes_part(self, token: int) -> bool:
        return self.is_asked_for(token) and not (self.features.masked and int(self.active_index[token]) < 0)

    def arguments(self, out: torch.Tensor, first_token: int, num_tokens: int) -> list[torch.Tensor | int]:
        slots = self.slots.view(-1)[self.origin * self.slot_width :]
        outer, inner = self.slots.stride(0), self.slots.stride(1)
        by_name: dict[str, torch.Tensor | int] = {
            "slots": slots,
            "slot_scales": slots[self.scale_offset :].view(self.dtype) if self.features.quantized else 0,
            "topk_idx": self.ids,
            "topk_weights": self.weights,
            "expand_idx": self.expand_idx,
            "offsets": (self.order - self.origin) * self.slot_width,
            "recv_offsets": self.ends,
            "active_index": self.active_index,
            "tokens": self.listed,
            "bounds": self.bounds,
            "shared_x": self.shared_x,
            "ori_x": self.ori_x,
            "alphas": self.alphas,
            "const_v": self.const_v,
            "out": out,
            "zone": self.zone,
            "turned": self.turned.tensor,
            "token_stride": outer,
            "slot_stride": inner,
            "expert_stride": outer,
            "index_stride": inner,
            "own_results": -self.origin * self.slot_width,
            "first_token": first_token,
            "num_tokens": self.tokens if self.features.listed else num_tokens,
            "num_experts": NUM_EXPERTS,
            "max_index": MAX_INDEX,
            "first_expert": FIRST_OWN,
            "num_local_experts": NUM_OWN,
            "num_ranks": NUM_RANKS,
            "rank": self.rank,
            "num_zero": self.special[0],
            "num_copy": self.special[1],
            "num_const": self.special[2],
        }
        return [by_name[arg.name] for arg in self.kernel("cpu").args]

    def kernel(self, target: str) -> TritonKernel:
        return weighted_sum_kernel(
            self.dtype,
            self.hidden,
            self.topk,
            self.num_shared,
            self.has_weights,
            target,
            features=self.features,
        )

    def expected(self) -> torch.Tensor:
        """(T, H) in the output's dtype, as if all tokens took part."""
        sums = np.zeros((self.tokens, self.hidden), np.float32)
        for t in range(self.tokens):
            x = self.ori_x[t].float().numpy()
            entries = []
            for k in range(self.topk):
                expert = int(self.ids[t, k])
                slot = self.values[self.where(t, k)].numpy() if 0 <= expert < NUM_EXPERTS else x
                constants = self.alphas[t, k].numpy(), self.const_v.float().numpy()
                entries.append(entry_model(expert, slot, x, *constants, NUM_EXPERTS, *self.special[:2]))
            unweighted = [self.values[self.where(t, self.topk + s)].numpy() for s in range(self.num_shared)]
            if self.features.shared_x:
                unweighted.append(self.shared_x[t].float().numpy())
            weights = self.weights[t].numpy() if self.has_weights else None
            sums[t] = sum_of_entries_model(entries, weights, unweighted, self.hidden)
        return torch.from_numpy(sums).to(self.out_dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.features.fp32_out else self.dtype

    def check(self, launch: Launch, target: str, programs: int, first_token: int, num_tokens: int) -> None:
        """Run tokens [first_token, first_token + num_tokens), and compare the whole output."""
        out = Guarded((self.tokens, self.hidden), self.out_dtype)
        want = self.expected()
        self.spoil()
        launch(self.kernel(target), self.arguments(out.tensor, first_token, num_tokens), programs)
        chosen = range(first_token, first_token + num_tokens)
        turned = 1 - self.zone if self.features.turns else self.turned.untouched()
        assert torch.equal(self.turned.check(), turned)
        untouched, zeros = out.untouched(), torch.zeros_like(want)
        for t in range(self.tokens):
            is_asked_for = (self.features.listed or t in chosen) and self.is_asked_for(t)
            left_out = zeros if self.features.clears else untouched
            made = want if self.takes_part(t) else left_out
            assert_same_bits(out.check()[t], (made if is_asked_for else untouched)[t])
