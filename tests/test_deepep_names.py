"""DeepEP's names: errors of the types that Python's own are, which say what is here instead."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import moe_triton
from moe_triton import DispatchOutput, EPBuffer
from moe_triton.core.deepep import OF_BUFFER, OF_MODULE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-deepep.md"


@pytest.mark.parametrize("name", OF_MODULE)
def test_a_name_of_the_package(name: str) -> None:
    assert not hasattr(moe_triton, name)
    assert getattr(moe_triton, name, None) is None
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}': .*docs/from-deepep\.md"):
        getattr(moe_triton, name)
    with pytest.raises(ImportError, match=rf"cannot import name '{name}' .*docs/from-deepep\.md"):
        exec(f"from moe_triton import {name}")


def test_other_names_are_missing_as_ever() -> None:
    with pytest.raises(AttributeError, match=r"module 'moe_triton' has no attribute 'nothing'$"):
        moe_triton.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'moe_triton' \(.*__init__"):
        exec("from moe_triton import nothing")
    exec("from moe_triton import *")
    exec("from moe_triton import torch_npu_ops")


@pytest.mark.parametrize("name", OF_BUFFER)
def test_a_name_of_the_buffer(name: str) -> None:
    buffer = object.__new__(EPBuffer)
    for owner in (EPBuffer, buffer):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=rf"'EPBuffer' .* '{name}': .*docs/from-deepep\.md"):
            getattr(owner, name)
    inspect.getmembers(buffer, inspect.ismethod)
    setattr(buffer, name, 1)  # as of any other class
    assert getattr(buffer, name) == 1


def test_the_page_has_these_names_and_the_order_of_fields() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in (*OF_MODULE, *OF_BUFFER) if f"`{name}" not in text] == []
    assert f"\n| Here | {' | '.join(f'`{field}`' for field in DispatchOutput._fields)} |\n" in text
