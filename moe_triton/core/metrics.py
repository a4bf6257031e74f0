"""What a buffer has done so far, in plain numbers; and those in the text format that Prometheus scrapes.

They are made from what its flight recorder holds, whoever has read that: the buffer itself, or another
process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.flight_file import BOUNDS_US, OPERATORS, Flight

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of `prometheus`'s answer, as a header of HTTP."""
WAIT_BOUNDS_S = tuple(bound / 1e6 for bound in BOUNDS_US)
"""Upper bounds of the classes of waits, in seconds; behind them there is one class more."""


@dataclass(frozen=True)
class Metrics:
    """What one rank of a buffer has done since it was constructed.

    Attributes:
        rank, num_ranks: of the group.
        group: its short name, the same on every rank.
        open_s: seconds since the buffer was constructed.
        rounds: by operator, "dispatch", "combine" and "barrier": how often it has run. A call that takes
            several rounds counts each.
        tokens: by operator, of this rank.
        rows: by operator, that dispatches have received and combines have sent back.
        received_bytes: by rank, of rows that dispatches have received from it.
        sent_bytes: by rank, of results that combines have sent it.
        waits: by rank, how many rounds have waited for its latest flag so long, by `WAIT_BOUNDS_S`.
        waited_s: by rank, seconds of all these waits.
        timeouts: calls that ran out of time.
        masked: how often this rank has masked another one.
    """

    rank: int
    num_ranks: int
    group: str
    open_s: float
    rounds: Mapping[str, int]
    tokens: Mapping[str, int]
    rows: Mapping[str, int]
    received_bytes: Sequence[int]
    sent_bytes: Sequence[int]
    waits: Sequence[Sequence[int]]
    waited_s: Sequence[float]
    timeouts: int
    masked: int

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON takes it, with the bounds of waits.

        Examples:
            >>> buffer.metrics().as_dict()["num_ranks"]
            2
        """
        return {**asdict(self), "wait_bounds_s": list(WAIT_BOUNDS_S)}


class HasMetrics(Protocol):
    """A buffer, as far as it is asked for numbers."""

    def metrics(self) -> Metrics:
        """What it has done so far."""


def metrics_of(flight: Flight) -> Metrics:
    """The numbers of a flight recorder.

    Args:
        flight: as it was read.
    """
    of_operators = {
        name: {operator: flight.totals.get(operator, {}).get(name, 0) for operator in OPERATORS}
        for name in ("runs", "tokens", "rows")
    }
    return Metrics(
        rank=flight.rank,
        num_ranks=flight.num_ranks,
        group=flight.group,
        open_s=max(0, flight.read_ns - flight.opened_ns) / 1e9,
        rounds=of_operators["runs"],
        tokens=of_operators["tokens"],
        rows=of_operators["rows"],
        received_bytes=[peer.bytes_in for peer in flight.peers],
        sent_bytes=[peer.bytes_out for peer in flight.peers],
        waits=[list(peer.classes) for peer in flight.peers],
        waited_s=[peer.sum_us / 1e6 for peer in flight.peers],
        timeouts=flight.timeouts,
        masked=flight.masked,
    )


Sample = tuple[str, Mapping[str, str], float]
"""Suffix of a family's name, labels besides those of the buffer, and the number."""


class Family(NamedTuple):
    """What is called alike of all buffers.

    Attributes:
        name: of it.
        type: "gauge", "counter" or "histogram".
        labels: of each number, besides rank and group.
        samples: those of one buffer.
        help: what it is.
    """

    name: str
    type: str
    labels: tuple[str, ...]
    samples: Callable[[Metrics], Iterable[Sample]]
    help: str


def _one(value: float) -> Iterable[Sample]:
    return [("", {}, value)]


def _by_operator(values: Mapping[str, int]) -> Iterable[Sample]:
    return [("", {"operator": operator}, value) for operator, value in values.items()]


def _by_peer(values: Sequence[int]) -> Iterable[Sample]:
    return [("", {"peer": str(peer)}, value) for peer, value in enumerate(values)]


def _histograms(waits: Sequence[Sequence[int]], sums_s: Sequence[float]) -> Iterator[Sample]:
    """A histogram of each peer, whose buckets hold all that is shorter, too."""
    bounds = [*(f"{bound:g}" for bound in WAIT_BOUNDS_S), "+Inf"]
    for peer, (classes, sum_s) in enumerate(zip(waits, sums_s, strict=True)):
        for bound, count in zip(bounds, accumulate(classes), strict=True):
            yield "_bucket", {"peer": str(peer), "le": bound}, count
        yield "_sum", {"peer": str(peer)}, sum_s
        yield "_count", {"peer": str(peer)}, sum(classes)


FAMILIES = (
    Family("moe_triton_ranks", "gauge", (), lambda of: _one(of.num_ranks), "Ranks of the group."),
    Family(
        "moe_triton_open_seconds",
        "gauge",
        (),
        lambda of: _one(of.open_s),
        "Seconds since the buffer was constructed.",
    ),
    Family(
        "moe_triton_rounds_total",
        "counter",
        ("operator",),
        lambda of: _by_operator(of.rounds),
        "Rounds that have run.",
    ),
    Family(
        "moe_triton_tokens_total",
        "counter",
        ("operator",),
        lambda of: _by_operator(of.tokens),
        "Tokens of this rank.",
    ),
    Family(
        "moe_triton_rows_total",
        "counter",
        ("operator",),
        lambda of: _by_operator(of.rows),
        "Rows that dispatches have received, and that combines have sent back.",
    ),
    Family(
        "moe_triton_received_bytes_total",
        "counter",
        ("peer",),
        lambda of: _by_peer(of.received_bytes),
        "Bytes of rows that dispatches have received from a rank.",
    ),
    Family(
        "moe_triton_sent_bytes_total",
        "counter",
        ("peer",),
        lambda of: _by_peer(of.sent_bytes),
        "Bytes of results that combines have sent to a rank.",
    ),
    Family(
        "moe_triton_wait_seconds",
        "histogram",
        ("peer",),
        lambda of: _histograms(of.waits, of.waited_s),
        "How long rounds have waited for the latest flag of a rank.",
    ),
    Family(
        "moe_triton_timeouts_total",
        "counter",
        (),
        lambda of: _one(of.timeouts),
        "Calls that ran out of time.",
    ),
    Family(
        "moe_triton_masked_total",
        "counter",
        (),
        lambda of: _one(of.masked),
        "How often this rank has masked another one.",
    ),
)
LABELS = ("rank", "group", "operator", "peer", "le")
"""Names of labels that the library's own numbers have."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def prometheus(
    buffers: HasMetrics | Metrics | Sequence[HasMetrics | Metrics], labels: Mapping[str, str] = {}
) -> str:
    """Numbers of buffers in Prometheus's text exposition format, version 0.0.4.

    Args:
        buffers: one or several, or what their `metrics` returned.
        labels: for each number, besides rank and group: such as the job's name.

    Raises:
        ArgumentError: something is no buffer; a label cannot be one, or has the name of one of ours; or
            buffers are of one rank and one group, so that their numbers could not be told apart.

    Examples:
        >>> from moe_triton.metrics import prometheus
        >>> text = prometheus(buffer, {"model": "deepseek"})
    """
    # A buffer is no sequence; numbers of one may be passed by themselves.
    each = list(buffers) if isinstance(buffers, Sequence) else [buffers]
    found = [_metrics(one) for one in each]
    _check_labels(labels)
    _check_apart(found)
    lines: list[str] = []
    for family in FAMILIES:
        of_family = [
            _line(f"{family.name}{suffix}", {**_labels_of(one), **own, **labels}, value)
            for one in found
            for suffix, own, value in family.samples(one)
        ]
        if of_family:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.type}"]
            lines += of_family
    return "".join(f"{line}\n" for line in lines)


def _metrics(of: HasMetrics | Metrics) -> Metrics:
    if isinstance(of, Metrics):
        return of
    if not callable(getattr(of, "metrics", None)):
        rule, remedy = "these are buffers, or what their metrics() returned", "Pass one, or several."
        said = f"of type {type(of).__name__}"
        raise ArgumentError("buffers", said, rule, remedy, code=INVALID_ARGUMENT)
    return of.metrics()


def _check_labels(labels: Mapping[str, str]) -> None:
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name):
            rule = "a label's name is letters, digits and _, begins with no digit, and not with __"
            raise ArgumentError("labels", repr(name), rule, "Pass another name.", code=INVALID_ARGUMENT)
        if name in LABELS:
            rule = f"numbers have labels of their own of these names: {', '.join(LABELS)}"
            raise ArgumentError("labels", repr(name), rule, "Pass another name.", code=INVALID_ARGUMENT)
        if not isinstance(value, str) or not _is_utf8(value):
            said, rule = f"{value!r} for {name!r}", "a label's value is a text that can be written as UTF-8"
            raise ArgumentError("labels", said, rule, "Pass one.", code=INVALID_ARGUMENT)


def _is_utf8(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def _check_apart(found: Sequence[Metrics]) -> None:
    names = [(one.rank, one.group) for one in found]
    for rank, group in names:
        if names.count((rank, group)) > 1:
            said, rule = f"two of rank {rank} of group {group!r}", "numbers of each need labels of their own"
            remedy = "Pass each buffer once."
            raise ArgumentError("buffers", said, rule, remedy, code=INVALID_ARGUMENT)


def _labels_of(metrics: Metrics) -> dict[str, str]:
    return {"rank": str(metrics.rank), "group": metrics.group}


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    said = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in labels.items())
    return f"{name}{{{said}}} {value!r}"
