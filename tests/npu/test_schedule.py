"""Events between two streams: whatever runs first, a launch comes after all that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.npu.schedule import BEGIN, ScheduledLaunch, schedule
from moe_triton.core.kernel import AscendCKernel
from moe_triton.core.plan import Launch, Stream
from tests.npu.device import Device, FakeEvent, FakeStream, Work

KERNEL = AscendCKernel("nothing", ())


def launch(stream: Stream, alongside: bool = False) -> Launch:
    return Launch("step", KERNEL, (), 1, stream, alongside)


@st.composite
def launch_lists(draw: st.DrawFn) -> list[Launch]:
    """Any plan: what runs alongside stands behind a launch of the other stream."""
    launches: list[Launch] = []
    for stream in draw(st.lists(st.sampled_from(["compute", "communication"]), min_size=1, max_size=12)):
        may_be = bool(launches) and launches[-1].stream != stream
        launches.append(launch(stream, may_be and draw(st.booleans())))
    return launches


def needed_by(launches: list[Launch], number: int) -> set[int]:
    """What has to be over before a launch starts, by the words of `Launch.alongside`."""
    return set(range(number - 1 if launches[number].alongside else number))


@dataclass
class Run:
    """One run of a plan on the stand-in: what had ended whenever something started."""

    started: dict[int, set[int]]
    done: set[int]


def run(
    launches: list[Launch], places: tuple[ScheduledLaunch, ...], begin: bool, end: int | None, seed: int
) -> Run:
    device = Device("random", seed)
    streams = {"compute": device.user_stream, "communication": FakeStream(device)}
    events = {number: FakeEvent(device) for number in [BEGIN, *range(len(launches))]}
    seen = Run({}, set())

    def body(number: int) -> None:
        seen.started[number] = set(seen.done)
        seen.done.add(number)

    device.by_queue(Work("launch", "before", streams["compute"], lambda: seen.done.add(BEGIN)))
    if begin:
        events[BEGIN].record(streams["compute"])
    for number, place in enumerate(places):
        stream = streams[place.stream]
        if place.waits_for is not None:
            stream.wait_event(events[place.waits_for])
        device.by_queue(Work("launch", str(number), stream, lambda number=number: body(number)))
        if place.is_awaited:
            events[number].record(stream)
    if end is not None:
        streams["compute"].wait_event(events[end])
    device.by_queue(Work("launch", "after", streams["compute"], lambda: body(len(launches))))
    device.synchronize()
    return seen


@given(launches=launch_lists(), seed=st.integers(0, 2**31))
def test_nothing_starts_before_what_it_needs(launches: list[Launch], seed: int) -> None:
    made = schedule(launches, two_streams=True)
    assert [place.stream for place in made.launches] == [launch.stream for launch in launches]
    seen = run(launches, made.launches, made.begin_is_awaited, made.end, seed)
    for number in range(len(launches)):
        assert needed_by(launches, number) | {BEGIN} <= seen.started[number]
    # The user's next work comes after everything.
    assert set(range(len(launches))) <= seen.started[len(launches)]


@given(launches=launch_lists(), drop=st.integers(0, 100))
def test_no_wait_is_superfluous(launches: list[Launch], drop: int) -> None:
    """Without any one of the waits, some order of the streams is wrong."""
    made = schedule(launches, two_streams=True)
    waits = [number for number, place in enumerate(made.launches) if place.waits_for is not None]
    if not waits:
        return
    without = waits[drop % len(waits)]
    places = tuple(
        replace(place, waits_for=None) if number == without else place
        for number, place in enumerate(made.launches)
    )
    for seed in range(400):
        seen = run(launches, places, made.begin_is_awaited, made.end, seed)
        if any(not needed_by(launches, n) | {BEGIN} <= seen.started[n] for n in range(len(launches))):
            return
    pytest.fail(f"the wait of launch {without} is never missed in {launches}")


def test_alongside_really_is() -> None:
    """A pack beside the sending of the rows before it can come before that has ended."""
    launches = [launch("compute"), launch("communication"), launch("compute", True), launch("communication")]
    made = schedule(launches, two_streams=True)
    orders = {
        1 in run(launches, made.launches, made.begin_is_awaited, made.end, seed).started[2]
        for seed in range(50)
    }
    assert orders == {True, False}


@pytest.mark.parametrize("kinds", [["compute"], ["communication"], ["compute", "communication"]])
def test_one_stream_needs_no_events(kinds: list[Literal["compute", "communication"]]) -> None:
    made = schedule([launch(kind) for kind in kinds], two_streams=False)
    assert not made.begin_is_awaited
    assert made.end is None
    assert all(place == ScheduledLaunch("compute", None, False) for place in made.launches)
