"""An argument that some schemes take is refused by all others, by the name that its caller has for it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.operators.buffer import DISPATCH_OF_BUFFER, attributes_of
from moe_triton.operators.description import Operator, Symbols, TensorArgument
from moe_triton.operators.dispatch import DISPATCH
from moe_triton.schemes import SCHEMES, scheme_type
from moe_triton.schemes.direct.scheme import Direct
from moe_triton.schemes.rules import check_given

TAGS = TensorArgument("row_tags", "(BS,)", torch.int32, placeholders=("row_tags",), by_scheme=True)
NAMES = [(product, scheme) for product, schemes in SCHEMES.items() for scheme in schemes]


class Tagging(Direct):
    takes: ClassVar[frozenset[str]] = frozenset({"row_tags"})


def call(operator: Operator, config: Config, tags: torch.Tensor | None) -> Symbols:
    tagged = replace(
        operator, tensors=(*operator.tensors, TAGS), names={**operator.names, "row_tags": "tags"}
    )
    modes = {"row_format": DISPATCH.modes["row_format"]({"quant_mode": 0}), "local_bypass": False}
    tensors = {"x": torch.zeros(3, 64), "topk_idx": torch.zeros(3, 2, dtype=torch.int32), "row_tags": tags}
    return Symbols(tagged, {**attributes_of(config, 0), **modes, **tensors})


def config_of(product: str, scheme: str) -> Config:
    return Config(4, 8, 64, 2, 8, product=product, scheme=scheme, relaxed=True)  # type: ignore[arg-type]


@pytest.fixture
def tagging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES["A3"], "tagging", f"{__name__}:Tagging")


@pytest.mark.parametrize("operator", [DISPATCH, DISPATCH_OF_BUFFER], ids=["torch_npu", "EPBuffer"])
@pytest.mark.parametrize(("product", "scheme"), NAMES)
@pytest.mark.usefixtures("tagging")
def test_is_refused_where_no_scheme_says_that_it_takes_it(
    product: str, scheme: str, operator: Operator
) -> None:
    config, tags = config_of(product, scheme), torch.zeros(3, dtype=torch.int32)
    instead = ", or use comm_alg='tagging'." if product == "A3" else "."
    message = f"tags is given, but comm_alg='{scheme}' takes none. Leave it out{instead}"
    with pytest.raises(ArgumentError) as refused:
        check_given(scheme_type(config), config, call(operator, config, tags))
    assert message in str(refused.value)
    check_given(scheme_type(config), config, call(operator, config, None))


@pytest.mark.usefixtures("tagging")
def test_is_taken_where_the_scheme_says_so() -> None:
    config = config_of("A3", "tagging")
    check_given(
        scheme_type(config), config, call(DISPATCH_OF_BUFFER, config, torch.zeros(3, dtype=torch.int32))
    )
