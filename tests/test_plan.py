from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_triton.backends import CAPABILITIES
from moe_triton.core import ascendc
from moe_triton.core.config import Config
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Launch, Part, Placeholder, Plan, Value, launch
from moe_triton.core.row_formats import AS_THEY_ARE, INT8, QUANTIZED, RowFormat
from moe_triton.core.tuning import Tuning
from moe_triton.layout import UB_ALIGN
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Mask
from moe_triton.runtime.executables import Phase
from moe_triton.schemes import make_scheme, product_of
from moe_triton.schemes.common.steps import Steps
from moe_triton.schemes.fullmesh.scheme import Fullmesh
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.scheme import Scheme

CPU, NPU = CAPABILITIES.values()
SCHEME = Fullmesh(RankContext(Config(4, 8, 1024, 2, 8), 1, 2, 1000, CPU))


def dispatch_plan(row_format: RowFormat, smooth: bool = False, weights: bool = True, zone: int = 0) -> Plan:
    return SCHEME.whole(DispatchVariant(torch.bfloat16, row_format, smooth, weights), zone)


def test_a_plan_is_the_same_each_time_it_is_built() -> None:
    assert str(dispatch_plan(INT8)) == str(dispatch_plan(INT8))


def test_zones_differ_in_addresses_only() -> None:
    first, second = str(dispatch_plan(INT8, zone=0)), str(dispatch_plan(INT8, zone=1))
    assert first != second
    # the entries of zone 0 begin the window
    assert re.sub(r"\+?\d+", "#", first.replace("<window>", "<window+0>")) == re.sub(
        r"\+?\d+", "#", second.replace("<window>", "<window+0>")
    )


def test_a_call_brings_only_what_its_variant_needs() -> None:
    plain = set(dispatch_plan(AS_THEY_ARE, weights=False).placeholders)
    assert "packed" not in plain
    assert "scales" not in plain
    assert set(dispatch_plan(AS_THEY_ARE, weights=True).placeholders) - plain == {"topk_weights", "weights"}
    assert set(dispatch_plan(INT8, weights=False).placeholders) - plain == {"packed", "scales"}
    assert "smooth_scales" in dispatch_plan(INT8, smooth=True).placeholders


def test_rows_that_travel_as_they_are_have_no_smooth_scales() -> None:
    """A kernel would look for a row of each result where there is one of each token."""
    with pytest.raises(ValueError, match="only quantised rows"):
        DispatchVariant(torch.bfloat16, AS_THEY_ARE, smooth=True)


def test_rows_leave_before_anything_waits() -> None:
    for plan in (dispatch_plan(INT8), SCHEME.whole(CombineVariant(torch.bfloat16, True), 0)):
        steps = [launched.step for launched in plan.launches]
        assert steps.index("send") < steps.index("wait")
        streams = {launched.step: launched.stream for launched in plan.launches}
        assert streams["send"] == streams["wait"] == "communication"


@pytest.mark.parametrize("parts", [1, 3])
def test_combine_waits_once_for_a_part_and_then_sums_it(parts: int) -> None:
    plan = SCHEME.whole(CombineVariant(torch.bfloat16, True), 0, parts)
    steps = [launched for launched in plan.launches if launched.step in ("wait", "sum")]
    found = [(launched.step, arguments_of(launched)["first_token"]) for launched in steps]
    firsts = [Part("num_tokens", 0, part, parts) for part in range(parts)]
    waits = [at for at, (step, _) in enumerate(found) if step == "wait"]
    sums = [at for at, (step, _) in enumerate(found) if step == "sum"]
    assert [found[at][1] for at in waits] == [found[at][1] for at in sums] == firsts
    assert all(wait < added for wait, added in zip(waits, sums, strict=True))


def direct() -> Scheme:
    config = Config(4, 8, 1024, 2, 8, scheme="direct")
    return make_scheme(RankContext(config, 1, 2, 1000, CPU))


def arguments_of(step: Launch) -> dict[str, Value]:
    return dict(zip((arg.name for arg in step.kernel.args), step.values, strict=True))


def steps_and_statuses(plan: Plan) -> tuple[list[str], list[Value]]:
    """Its steps, and the entries of those that post or wait, in order."""
    values = [arguments_of(step) for step in plan.launches]
    return [step.step for step in plan.launches], [value["status"] for value in values if "status" in value]


def test_direct_rows_leave_once_every_receiver_has_sent_its_counts() -> None:
    plan = direct().whole(DispatchVariant(torch.bfloat16, INT8, False, True), 0)
    steps, statuses = steps_and_statuses(plan)
    order = ["send counts", "wait for counts", "send", "flag", "wait", "stamps"]
    assert [step for step in steps if step in order] == order
    counts_sent, counts_waited, rows_posted, rows_waited = statuses
    assert counts_sent == counts_waited != rows_posted == rows_waited


@pytest.mark.parametrize("in_place", [False, True])
def test_direct_results_are_read_once_every_rank_has_announced_them(in_place: bool) -> None:
    variant = CombineVariant(torch.bfloat16, True, in_place=in_place)
    steps, (posted, waited) = steps_and_statuses(direct().whole(variant, 1))
    assert steps == ["flag", "wait", "sum"] if in_place else ["copy", "flag", "wait", "sum"]
    assert posted == waited


def between_servers(version: int = 2) -> Config:
    return Config(4, 8, 1024, 2, 6, 1, 1, version=version, ranks_per_server=(2, 2), relaxed=True)


def contexts() -> Iterator[RankContext]:
    """One of every kind: by back end, generation, scheme, tensor parallelism and what experts a rank has."""
    for capabilities, version, scheme in itertools.product(
        (CPU, NPU), (1, 2), ("fullmesh_v1", "fullmesh_v2", "direct")
    ):
        config = Config(4, 8, 1024, 2, 6, 1, 1, scheme=scheme, version=version)
        for rank, exchange_rank in itertools.product((0, 1), (None, 1)):
            yield RankContext(config, rank, 2, 1000, capabilities, exchange_rank)
        if version == 2:
            of_buffer = Config(4, 8, 1024, 2, 8, scheme=scheme, is_of_buffer=True)
            yield RankContext(of_buffer, 1, 2, 1000, capabilities)
            beside = Tuning(communication_blocks=1)
            yield RankContext(of_buffer, 1, 2, 1000, capabilities, tuning=beside)
        by_blocks = Config(4, 8, 1024, 2, 8, product="A2", scheme="fullmesh", version=version, relaxed=True)
        yield RankContext(by_blocks, 1, 2, 1000, capabilities)
        yield RankContext(replace(by_blocks, ranks_per_server=2), 1, 2, 1000, capabilities)
        by_rails = replace(by_blocks, scheme="hierarchy", ranks_per_server=2)
        yield RankContext(by_rails, 1, 2, 1000, capabilities)
        if version == 2:  # inside one machine
            yield RankContext(
                replace(by_rails, product="A3", ranks_per_server=None), 1, 2, 1000, capabilities
            )
        for rank in (0, 3):
            yield RankContext(between_servers(version), rank, 2, 1000, capabilities)


def variants(context: RankContext) -> Iterator[DispatchVariant | CombineVariant]:
    if context.config.scheme == "hierarchy":  # which has no masks, scales or special experts
        for dtype, is_quantized in itertools.product((torch.bfloat16, torch.float16), (False, True)):
            yield DispatchVariant(dtype, INT8 if is_quantized else AS_THEY_ARE, weights=True)
            yield CombineVariant(dtype, True, block_quantize=is_quantized)
        return
    kept, has_tables = make_scheme(context).local_bypass, make_scheme(context).layout.row_tables is not None
    if has_tables:
        options = {"recv_stats": True, "local_bypass": kept, "per_rank": True}
        yield DispatchVariant(torch.bfloat16, weights=True, **options)  # type: ignore[arg-type]
    exchange, bf16, is_of_a2 = (
        context.exchange_rank is not None,
        torch.bfloat16,
        context.config.product == "A2",
    )
    quantized = itertools.product(QUANTIZED.values(), (False, True))
    for row_format, smooth in ((AS_THEY_ARE, False), *quantized):
        mask: Mask = "none" if context.is_version_1 else "tokens" if is_of_a2 else "entries"
        yield DispatchVariant(
            bf16, row_format, smooth, True, mask, exchange=exchange, waits=True, local_bypass=kept
        )
    for in_place in (False, True):
        yield CombineVariant(bf16, True, in_place=in_place, local_bypass=kept)
    features = {"exchange": exchange, "block_quantize": not is_of_a2, "norm": True, "waits": True}
    special = (0, 0, 0) if context.is_version_1 else (1, 1, int(not is_of_a2))
    shared_x = not context.is_version_1 and not is_of_a2
    yield CombineVariant(bf16, True, "tokens", shared_x, special, **features)


def plans(context: RankContext) -> list[Plan]:
    """In one part, in parts that overlap, and received while it is sent."""
    scheme, beside = (
        make_scheme(context),
        make_scheme(replace(context, tuning=Tuning(communication_blocks=1))),
    )
    receiving = make_scheme(replace(context, tuning=Tuning(receiving_blocks=1)))
    found = [scheme.barrier(0)]
    for variant in variants(context):
        found += [scheme.whole(variant, 0), beside.whole(variant, 0, parts=3)]
        found.append(receiving.whole(replace(variant, local_bypass=False), 0))
    return found


def plans_in_rounds(context: RankContext) -> list[Plan]:
    """Those that send a round ahead."""
    scheme = make_scheme(context)
    if not scheme.sends_ahead:
        return []
    dispatches = [variant for variant in variants(context) if isinstance(variant, DispatchVariant)]
    in_rounds = [replace(variant, placed=True, routed=True, given_ids=None) for variant in dispatches]
    zones = range(scheme.rounds.num_zones)
    return [scheme.phase("fill_ahead", variant, zone) for variant in in_rounds for zone in zones]


@pytest.mark.parametrize("phase", ["round", "fill", "place"])
def test_only_rows_of_several_rounds_come_together_before_they_are_read(phase: Phase) -> None:
    config = Config(2, 8, 64, 2, 4, relaxed=True, is_of_buffer=True).normalized()
    context = RankContext(config, 0, 1, 1, CPU)
    variant = DispatchVariant(torch.bfloat16, placed=True, routed=True)
    launches = make_scheme(context).phase(phase, variant, 0).launches
    (arranged,) = [launch.kernel for launch in launches if launch.step == "arrange"]
    assert isinstance(arranged, TritonKernel)
    assert arranged.streamed_bytes == (0 if phase == "place" else 2 * 8 * 2 * 64 * 2)


def test_whatever_is_kept_between_launches_is_used_by_some_plan() -> None:
    kept: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    for context in contexts():
        shared, scheme = Scheme.scratch(make_scheme(context)), context.config.scheme
        kept |= {
            ("" if placeholder in shared else scheme, placeholder)
            for placeholder in make_scheme(context).scratch()
        }
        used |= {
            (name, placeholder)
            for plan in (*plans(context), *plans_in_rounds(context))
            for placeholder in plan.placeholders
            for name in ("", scheme)
        }
    inband = {
        ("fullmesh_v2", placeholder) for name, placeholder in used if name == "fullmesh_v1"
    }  # one declaration for both
    assert kept - used - inband == set()


def test_the_page_says_which_kernels_are_triton_and_which_ascend_c() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = page.split("## What is Triton and what is Ascend C\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    listed: dict[bool, set[str]] = {True: set(), False: set()}
    for language, kernels in rows[1:]:
        listed[language == "Triton"] |= set(re.findall(r"`(\w+)`", kernels))
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for context in contexts():
        for step in (step for plan in plans(context) for step in plan.launches):
            found[isinstance(step.kernel, TritonKernel)].add(step.kernel.name)
    assert listed == found


def test_local_steps_in_ascend_c_are_those_that_the_page_names() -> None:
    """Sends and waits aside: taking in-band rows, and copies of results into the own window."""
    local = set()
    for context in contexts():
        for plan in plans(context):
            local |= {
                (context.config.scheme, step.kernel.name)
                for step in plan.launches
                if not isinstance(step.kernel, TritonKernel) and step.step in ("arrange", "copy")
            }
    received = {("fullmesh_v1", "dispatch_receive")}
    received |= {("fullmesh_v2", "inband_receive"), ("fullmesh_v2", "inband_collect")}
    assert local == {*received, ("direct", "exchange_send")}


def phases_of(plan: Plan) -> list[list[str]]:
    """The kernels of each launch, one after the other."""
    found: list[list[str]] = []
    for launched in plan.launches:
        if launched.joined:
            found[-1].append(launched.kernel.name)
        else:
            found.append([launched.kernel.name])
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_posted_takes_no_launch_of_its_own(version: int) -> None:
    inside = replace(between_servers(version), ranks_per_server=None)
    for variant in (DispatchVariant(torch.bfloat16, INT8), CombineVariant(torch.bfloat16)):
        posting, plain = (
            phases_of(make_scheme(RankContext(config, 1, 2, 1000, CPU)).whole(variant, 0))
            for config in (between_servers(version), inside)
        )
        assert [
            [name for name in names if "_post" not in name or name == "post_status"] for names in posting
        ] == plain
        sends = next(names for names in posting if len(names) > 1)
        assert sends[1] == ("dispatch_post" if isinstance(variant, DispatchVariant) else "combine_post")


def posting_argument(scheme: str, name: str, row_format: RowFormat, **of_context: Any) -> Value:
    """What dispatch's kernels that post have for an argument."""
    config = Config(4, 8, 1024, 2, 8, scheme=scheme, ranks_per_server=2)
    context = RankContext(config, 1, 2, 1000, CPU, **of_context)
    plan = make_scheme(context).whole(DispatchVariant(torch.bfloat16, row_format), 0)
    given = [pair for step in plan.launches for pair in zip(step.kernel.args, step.values, strict=True)]
    (value,) = {value for arg, value in given if arg.name == name}
    return value


def test_between_hosts_what_is_empty_in_the_slots_of_short_rows_is_not_posted() -> None:
    of_rows, of_tokens = ("fullmesh_v1", "front_bytes"), ("hierarchy", "message_tokens")
    assert posting_argument(*of_rows, INT8, gathers_posts=True) == 1024 + UB_ALIGN
    assert posting_argument(*of_tokens, INT8, gathers_posts=True) == 1
    assert posting_argument(*of_tokens, INT8, gathers_posts=True, tuning=Tuning(message_tokens=2)) == 2
    for row_format, gathers_posts in ((AS_THEY_ARE, True), (INT8, False)):
        assert posting_argument(*of_rows, row_format, gathers_posts=gathers_posts) == 0
        assert posting_argument(*of_tokens, row_format, gathers_posts=gathers_posts) == 8


def test_version_1_finds_the_way_back_of_its_rows_on_all_blocks() -> None:
    scheme = make_scheme(RankContext(replace(between_servers(1), ranks_per_server=None), 1, 2, 1000, NPU))
    plan = scheme.whole(CombineVariant(torch.bfloat16), 0)
    (returns,) = (step for step in plan.launches if step.step == "returns")
    assert returns.blocks == 2


def test_packed_rows_are_made_without_stamps() -> None:
    """Whatever sends a row writes its stamp."""
    for smooth in (False, True):
        for scheme in (SCHEME, direct()):
            plan = scheme.whole(DispatchVariant(torch.bfloat16, INT8, smooth, True), 0)
            (pack,) = (step for step in plan.launches if step.step == "route + pack")
            written = [arg.name for arg in pack.kernel.args if arg.direction != "in" and arg.is_pointer]
            assert written == ["expand_idx", "counts", "rows", "scales"]


READERS = "topk_idx", "given", "expert_ids"


MASKS = "none", "tokens", "entries"


@pytest.mark.parametrize(
    ("scheme", "mask"),
    [*itertools.product(["fullmesh_v1", "fullmesh_v2"], MASKS), ("direct", "none")],
)
@pytest.mark.parametrize("row_format", [AS_THEY_ARE, INT8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_launch_that_reads_ids_copies_them_for_all_others(
    scheme: str, row_format: RowFormat, mask: Mask, dtype: torch.dtype
) -> None:
    config = Config(4, 8, 1024, 2, 6, 1, 1, scheme=scheme)
    tuning = Tuning(communication_blocks=1)
    built = make_scheme(RankContext(config, 1, 2, 1000, NPU, tuning=tuning))
    variant = DispatchVariant(torch.bfloat16, row_format, mask=mask, given_ids=dtype)
    plan = built.whole(variant, 0, parts=3) if scheme != "direct" else built.whole(variant, 0)
    assert "active_ids" not in plan.placeholders
    found = [
        (launched.step, arg.name, arg.direction, arg.type, value.name)
        for launched in plan.launches
        for arg, value in zip(launched.kernel.args, launched.values, strict=True)
        if arg.name in READERS and isinstance(value, Placeholder)
    ]
    first, copied, *later = found
    route = "route" if row_format is AS_THEY_ARE else "route + pack"
    step, name = (route, "given") if mask == "none" else ("select", "expert_ids")
    assert first == (step, name, "in", "*i32" if dtype == torch.int32 else "*i64", "given_ids")
    assert copied == (step, "topk_idx", "out", "*i32", "topk_idx")
    assert later
    assert all(of[1:] == ("topk_idx", "in", "*i32", "topk_idx") for of in later)


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_for_each_rank_go_by_ids_that_one_launch_makes(
    scheme: str, mask: Mask, dtype: torch.dtype
) -> None:
    """Which takes the caller's, or what a mask has left; tables have the experts, ahead of all rows."""
    sizes = {"scheme": scheme, "product": product_of(scheme), "is_of_buffer": True, "relaxed": True}
    built = make_scheme(RankContext(Config(4, 8, 1024, 2, 8, **sizes), 1, 2, 1000, NPU))  # type: ignore[arg-type]
    variant = DispatchVariant(torch.bfloat16, INT8, mask=mask, given_ids=dtype, per_rank=True)
    plan = built.whole(variant, 0)
    readers = {**dict.fromkeys(READERS), "row_ids": None, "results_idx": None}
    found = [
        (launched.step, arg.name, arg.direction, value.name)
        for launched in plan.launches
        for arg, value in zip(launched.kernel.args, launched.values, strict=True)
        if arg.name in readers and isinstance(value, Placeholder)
    ]
    if mask == "none":
        copied = [("ranks", "given", "in", "given_ids"), ("ranks", "topk_idx", "out", "topk_idx")]
    else:
        copied = [("select", "expert_ids", "in", "given_ids"), ("select", "topk_idx", "out", "topk_idx")]
        copied.append(("ranks", "topk_idx", "in", "topk_idx"))
    made = [("ranks", "results_idx", "out", "results_idx"), ("tables", "row_ids", "in", "topk_idx")]
    assert found[: len(copied) + 2] == [*copied, *made]
    later = found[len(copied) + 2 :]
    assert {of[1:] for of in later} == {
        ("topk_idx", "in", "results_idx"),
        ("row_ids", "in", "window"),
    }
    assert [launched.step for launched in plan.launches][-2:] == ["local ids", "local counts"]


def test_a_launch_needs_a_value_for_each_argument() -> None:
    with pytest.raises(ValueError, match="recv_counts"):
        launch("wait", ascendc.DISPATCH_WAIT, "communication", 1, window=Placeholder("window"))


def test_the_steps_of_a_scheme_know_which_arguments_there_are() -> None:
    steps = Steps(SCHEME.context, None, 0)
    with pytest.raises(ValueError, match=r"post_status has no arguments \['number'\]"):
        steps.launch("flag", ascendc.POST_STATUS, number=1)
    with pytest.raises(ValueError, match="post_status: nothing is known of kind"):
        steps.launch("flag", ascendc.POST_STATUS, out_offset=0)
