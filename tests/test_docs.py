"""The documentation is in step with the code: its examples run, its tables are the rules."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.compare.plots import plot_glance
from benchmarks.compare.report import Report
from moe_triton import limits, reference, torch_npu_ops
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.layout import align
from moe_triton.processes import RankGroup
from moe_triton.schemes.rank_context import USUAL_TOKENS
from moe_triton.schemes.rules import check_call, check_config, rule_sets
from moe_triton.tools.pages import arguments
from moe_triton.tools.pages.limits import markdown
from moe_triton.torch_npu_ops.names import NAMES, SIZES, names_for
from tests import test_reference
from tests.patience import seconds
from tests.reference_helpers import dispatch_shapes

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
    return tuple(out.shape), float((out.float() - expected).abs().amax()) if len(out) else 0.0


def test_the_first_examples_run_on_four_ranks(ranks: Callable[[int], RankGroup]) -> None:
    found = examples("getting-started.md")
    assert len(found) == 2
    for code in found:
        for shape, error in ranks(4).run(run_example, code):
            assert shape == (10, 1024)
            assert error < 0.06


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("index.md", [16] * 4),
        ("from-torch-npu.md", [16] * 4),
        ("from-deepep.md", [16] * 4),
        ("serving.md", [10, 11, 12, 13]),
    ],
)
def test_the_example_of_a_page_runs_on_four_ranks(
    ranks: Callable[[int], RankGroup], name: str, tokens: list[int]
) -> None:
    (code,) = examples(name)
    results = ranks(4).run(run_example, code)
    assert [shape for shape, _ in results] == [(count, 7168) for count in tokens]
    assert max(error for _, error in results) < 0.06


def test_the_examples_of_layouts_run_on_four_ranks(ranks: Callable[[int], RankGroup]) -> None:
    for code, tokens in zip(examples("layouts.md"), (16, 200), strict=True):
        for shape, error in ranks(4).run(run_example, code):
            assert shape == (tokens, 1024)
            assert error < 0.06


def test_the_example_of_prefill_runs_on_four_ranks(ranks: Callable[[int], RankGroup]) -> None:
    (code,) = examples("prefill.md")
    results = ranks(4).run(run_example, code)
    assert [shape for shape, _ in results] == [(tokens, 1024) for tokens in (700, 16, 0, 129)]
    assert max(error for _, error in results) < 0.06


def run_balanced(rank: int, num_ranks: int, code: str) -> dict[str, torch.Tensor]:
    names: dict[str, object] = {}
    exec(code, names)
    return {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}


def test_the_examples_of_balance_run_on_four_ranks(ranks: Callable[[int], RankGroup]) -> None:
    layer, training = examples("balance.md")
    assert all(made["out"].shape == (16, 7168) for made in ranks(4).run(run_balanced, layer))
    grads = [made["w_grads"].mean(dim=(1, 2)).tolist() for made in ranks(4).run(run_balanced, training)]
    assert grads == [[3, 0, 0, 0], *[[0] * 4] * 3]  # from the three slots that have expert 0


def test_both_sides_of_the_example_call_the_same() -> None:
    theirs, ours = (block.split("group = (")[1] for block in code_blocks(page("from-torch-npu.md"))[:2])
    assert theirs.replace(', device="npu"', "") == ours


def test_the_functions_that_are_listed_are_those_that_exist() -> None:
    section = page("from-torch-npu.md").split("## The functions\n")[1].split("\n## ")[0]
    listed = re.findall(r"`(_?npu_\w+)`", section)
    assert sorted(listed) == sorted(name for name in torch_npu_ops.__all__ if re.match("_?npu_", name))
    assert len(listed) == 12


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
    call = limits.Call(num_tokens=64, group="ep")
    with pytest.raises(ArgumentError) as caught:  # noqa: PT012 - by whichever of the two
        check_config(config)
        check_call(config, call)
    text = " ".join(page("from-torch-npu.md").split())
    assert str(caught.value.renamed(names_for(call))) in text


def test_the_page_of_limits_is_the_table_of_rules() -> None:
    assert page("limits.md") == markdown(), "run: python -m moe_triton.tools.pages limits > docs/limits.md"


def test_the_page_of_arguments_is_the_table() -> None:
    told = "run: python -m moe_triton.tools.pages arguments > docs/arguments.md"
    assert page("arguments.md") == arguments.markdown(), told


def test_the_page_of_limits_holds_every_rule() -> None:
    text = page("limits.md")
    for rule_set in rule_sets():
        section = text.split(f"## {rule_set.title}\n")[1].split("\n## ")[0]
        for rule in (*rule_set.config, *rule_set.call):
            assert f"`{(NAMES | SIZES).get(rule.argument, rule.argument)}`" in section
            assert f"| {rule.limit} |" in section


@pytest.mark.parametrize("name", ["limits", "arguments"])
def test_the_page_can_be_printed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pages", name])
    runpy.run_module("moe_triton.tools.pages", run_name="__main__")
    assert capsys.readouterr().out == page(f"{name}.md")


def navigation() -> dict[str, list[str]]:
    """Pages by their group."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\n\n")[0]
    groups: list[dict[str, list[dict[str, str]]]] = yaml.safe_load(text)
    return {
        name: [path for entry in pages for path in entry.values()]
        for group in groups
        for name, pages in group.items()
    }


def test_every_page_is_in_the_navigation() -> None:
    listed = [path for pages in navigation().values() for path in pages]
    assert sorted(listed) == sorted([*(path.name for path in DOCS.glob("*.md")), "decisions/index.md"])


def test_the_navigation_has_groups_that_one_can_look_through() -> None:
    sizes = [len(pages) for pages in navigation().values()]
    assert 5 <= len(sizes) <= 8
    assert max(sizes) <= 8
    assert min(sizes) >= 2


def test_the_first_page_installs_runs_and_shows() -> None:
    text = page("index.md")
    assert "pip install '/path/to/moe_triton[cpu]'\nmoe-triton doctor --fix\n" in text
    (code,) = code_blocks(text)
    assert len(code.splitlines()) == 10
    assert re.findall(r"^!\[[^]]+\]\((.*)\)$", text, flags=re.M) == ["benchmarks/glance.svg"]
    assert text.index("## Install") < text.index("## Ten lines") < text.index("## How fast")


def test_the_first_pages_figure_is_that_of_the_last_comparison(tmp_path: Path) -> None:
    report = Report.load(DOCS / "benchmarks" / "compare.json")
    drawn = plot_glance(report.records, int(report.machine["cores"]), tmp_path)
    assert drawn.read_bytes() == (DOCS / "benchmarks" / "glance.svg").read_bytes()


WORDS_OF_OURS = re.compile(
    r"\b[Ss]eed 00\d|\b[Ss]eed figures|\b[Tt]he seed(?:'s own| has| gives| counts)|not to be had"
)


def test_readers_outside_know_every_word_of_a_source() -> None:
    """Figures are published somewhere, or measured; a document that only we have is no source."""
    shown = [*DOCS.rglob("*.md"), *DOCS.rglob("*.svg"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    code = [
        path for folder in ("moe_triton", "autotune", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    sources = [*code, *(ROOT / "kernels_ascendc").rglob("*.h"), *(ROOT / "tests").rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in (*shown, *sources) if path != Path(__file__)}
    assert {path.name: found for path, text in texts.items() if (found := WORDS_OF_OURS.findall(text))} == {}


def test_every_decision_is_in_the_index() -> None:
    listed = re.findall(r"^\| \[(\d{4})\]\((\1-[\w-]+\.md)\) \|", page("decisions/index.md"), flags=re.M)
    assert sorted(name for _, name in listed) == sorted(path.name for path in DOCS.glob("decisions/0*.md"))


def test_links_between_pages_lead_somewhere() -> None:
    for path in DOCS.glob("**/*.md"):
        for target in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


FOLDERS = ("moe_triton", "kernels_ascendc", "tests", "benchmarks", "examples")
SUFFIXES = {".py", ".h", ".cpp", ".cmake", ".txt", ".toml", ".yml"}
# Of other projects, or made by a test or a run.
NOT_OURS = {
    "doc/pythonAPI.md",
    "docs/api/pythonAPI_en.md",
    "page.md",
    "report.md",
    "build/arguments.md",
    "build/limits.md",
    "build/model-figures.md",
}
CITATION = re.compile(r'(docs/[\w-]+\.md),((?:(?:,|\s+and)?\s+"[^"]+")+)')


def sources() -> dict[Path, str]:
    """Every source file but this one; comments that go over several lines as one."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name == "Makefile"]
    texts = {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        for path in found
        if path != Path(__file__).resolve()
    }
    return {path: re.sub(r"\n\s*(?:#|//)?\s*", " ", text) for path, text in texts.items()}


def citations(text: str) -> list[tuple[str, str]]:
    """Page and heading of each citation."""
    found = CITATION.findall(text)
    return [(page, heading) for page, names in found for heading in re.findall(r'"([^"]+)"', names)]


def headings(path: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    without_code = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.S | re.M)
    return re.findall(r"^#+ (.+)$", without_code, flags=re.M)


def test_headings_that_the_source_cites_exist() -> None:
    found = {(str(path), *citation) for path, text in sources().items() for citation in citations(text)}
    assert len(found) > 30
    assert {cited for _, cited, _ in found} >= {"docs/limits.md", "docs/operators.md", "docs/protocol.md"}
    assert sorted(c for c in found if c[2] not in headings(c[1])) == []


def test_pages_that_the_source_names_are_in_the_repository() -> None:
    for path, text in sources().items():
        for name in set(re.findall(r"[\w./-]*[\w-]\.md\b", text)) - NOT_OURS:
            places = (ROOT / name, DOCS / name)
            assert any(place.is_file() for place in places), f"{path} names {name}"


def test_the_page_of_operators_is_cited_with_a_heading() -> None:
    """The reference model alone is all of that page."""
    for path, text in sources().items():
        if path != Path("moe_triton/reference/__init__.py"):
            assert not re.findall(r'docs/operators\.md(?!,\s+")', text), path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('see docs/a.md, "One two"; and', [("docs/a.md", "One two")]),
        ('docs/a.md, "One" and "Two", then "three"', [("docs/a.md", "One"), ("docs/a.md", "Two")]),
        ('docs/a.md, "One", "Two" and "Three"', [("docs/a.md", n) for n in ("One", "Two", "Three")]),
        ('docs/a.md is "one"', []),
    ],
)
def test_citations_are_found(text: str, found: list[tuple[str, str]]) -> None:
    assert citations(text) == found


def test_the_worked_example_is_what_the_reference_computes() -> None:
    blocks = re.findall(r"```\n(.*?)```", page("operators.md").split("## Worked example\n")[1], flags=re.S)
    ids, index, counts, cumulative = ([int(word) for word in block.split()] for block in blocks[:4])
    config, routing = test_reference.worked_example()
    received = reference.dispatch(config, [torch.zeros(4, 32, dtype=torch.bfloat16)] * 2, routing)[0]
    assert ids == routing[0].flatten().tolist()
    assert index == received.expand_idx.tolist()
    assert counts == received.recv_offsets.tolist()
    assert cumulative == received.tokens_per_expert.cumsum(0).tolist()


def table_after(text: str, first_cell: str) -> list[list[str]]:
    """Cells of the table whose header row begins so, without backticks."""
    lines = text.split(f"| {first_cell} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(("s", "r", "rank"), [(0, 0, 0), (2, 4, 0), (2, 4, 7), (1, 3, 1)])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("tp", "batch"), [(0, 3), (1, 500), (2, 3)])
def test_the_shapes_of_the_page_are_those_of_the_reference(
    version: int, s: int, r: int, rank: int, tp: int, batch: int
) -> None:
    deployment = reference.Deployment(
        ep_world_size=12,
        moe_expert_num=(12 - r) * (1 if tp == 2 else 3),
        shared_expert_num=s,
        shared_expert_rank_num=r,
        tp_world_size=tp,
        version=version,
    )
    plain, weighted = (
        dispatch_shapes(deployment, rank, batch=batch, hidden=64, topk=2, has_expert_scales=given)
        for given in (False, True)
    )
    text, is_shared = page("operators.md"), rank < r
    names = {"EP": 12, "BS": batch, "H": 64, "K": 2, "S": s, "R": r, "tp": max(tp, 1), "tp_world_size": tp}
    names |= {"G": batch * 12, "maxBs": batch, "localE": 1 if is_shared else deployment.num_local_experts}
    kinds = {"of routed experts": not is_shared, "of the shared expert, V1": is_shared and version == 1}
    kinds["of a shared expert, V2"] = is_shared and version == 2
    tools = {"min": min, "max": max, "ceil": math.ceil}
    capacities = {kind: what.split(":")[0] for kind, what in table_after(text, "Rank")}
    (capacity,) = (eval(capacities[kind], tools, names) for kind, holds in kinds.items() if holds)
    names["A"] = int(capacity)
    described = {row[0]: eval(row[1], tools, names) for row in table_after(text, "Output")}
    assert described.pop("assist_info_for_combine" if version == 1 else "expand_idx")
    assert described == plain | {"expand_scales": weighted["expand_scales"]}
    assert list(described) == list(plain)


@pytest.mark.parametrize(("s", "r", "rank"), [(1, 0, 0), (2, 4, 0), (2, 4, 7)])
@pytest.mark.parametrize("quant_mode", [0, 2])
def test_the_shapes_of_the_halves_are_those_of_the_functions(
    s: int, r: int, rank: int, quant_mode: int
) -> None:
    aligns = {f"Align{n}": functools.partial(align, to=n) for n in (8, 32, 512)}
    ep, local = 8, 1 if rank < r else 24 // (8 - r)
    names = {"BS": 3, "K": 2, "H": 96, "S": s, "EP": ep, "localE": local, "A": 5, "rows": 5}
    text = page("operators.md")
    widths = re.findall(r"^W is (.+ // 2), or with `quant_mode=2` (.+\))\. S counts", text, flags=re.M)[0]
    names["W"] = eval(widths[quant_mode == 2], dict(aligns), names)
    described = [eval(shape, dict(aligns), names) for _, _, shape, _ in table_after(text, "Half")]
    group, options = ("g", ep, rank, 24), {"shared_expert_num": s, "shared_expert_rank_num": r}
    with FakeTensorMode():
        x, ids = torch.empty(3, 96, dtype=torch.bfloat16), torch.empty(3, 2, dtype=torch.int32)
        setup = torch_npu_ops.npu_moe_distribute_dispatch_setup
        sent = setup(x, ids, *group, quant_mode=quant_mode, **options)
        origins = torch.empty(5 * 128, dtype=torch.int32)
        back = torch_npu_ops.npu_moe_distribute_combine_setup(
            torch.empty(5, 96, dtype=torch.bfloat16), ids, origins, *group, **options
        )
    assert described == [tuple(output.shape) for output in (*sent, *back)]


def test_the_tokens_of_a_part_are_those_that_the_pages_say() -> None:
    said = {
        "docs/differences.md": "at most {} tokens unless",
        "docs/protocol.md": "`Tuning.combine_tokens` tokens, {} unless",
    }
    for path, words in said.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert words.format(USUAL_TOKENS) in text, path


def test_v1_takes_no_mask_as_the_pages_say() -> None:
    rules = next(rules for rules in rule_sets() if rules.title == "A3, V1")
    (rule,) = (rule for rule in rules.call if rule.argument == "active_mask")
    assert rule.limit == "None"
    assert page("from-torch-npu.md").count("It takes no `x_active_mask` on A3") == 2
    assert "On A3 V1 takes none" in page("operators.md")


def test_a_literal_127_over_a_tensor_is_not_the_division_that_the_page_gives() -> None:
    (code,) = code_blocks(page("operators.md"))
    amax = torch.tensor([3.0])
    names: dict[str, object] = {"torch": torch, "amax": amax}
    exec(code, names)
    s = names["s"]
    assert isinstance(s, torch.Tensor)
    q, scale = reference.quantize_row(torch.full((32,), 3.0))
    assert float(1 / s) == float(scale)
    assert q.eq(127).all()
    literal = 127 / amax
    for value, text in ((literal, "42.333336"), (s, "42.333332")):
        assert f"{value.item():.6f}" == text
        assert text in page("operators.md")
    assert torch.equal(literal, amax.reciprocal() * 127)


@pytest.mark.long  # installs nothing by itself: `make test-long` has what it takes
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False, timeout=seconds(240)
    )
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    names = [f"moe_triton.torch_npu_ops.{name}" for name in torch_npu_ops.__all__]
    assert not [name for name in (*names, "moe_triton.EPBuffer.dispatch") if f'id="{name}"' not in api]
    # What the search box needs where the site is read from a folder.
    assert (tmp_path / "search" / "search_index.js").is_file()
    assert '<script src="assets/iframe-worker.js">' in (tmp_path / "index.html").read_text(encoding="utf-8")
