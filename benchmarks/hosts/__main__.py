"""Ranks on several hosts against gloo and Open MPI: ``python -m benchmarks.hosts [rounds] [links]``.

Hosts are network namespaces of this machine (`benchmarks.hosts.namespaces`), by default with two ranks each.
*Rounds* are a dispatch and a combine in one go, by each scheme that leads between hosts, by gloo and by Open
MPI over TCP, interleaved. Other work on the machine moves their ratios, so these are given of each route's
fastest quarter of rounds, too. With *links* each host's cable has a rate, and what counts is the time against
that of the bytes that were counted. Where ranks are more than cores, times are for ratios alone.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks import harness
from benchmarks.compare.cases import from_message
from benchmarks.compare.launch import Mpi
from benchmarks.hosts import namespaces
from benchmarks.hosts.figures import BY_MPI, HIERARCHIES, RATIOS, Measured, goal
from benchmarks.hosts.rounds import FORMATS, GLOO, OURS, Setting, rounds
from benchmarks.sizes import SIZES
from moe_triton import EPBuffer
from moe_triton.backends.cpu.room import available_memory
from moe_triton.tools.progress import progress

KINDS = ROUNDS, LINKS = "rounds", "links"
IDLE_S = 2.0
ENDS_S = 600.0
MS = 1e3
MEMORY_SHARE = 0.7
"""Of what is left of the machine's memory, that ranks of a run may take."""
BYTES_OF_TOKEN = 5 << 20
"""On a rank, outside of windows: what routes keep."""
NO_LINK_TOKENS, LINK_TOKENS = (16, 64, 256), (64, 256)
SHARE_OF_BYTES, SHARE_OF_LINK, IDLE_SHARE = 0.85, 1.15, 0.01
"""Of gains that bytes say, at least; of their time on the link, and of a core, at most."""


def main() -> None:
    """Measures, and prints tables."""
    options = harness.parser("Ranks on several hosts, which are namespaces of this machine.")
    # Not as choices: those of an empty list would be one of them.
    options.add_argument("kinds", nargs="*", metavar="rounds | links", help="both by default")
    options.add_argument("--hosts", type=harness.at_least(2, 8), nargs="+", default=[2, 4])
    options.add_argument("--ranks-per-host", type=harness.at_least(1, 16), default=2)
    options.add_argument("--tokens", type=harness.at_least(1), nargs="+", help="of each rank")
    options.add_argument(
        "--gbits", type=harness.more_than(0), nargs="+", default=[1.0, 2.0], help="of a link"
    )
    options.add_argument("--iterations", type=harness.at_least(1), default=20, help="of rounds")
    options.add_argument("--link-iterations", type=harness.at_least(1), default=6)
    chosen = options.parse_args()
    kinds = chosen.kinds or KINDS
    if unknown := set(kinds) - set(KINDS):
        options.error(f"{', '.join(sorted(unknown))}: one of {', '.join(KINDS)}")
    if why := namespaces.missing():
        raise SystemExit(f"no hosts can be made here: {why}")
    mpi = Mpi.find()
    jobs = []
    for hosts in ((chosen.ranks_per_host,) * number for number in chosen.hosts):
        if ROUNDS in kinds:
            of_rounds = chosen.tokens or NO_LINK_TOKENS
            jobs += [(hosts, tokens, None, chosen.iterations) for tokens in of_rounds]
        if LINKS in kinds:
            of_links = chosen.tokens or LINK_TOKENS
            each = [(gbits, tokens) for gbits in chosen.gbits for tokens in of_links]
            jobs += [(hosts, tokens, gbits, chosen.link_iterations) for gbits, tokens in each]
    measured = []
    with progress("settings", len(jobs)) as work:
        for hosts, tokens, gbits, iterations in jobs:
            work.begin(f"{len(hosts)} hosts, BS {tokens}" + (f", {gbits:g} Gbit/s" if gbits else ""))
            measured.append(_measure(hosts, tokens, gbits, iterations, mpi))
            work.advance()
    records = _report_rounds([each for each in measured if each.gbits is None], mpi)
    records += _report_links([each for each in measured if each.gbits is not None])
    harness.write_records(chosen.json, records)


def _measure(hosts: tuple[int, ...], tokens: int, gbits: float | None, iterations: int, mpi: Mpi) -> Measured:
    has_link = gbits is not None
    mpirun, rate = "" if has_link else mpi.mpirun or "", f"{gbits:g}gbit" if has_link else ""
    idle_s = 0.0 if has_link else IDLE_S
    runs, posted, idle = [], [dict[str, list[int]]() for _ in range(sum(hosts))], 0.0
    for schemes in _fitting(hosts, tokens):
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(tokens, iterations, folder, schemes, bool(mpirun), has_link, idle_s)
            found = namespaces.run(rounds, hosts, asdict(setting), timeout_s=ENDS_S, rate=rate, mpirun=mpirun)
        if None in found:
            raise SystemExit(f"ranks {[rank for rank, each in enumerate(found) if each is None]} failed")
        runs.append(from_message(found[0]["samples"]))
        idle = max(idle, *(each["idle"] for each in found))
        for of_rank, each in zip(posted, found, strict=True):
            of_rank |= each["posted"]
    return Measured(hosts, tokens, gbits, runs, posted, idle)


def _fitting(hosts: tuple[int, ...], tokens: int) -> list[list[str]]:
    """Our schemes, as many in each run as memory has room for; without those that have none alone."""
    num_ranks = sum(hosts)
    left_of_all = MEMORY_SHARE * available_memory() - num_ranks * tokens * BYTES_OF_TOKEN
    runs: list[list[str]] = []
    left = 0.0
    for name, ours in OURS.items():
        data_bytes = EPBuffer.get_buffer_size_hint(
            num_ranks,
            num_max_tokens_per_rank=tokens,
            product=ours.product,
            comm_alg=ours.comm_alg,
            ranks_per_server=hosts[0],
            relaxed=True,
            **SIZES,
        )
        needed = ours.share * num_ranks * data_bytes
        if needed > left_of_all:
            print(f"{num_ranks} ranks, BS {tokens}: without {name}, whose windows take {needed / 1e9:.1f} GB")
            continue
        if needed > left:
            runs.append([])
            left = left_of_all
        runs[-1].append(name)
        left -= needed
    return runs


def _report_rounds(measured: Sequence[Measured], mpi: Mpi) -> list[harness.Record]:
    records, times, ratios = [], [], []
    routes = GLOO, *(BY_MPI if mpi.mpirun else ()), *OURS
    for each in measured:
        for quantize in FORMATS:
            rows = quantize or "bf16"
            place = [str(len(each.hosts)), str(each.tokens), rows]
            medians = {name: statistics.median(each.times(name, quantize)) for name in each.routes(quantize)}
            times.append(
                [*place, *(f"{medians[name] / MS:.1f}" if name in medians else "" for name in routes)]
            )
            for route, us in medians.items():
                of_route = each.as_record(rows=rows, route=route)
                records += harness.records_of("hosts", of_route, {"median_us": us})
            figures = each.ratios(quantize)
            records += harness.records_of("hosts", each.as_record(rows=rows), figures)
            shown = [_asked(figures, metric.name, goal(metric, each.tokens)) for metric in RATIOS]
            ratios.append([*place, *shown])
        records += harness.records_of("hosts", each.as_record(), {"idle_nic_share": each.idle})
    if measured:
        heads = "hosts", "BS", "rows"
        harness.print_table("Milliseconds of a dispatch and a combine", (*heads, *routes), times)
        titles = [metric.title for metric in RATIOS]
        title = "Ratios in each iteration, with 95 % intervals; and of each route's fastest quarter of rounds"
        harness.print_table(title, (*heads, *titles), ratios)
        print(f"MPI: {mpi.version or 'absent: ' + mpi.absent}, over TCP between hosts.")
        most = max(each.idle for each in measured)
        print(f"An idle NIC took {100 * most:.2f} % of a core, {100 * IDLE_SHARE:g} % asked.")
    return records


def _asked(figures: dict[str, float], metric: str, least: float) -> str:
    if metric not in figures:
        return ""
    verdict = "" if figures[metric] >= least else f" < {least:g}"
    interval = harness.interval_text(figures, metric)
    return f"{figures[metric]:.2f} ({interval}){verdict}; {figures[f'{metric}_fastest']:.2f}"


def _report_links(measured: Sequence[Measured]) -> list[harness.Record]:
    records, times, gains = [], [], []
    for each in measured:
        place = [str(len(each.hosts)), f"{each.gbits:g}", str(each.tokens)]
        there = [name for name in OURS if name in each.routes("")]
        for quantize in FORMATS:
            rows = quantize or "bf16"
            for route in there:
                figures = each.vs_link(route, quantize)
                sent = sum(each.most_bytes(route, quantize))
                records += harness.records_of("hosts", each.as_record(rows=rows, route=route), figures)
                interval = harness.interval_text(figures, "time_vs_link")
                late = f" > {SHARE_OF_LINK:g}" if figures["time_vs_link"] > SHARE_OF_LINK else ""
                shown = f"{figures['time_vs_link']:.2f} ({interval}){late}"
                times.append([*place, rows, route, f"{sent / 1e6:.2f}", shown])
            for route in (name for name, other in HIERARCHIES.items() if {name, other} <= {*there}):
                figures = each.gain_of_hierarchy(route, quantize)
                records += harness.records_of("hosts", each.as_record(rows=rows, route=route), figures)
                gains.append([*place, f"{route}, {rows}", *_gain(figures, "hierarchy")])
        for route in there:
            figures = each.gain_of_int8(route)
            records += harness.records_of("hosts", each.as_record(route=route), figures)
            gains.append([*place, f"int8 by {route}", *_gain(figures, "int8")])
    if measured:
        heads = "hosts", "Gbit/s", "BS"
        harness.print_table(
            "Rounds over limited links",
            (*heads, "rows", "route", "MB from the host with most", "time / (bytes / link)"),
            times,
        )
        harness.print_table("What fewer bytes gain", (*heads, "by", "in bytes", "in time", "share"), gains)
    return records


def _gain(figures: dict[str, float], name: str) -> list[str]:
    ratio, gain = figures[f"{name}_bytes_ratio"], figures[f"{name}_gain"]
    verdict = "" if gain >= SHARE_OF_BYTES * ratio else f" < {SHARE_OF_BYTES:g}"
    return [f"{ratio:.2f}", f"{gain:.2f}", f"{gain / ratio:.2f}{verdict}"]


if __name__ == "__main__":
    harness.run_main(main)
