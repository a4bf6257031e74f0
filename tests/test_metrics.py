"""A buffer's numbers are those of its recorder, and Prometheus's own parser reads them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from moe_triton import ArgumentError
from moe_triton.core.flight_file import BOUNDS_US, NUM_CLASSES, OPERATORS, TOTALS, Flight, PeerTotals
from moe_triton.core.metrics import FAMILIES, LABELS
from moe_triton.metrics import CONTENT_TYPE, WAIT_BOUNDS_S, Metrics, metrics_of, prometheus
from tests.patience import seconds
from tests.test_docs import code_blocks, page, table_after

COUNTS = st.integers(0, 2**63)


def flight_of(rank: int = 0, group: str = "a1b2c3", **values: Any) -> Flight:
    """What a recorder of two ranks held."""
    classes = [0] * NUM_CLASSES
    classes[0], classes[3], classes[-1] = 5, 2, 1
    given = {
        "source": "buffer",
        "version": "0.1.0",
        "protocol": 9,
        "group": group,
        "rank": rank,
        "num_ranks": 2,
        "pid": 12,
        "host": "one",
        "about": {},
        "unix_minus_monotonic_ns": 0,
        "opened_ns": 5 * 10**9,
        "read_ns": 7 * 10**9 + 5 * 10**8,
        "state": "open",
        "why": "",
        "num_runs": 9,
        "runs": [],
        "wait": None,
        "totals": {
            "dispatch": {"runs": 4, "tokens": 64, "rows": 100},
            "combine": {"runs": 3, "tokens": 48, "rows": 96},
            "barrier": {"runs": 2, "tokens": 0, "rows": 0},
        },
        "peers": [PeerTotals([0] * NUM_CLASSES, 0, 7, 9), PeerTotals(classes, 12_345_678, 1 << 40, 3)],
        "timeouts": 1,
        "masked": 2,
    }
    return Flight(**(given | values))  # type: ignore[arg-type]


class Buffer:
    """As far as it is asked for numbers."""

    def __init__(self, flight: Flight) -> None:
        self.rank, self._flight = flight.rank, flight

    def metrics(self) -> Metrics:
        return metrics_of(self._flight)


Key = tuple[str, frozenset[tuple[str, str]]]


def read(text: str) -> dict[Key, float]:
    """Numbers by name and labels, as Prometheus's parser has them. None is there twice."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def key(name: str, rank: int = 0, group: str = "a1b2c3", **labels: str) -> Key:
    return f"moe_triton_{name}", frozenset({"rank": str(rank), "group": group, **labels}.items())


# Plain numbers.


def test_numbers_are_those_of_the_recorder() -> None:
    metrics = metrics_of(flight_of())
    assert (metrics.rank, metrics.num_ranks, metrics.group, metrics.open_s) == (0, 2, "a1b2c3", 2.5)
    assert metrics.rounds == {"dispatch": 4, "combine": 3, "barrier": 2}
    assert metrics.tokens == {"dispatch": 64, "combine": 48, "barrier": 0}
    assert metrics.rows == {"dispatch": 100, "combine": 96, "barrier": 0}
    assert (metrics.received_bytes, metrics.sent_bytes) == ([7, 1 << 40], [9, 3])
    assert [sum(classes) for classes in metrics.waits] == [0, 8]
    assert metrics.waited_s == [0.0, 12.345678]
    assert (metrics.timeouts, metrics.masked) == (1, 2)


def test_operators_that_a_recorder_does_not_name_have_run_never() -> None:
    assert metrics_of(flight_of(totals={})).rounds == dict.fromkeys(OPERATORS, 0)


def test_they_are_json() -> None:
    metrics = metrics_of(flight_of())
    made = json.loads(json.dumps(metrics.as_dict()))
    assert made.pop("wait_bounds_s") == list(WAIT_BOUNDS_S)
    assert Metrics(**made) == metrics


def test_classes_are_those_of_the_recorder() -> None:
    assert len(WAIT_BOUNDS_S) + 1 == NUM_CLASSES
    assert [round(bound * 1e6) for bound in WAIT_BOUNDS_S] == list(BOUNDS_US)


# Prometheus's text.


def test_the_parser_reads_every_number() -> None:
    found = read(prometheus(Buffer(flight_of())))
    assert found[key("ranks")] == 2
    assert found[key("open_seconds")] == 2.5
    assert found[key("rounds_total", operator="combine")] == 3
    assert found[key("tokens_total", operator="dispatch")] == 64
    assert found[key("rows_total", operator="barrier")] == 0
    assert found[key("received_bytes_total", peer="1")] == 1 << 40
    assert found[key("sent_bytes_total", peer="0")] == 9
    assert found[key("timeouts_total")] == 1
    assert found[key("masked_total")] == 2
    assert len(found) == 4 + 3 * len(OPERATORS) + 2 * (2 + NUM_CLASSES + 2)


def test_buckets_hold_what_is_shorter_too() -> None:
    text = prometheus(metrics_of(flight_of()))
    found, ofpeer = read(text), {"peer": "1"}
    bounds = [*(f"{bound:g}" for bound in WAIT_BOUNDS_S), "+Inf"]
    buckets = [found[key("wait_seconds_bucket", **ofpeer, le=bound)] for bound in bounds]
    assert buckets == [5, 5, 5, *[7] * (NUM_CLASSES - 4), 8]
    assert found[key("wait_seconds_count", **ofpeer)] == 8
    assert found[key("wait_seconds_sum", **ofpeer)] == 12.345678
    assert [float(bound) for bound in bounds[:-1]] == list(WAIT_BOUNDS_S)


def test_each_family_is_described_once_before_its_numbers() -> None:
    text = prometheus([Buffer(flight_of(0)), metrics_of(flight_of(1))])
    names = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert names == [family.name for family in FAMILIES]
    assert text.count("# HELP") == len(FAMILIES)
    assert text.endswith("\n")
    of_family = ""
    for line in text.splitlines():
        if line.startswith("#"):
            of_family = line.split(" ")[2]
        assert line.startswith((f"{of_family}{{", f"{of_family}_", f"# HELP {of_family} ", "# TYPE"))
    assert set(read(text)) == set(read(prometheus(metrics_of(flight_of(0))))) | set(
        read(prometheus(metrics_of(flight_of(1))))
    )


def test_names_are_as_prometheus_wants_them() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"moe_triton(_[a-z]+)+", family.name)
        assert family.name.endswith("_total") == (family.type == "counter")
        assert family.help.endswith(".")
        assert not {"\\", "\n"} & set(family.help)
        own = {label for _, labels, _ in family.samples(metrics_of(flight_of())) for label in labels}
        assert own - {"le"} == set(family.labels)
        assert own <= set(LABELS)


def test_of_no_buffers_there_is_nothing() -> None:
    assert prometheus([]) == ""


@settings(max_examples=30)
@given(
    labels=st.dictionaries(
        st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True).filter(
            lambda name: name not in LABELS and not name.startswith("__")
        ),
        st.text(st.characters(exclude_categories=["Cs"])),
        max_size=3,
    ),
    group=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
def test_any_values_of_labels_come_back(labels: dict[str, str], group: str) -> None:
    text = prometheus(metrics_of(flight_of(group=group)), labels)
    assert read(text)[key("ranks", group=group, **labels)] == 2


@settings(max_examples=30)
@given(st.lists(COUNTS, min_size=NUM_CLASSES, max_size=NUM_CLASSES), COUNTS, COUNTS)
def test_any_counts_come_back(classes: list[int], sum_us: int, number: int) -> None:
    peers = [PeerTotals(classes, sum_us, number, number)]
    totals = {operator: dict.fromkeys(TOTALS, number) for operator in OPERATORS}
    metrics = metrics_of(flight_of(num_ranks=1, peers=peers, totals=totals))
    found = read(prometheus(metrics))
    assert found[key("wait_seconds_bucket", peer="0", le="+Inf")] == sum(classes)
    assert found[key("wait_seconds_sum", peer="0")] == sum_us / 1e6
    assert found[key("rows_total", operator="dispatch")] == number


def test_values_are_escaped_by_the_rules() -> None:
    text = prometheus(metrics_of(flight_of()), {"path": 'C:\\a "b"\nc'})
    line = next(line for line in text.splitlines() if line.startswith("moe_triton_ranks{"))
    assert line == r'moe_triton_ranks{rank="0",group="a1b2c3",path="C:\\a \"b\"\nc"} 2'


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"9a": "x"}, "labels is '9a', but a label's name is letters"),
        ({"a-b": "x"}, "labels is 'a-b', but"),
        ({"a\n": "x"}, r"labels is 'a\n', but"),
        ({"": "x"}, "labels is '', but"),
        ({"__name": "x"}, "labels is '__name', but"),
        ({"ä": "x"}, "labels is 'ä', but"),
        ({3: "x"}, "labels is 3, but"),
        *(({name: "x"}, f"labels is {name!r}, but numbers have labels") for name in LABELS),
        ({"a": 3}, "labels is 3 for 'a', but a label's value is a text"),
        ({"a": "\ud800"}, "labels is '\\ud800' for 'a', but"),
    ],
)
def test_labels_that_cannot_be_are_refused(labels: Mapping[str, str], said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        prometheus(metrics_of(flight_of()), labels)
    assert str(caught.value).startswith(said)


def test_numbers_that_could_not_be_told_apart_are_refused() -> None:
    metrics = metrics_of(flight_of())
    with pytest.raises(ArgumentError, match="buffers is two of rank 0 of group 'a1b2c3', but"):
        prometheus([metrics, replace(metrics, open_s=3.0)])
    assert prometheus([metrics, replace(metrics, group="d4")])


@pytest.mark.parametrize("wrong", [None, 5, ["buffer"], [None]])
def test_what_is_no_buffer_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"buffers is of type \w+, but these are buffers, or what"):
        prometheus(wrong)


def test_numbers_need_no_torch() -> None:
    """A process that serves those of others reads them from a file."""
    code = "import sys, moe_triton.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=seconds(30)).returncode == 0


# The page.


def examples() -> tuple[str, str]:
    serving = page("metrics.md").split("### Serving them")[1]
    first, second = (code_blocks(after)[0] for after in serving.split("tests/test_metrics.py runs this")[1:])
    return first, second


@pytest.fixture
def served() -> Iterator[str]:
    """The address at which the page's example serves a buffer's numbers."""
    code = examples()[0]
    assert code.count("9400 + buffer.rank") == 1
    names: dict[str, Any] = {"buffer": Buffer(flight_of())}
    exec(code.replace("9400 + buffer.rank", "0").replace('("", 0)', '("127.0.0.1", 0)'), names)
    server = names["server"]
    server.RequestHandlerClass.log_message = lambda *_: None
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def test_the_pages_server_serves(served: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(served, timeout=seconds(20)) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        assert answer.read().decode() == prometheus(metrics_of(flight_of()))


def test_the_pages_collector_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    exec(examples()[1], {"buffer": Buffer(flight_of())})
    text = prometheus_client.generate_latest(registry).decode()
    assert read(text) == read(prometheus(metrics_of(flight_of())))


def test_the_pages_table_is_that_of_the_families() -> None:
    rows = [[f.name, f.type, ", ".join(f.labels), f.help] for f in FAMILIES]
    assert table_after(page("metrics.md"), "Metric") == rows


def test_the_page_names_the_bounds() -> None:
    said = re.findall(r"Bounds of its buckets are\s+([\de., -]+) s\.", page("metrics.md"))
    assert [[float(bound) for bound in text.split(", ")] for text in said] == [list(WAIT_BOUNDS_S)]
