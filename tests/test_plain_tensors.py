"""Which tensors have memory that holds their values: Python's answer, and native code's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.host import CpuHost
from moe_triton.core import checks, plain_tensors
from moe_triton.core.errors import ArgumentError
from tests.bad_calls.values import MEMORY

HOST = CpuHost()
GOOD = {
    "floats": torch.ones(3, 4),
    "halves": torch.ones(3, 4, dtype=torch.bfloat16),
    "integers": torch.ones(3, 4, dtype=torch.int32),
    "flags": torch.ones(5, dtype=torch.bool),
    "one": torch.ones(()),
    "none": torch.ones(0, 4),
    "strided": torch.ones(4, 6)[1:, ::2],
    "from the middle": torch.ones(10)[3:],
    "expanded": torch.ones(1, 4).expand(3, 4),
    "lazily copied": torch._lazy_clone(torch.ones(3)),
}
# DTensors need a process group.
STRANGE = [label for label in MEMORY if label != "distributed"]


@pytest.mark.parametrize("name", GOOD)
def test_plain_tensors_are_plain(name: str) -> None:
    assert plain_tensors.fault_of(GOOD[name]) is None
    assert HOST.describe(None, GOOD[name]) is not None
    with torch.inference_mode():
        assert HOST.describe(torch.ones(3))
        assert plain_tensors.fault_of(torch.ones(3)) is None


@pytest.mark.parametrize("label", STRANGE)
@pytest.mark.parametrize("name", ["floats", "halves", "integers"])
def test_strange_tensors_are_not(name: str, label: str) -> None:
    good = GOOD[name]
    applies, mutation = MEMORY[label]
    if not applies(good):
        return
    seen: list[tuple[bool, Any]] = []

    def look(value: Any) -> None:
        seen.append((HOST.describe(value) is not None, plain_tensors.fault_of(value)))

    mutation(good, look)
    assert seen[0][0] is False
    if label != "quantised":  # what is not plain natively for its dtype's sake is refused for that
        assert seen[0][1] is not None


def test_gradients_are_refused_only_where_they_would_be_lost() -> None:
    wants = torch.ones(3, requires_grad=True)
    for tensor in (wants, wants * 2):
        fault = plain_tensors.fault_of(tensor)
        assert fault is not None
        assert "no_grad" in fault.remedy
        assert "detach" in fault.remedy
        assert HOST.describe(tensor) is None
        with torch.no_grad():
            assert plain_tensors.fault_of(tensor) is None
            assert HOST.describe(tensor)


def test_a_parameter_is_plain_and_so_is_a_bare_subclass() -> None:
    class Bare(torch.Tensor):
        pass

    with torch.no_grad():
        for tensor in (torch.nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3).as_subclass(Bare)):
            assert plain_tensors.fault_of(tensor) is None
            assert checks.check_tensor("x", tensor, shape=(2, 3), dtypes=(torch.float32,)) is tensor


@given(st.integers(0, 40), st.integers(0, 30), st.integers(1, 10))
def test_a_storage_that_is_too_short_is_seen(num_bytes: int, offset: int, elements: int) -> None:
    storage = torch.zeros(64, dtype=torch.int32)
    tensor = storage[offset : offset + elements]
    storage.untyped_storage().resize_(4 * num_bytes)
    is_whole = offset + elements <= num_bytes
    assert (HOST.describe(tensor) is not None) is is_whole
    assert (plain_tensors.fault_of(tensor) is None) is is_whole


@given(st.integers(), st.sampled_from([int, np.int8, np.int64, np.uint16]))
def test_integers_of_any_type_are_integers(value: int, kind: Any) -> None:
    value %= 100
    assert type(checks.check_integer("n", kind(value))) is int
    assert checks.check_integer("n", kind(value)) == value


@given(st.one_of(st.floats(), st.booleans(), st.text(), st.none(), st.binary(), st.lists(st.integers())))
def test_nothing_else_is_an_integer(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"n is .*it must be an integer"):
        checks.check_integer("n", value)
    with pytest.raises(ArgumentError):
        checks.check_choice("n", value, (7, "int 8"))


@given(st.text(max_size=300))
def test_strings_of_a_subclass_become_strings(value: str) -> None:
    class Odd(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise TypeError

        __hash__ = None  # type: ignore[assignment]

    assert type(checks.check_text("s", Odd(value))) is str
    assert checks.check_text("s", Odd(value)) == value
    assert checks.check_choice("s", Odd("int8"), (None, "int8")) == "int8"
