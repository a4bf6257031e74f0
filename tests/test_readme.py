"""The README's example runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from moe_triton.processes import RankGroup

README = Path(__file__).resolve().parent.parent / "README.md"


def example() -> str:
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)
    assert code is not None
    # The processes of the test have their group already.
    text, replaced = re.subn(r"^dist\.init_process_group.*$", "", code.group(1), flags=re.M)
    assert replaced == 1
    return text


def run_example(rank: int, num_ranks: int, code: str) -> tuple[int, float]:
    names: dict[str, object] = {}
    exec(code, names)
    out, y, weights = names["out"], names["x"], names["weights"]
    assert isinstance(out, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    assert isinstance(weights, torch.Tensor)
    # The example's experts return their input: out is x times the sum of the weights, but for rounding.
    expected = y.float() * weights.sum(dim=1, keepdim=True)
    return out.shape[0], float((out.float() - expected).abs().max())


def test_the_example_runs_on_four_ranks(ranks: Callable[[int], RankGroup]) -> None:
    for num_tokens, error in ranks(4).run(run_example, example()):
        assert num_tokens == 16
        assert error < 0.06
