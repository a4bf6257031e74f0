"""The documentation is in step with the code: its examples run, its tables are the rules."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_triton import limits, torch_npu_ops
from moe_triton.config import Config
from moe_triton.errors import ArgumentError
from moe_triton.processes import RankGroup

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MARKER = "<!-- tests/test_docs.py runs this on four ranks -->"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def code_blocks(text: str) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)^ *```$", text, flags=re.S | re.M)
    return [textwrap.dedent(block) for block in found]


def examples(name: str) -> list[str]:
    """The marked examples of a page, in a process that has its group already."""
    marked = [code_blocks(after)[0] for after in page(name).split(MARKER)[1:]]
    cut = [re.subn(r"^dist\.init_process_group.*$", "", code, count=1, flags=re.M) for code in marked]
    assert all(replaced == 1 for _, replaced in cut)
    return [text for text, _ in cut]


def run_example(rank: int, num_ranks: int, code: str) -> tuple[tuple[int, ...], float]:
    names: dict[str, object] = {}
    exec(code, names)
    out, x, weights = names["out"], names["x"], names["weights"]
    assert isinstance(out, torch.Tensor)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weights, torch.Tensor)
    # The examples' experts return their input: out is x times the sum of the weights, but for rounding.
    expected = x.float() * weights.sum(dim=1, keepdim=True)
    return tuple(out.shape), float((out.float() - expected).abs().max())


def test_the_first_examples_run_on_four_ranks(ranks: Callable[[int], RankGroup]) -> None:
    found = examples("getting-started.md")
    assert len(found) == 2
    for code in found:
        for shape, error in ranks(4).run(run_example, code):
            assert shape == (10, 1024)
            assert error < 0.06


def test_the_torch_npu_example_runs_on_four_ranks(ranks: Callable[[int], RankGroup]) -> None:
    (code,) = examples("from-torch-npu.md")
    for shape, error in ranks(4).run(run_example, code):
        assert shape == (16, 7168)
        assert error < 0.06


def test_both_sides_of_the_example_call_the_same() -> None:
    theirs, ours = (block.split("group = (")[1] for block in code_blocks(page("from-torch-npu.md"))[:2])
    assert theirs.replace(', device="npu"', "") == ours


def test_the_functions_that_are_listed_are_those_that_exist() -> None:
    section = page("from-torch-npu.md").split("## The functions\n")[1].split("\n## ")[0]
    listed = re.findall(r"`(_?npu_\w+)`", section)
    assert sorted(listed) == sorted(name for name in torch_npu_ops.__all__ if re.match("_?npu_", name))
    assert len(listed) == 11


def test_traced_functions_are_the_operators_that_the_page_names() -> None:
    for name in torch_npu_ops.__all__:
        if re.match("_?npu_", name):
            assert hasattr(torch.ops.moe_triton, name.lstrip("_"))


def test_every_public_name_is_explained() -> None:
    text = page("from-torch-npu.md")
    assert not [name for name in torch_npu_ops.__all__ if f"`{name}" not in text]


def test_the_settings_that_are_listed_are_those_of_configure() -> None:
    section = page("from-torch-npu.md").split("| Setting |")[1].split("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, flags=re.M)
    parameters = inspect.signature(torch_npu_ops.configure).parameters.values()
    defaults = [(p.name, str(p.default)) for p in parameters]
    assert [(name, default.strip('"')) for name, default in listed] == defaults


def test_the_error_that_is_shown_is_the_error_that_is_raised() -> None:
    config = Config(num_ranks=1, num_max_tokens_per_rank=64, hidden=7168, num_topk=8, num_experts=64)
    call = limits.Call(batch=64, group_ep="ep")
    with pytest.raises(ArgumentError) as caught:
        limits.check_config(config)
    assert str(caught.value.renamed(limits.torch_npu_names(call))) in page("from-torch-npu.md")


def test_the_page_of_limits_is_the_table_of_rules() -> None:
    assert page("limits.md") == limits.markdown(), "run: python -m moe_triton.limits > docs/limits.md"


def test_the_page_of_limits_holds_every_rule() -> None:
    text = page("limits.md")
    for rule_set in limits.RULE_SETS:
        section = text.split(f"## {rule_set.title}\n")[1].split("\n## ")[0]
        for rule in (*rule_set.config, *rule_set.call):
            assert f"`{rule.argument}`" in section
            assert f"| {rule.limit} |" in section


def test_the_page_of_limits_can_be_printed() -> None:
    command = [sys.executable, "-m", "moe_triton.limits"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert printed.stdout == page("limits.md")


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(
        r"^  - [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M
    )
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("**/*.md"))


def test_links_between_pages_lead_somewhere() -> None:
    for path in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", path.read_text(encoding="utf-8")):
            assert (DOCS / target).is_file(), f"{path.name}: {target}"


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the docs extra is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False, timeout=240
    )
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    names = [f"moe_triton.torch_npu_ops.{name}" for name in torch_npu_ops.__all__]
    assert not [name for name in (*names, "moe_triton.EPBuffer.dispatch") if f'id="{name}"' not in api]
