from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.kernels.stamps import stamps_kernel
from tests.kernels.calls import split_stamps
from tests.kernels.routes import FORMS, LAUNCHES, Guarded, Launch, assert_same_bits, kernel_settings

I32, F32 = torch.int32, torch.float32


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_scale", [False, True])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    capacity=st.integers(1, 90),
    number=st.integers(-2, 94) | st.sampled_from([-(2**31), 2**31 - 1]),
    programs=st.integers(1, 4),
)
def test_stamps(
    launch: Launch,
    target: str,
    has_weight: bool,
    has_scale: bool,
    seed: int,
    capacity: int,
    number: int,
    programs: int,
) -> None:
    """Any bits at all, of as many rows as there are and fit; nothing else is written."""
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (capacity, 8), dtype=np.int32)
    stamps = torch.from_numpy(words.copy())
    origins = Guarded((capacity, 3), I32)
    floats = {3: Guarded((capacity,), F32), 4: Guarded((capacity,), F32)}
    wanted = [word for word, is_wanted in ((3, has_weight), (4, has_scale)) if is_wanted]
    outputs = [origins.tensor, *(floats[word].tensor for word in wanted)]
    arguments = [stamps, stamps.view(F32), torch.tensor([number], dtype=I32), *outputs, capacity]
    launch(stamps_kernel(has_weight, int(has_scale), target), arguments, programs)
    rows = max(0, min(number, capacity))
    assert np.array_equal(origins.check()[:rows].numpy(), words[:rows, :3])
    assert_same_bits(origins.check()[rows:], origins.untouched()[rows:])
    for word, output in floats.items():
        written = rows if word in wanted else 0
        got = output.check()
        assert np.array_equal(got[:written].view(I32).numpy(), words[:written, word])
        assert_same_bits(got[written:], output.untouched()[written:])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_split_stamps(launch: Launch) -> None:
    stamps = torch.zeros((3, 8), dtype=I32)
    stamps[:2, :3] = torch.tensor([[1, 4, 0], [0, 2, 1]])
    stamps.view(F32)[:2, 3:5] = torch.tensor([[0.5, 0.25], [2.0, 1.0]])
    origins, weights, scales = split_stamps(stamps, 2, launch, programs=2)
    assert origins[:2].tolist() == [[1, 4, 0], [0, 2, 1]]
    assert weights[:2].tolist() == [0.5, 2.0]
    assert scales[:2].tolist() == [0.25, 1.0]
