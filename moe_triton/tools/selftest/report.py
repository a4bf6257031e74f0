"""The report of a run: JSON for programs, Markdown for people, both without private data."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_triton.tools.markdown import cell, table
from moe_triton.tools.selftest.check import STATUSES, Result, Settings
from moe_triton.tools.selftest.checks.environment import DEVICES
from moe_triton.tools.selftest.private import scrubbed
from moe_triton.tools.selftest.timing import HIGH, LOW

FORMAT, VERSION = "moe_triton.selftest", 3
JSON_NAME, MARKDOWN_NAME = "report.json", "report.md"
VERSIONS = "versions"
UNKNOWN = "unknown"
TIMING, CONSTANTS = "timing", "constants"
MOST_NAMES = 6
CALLS = {
    "dispatch call us, p10 / p50 / p90 / p99": "dispatch",
    "combine call us": "combine",
    "both us": "both",
}


@dataclass(frozen=True)
class Report:
    """The report of one run, also while it is running.

    Attributes:
        settings: of the run.
        results: so far.
        moment: when the run began, in UTC.
        is_complete: whether it has ended.
    """

    settings: Settings
    results: Sequence[Result]
    moment: datetime
    is_complete: bool

    @property
    def has_failed(self) -> bool:
        """Whether a check has failed, or the run has not ended."""
        return not self.is_complete or any(result.status == "failed" for result in self.results)

    @property
    def soc(self) -> str:
        """Name of the devices."""
        return self._facts(DEVICES).get("SoC", UNKNOWN)

    def document(self) -> dict[str, Any]:
        """The report as JSON's types; docs/selftest.md describes them."""
        count = Counter(result.status for result in self.results)
        machine = {**self._facts(VERSIONS), "SoC": self.soc}
        body: dict[str, Any] = {
            "settings": asdict(self.settings),
            "checks": [_entry(result) for result in self.results if result.name != VERSIONS],
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "date": self.moment.isoformat(timespec="seconds"),
            "complete": self.is_complete,
            "verdict": "failed" if self.has_failed else "passed",
            "summary": {status: count[status] for status in STATUSES},
            "machine": scrubbed(machine, addresses=False),
            **scrubbed(body),
        }

    def write(self, folder: Path) -> None:
        """Writes the report, each file atomically.

        Raises:
            OSError: the folder cannot be written to.
        """
        folder.mkdir(parents=True, exist_ok=True)
        document = self.document()
        _replace(folder / JSON_NAME, json.dumps(document, indent=1) + "\n")
        _replace(folder / MARKDOWN_NAME, render(document))

    def _facts(self, name: str) -> Mapping[str, str]:
        return next((result.facts for result in self.results if result.name == name), {})


def _entry(result: Result) -> dict[str, Any]:
    """A check's result, without NaN and infinite figures, which JSON does not have."""
    figures = {name: value for name, value in result.figures.items() if math.isfinite(value)}
    return {**asdict(result), "seconds": round(result.seconds, 3), "figures": figures}


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def render(document: Mapping[str, Any]) -> str:
    """The document of `Report.document` as Markdown, to read or to attach to an issue."""
    settings, summary = document["settings"], document["summary"]
    counts = ", ".join(f"{number} {status}" for status, number in summary.items())
    verdict = document["verdict"].upper() + ("" if document["complete"] else ", NOT COMPLETE")
    parts = [
        f"# moe_triton selftest: {verdict}",
        f"Back end `{settings['backend']}`, {document['date']}: {counts}."
        + (" Quick run." if settings["quick"] else "")
        + (f" Only {', '.join(settings['only'])}." if settings["only"] else ""),
        _section("Failed", [_failure(check) for check in _with_status(document, "failed")]),
        _section("Skipped", [_skipped(_with_status(document, "skipped"))]),
        _section("Machine", [table(("", ""), document["machine"].items())]),
        _section("Times", [_times(document)]),
        _section("Constants", [_constants(document)]),
        _section("Checks", [_checks(document)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _with_status(document: Mapping[str, Any], status: str) -> list[Mapping[str, Any]]:
    return [check for check in document["checks"] if check["status"] == status]


def _section(title: str, parts: Sequence[str]) -> str:
    text = "\n\n".join(part for part in parts if part)
    return f"## {title}\n\n{text}" if text else ""


def _failure(check: Mapping[str, Any]) -> str:
    page = f"\n\nDocumented: {cell(check['page'])}." if check["page"] else ""
    details = "\n".join(check["details"]).replace("```", "'''")
    return f"### {check['stage']}: {check['name']}\n\n```text\n{details}\n```{page}"


def _skipped(checks: Sequence[Mapping[str, Any]]) -> str:
    """One line per reason, with the checks' names, or with numbers per stage if there are many."""
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for check in checks:
        by_reason.setdefault(" ".join(check["details"]), []).append(check)
    lines = []
    for reason, skipped in by_reason.items():
        names = [f"{check['stage']}: {check['name']}" for check in skipped]
        if len(names) > MOST_NAMES:
            stages = Counter(check["stage"] for check in skipped)
            names = [f"{number} of {stage}" for stage, number in stages.items()]
        lines.append(f"- {cell(reason)}: {cell('; '.join(names))}")
    return "\n".join(lines)


def _times(document: Mapping[str, Any]) -> str:
    """Percentiles of calls, times of kernels, and calls relative to a copy of the bytes that a rank sends."""
    rows = []
    for check in document["checks"]:
        figures = check["figures"]
        if check["stage"] != TIMING or check["status"] != "passed":
            continue
        calls = [
            " / ".join(f"{figures[f'{operator}_call_p{p}_us']:.0f}" for p in (10, 50, 90, 99))
            for operator in CALLS.values()
        ]
        kernels = f"{figures['dispatch_kernels_us']:.0f} / {figures['combine_kernels_us']:.0f}"
        ratios = " / ".join(f"{figures[f'{name}_call_over_memcpy']:.2f}" for name in ("dispatch", "combine"))
        rows.append((check["name"], *calls, kernels, f"{figures['memcpy_gb_per_s']:.1f}", ratios))
    if not rows:
        return ""
    more = ("kernels us, dispatch / combine", "memcpy GB/s", "calls / memcpy of the bytes sent")
    note = (
        "A call is from the first rank in to the last rank out; kernels are the sum of rank 0's steps, their "
        "waits included. Times of a machine that does something else as well mean little."
    )
    return f"{table(('', *CALLS, *more), rows)}\n\n{note}"


def _constants(document: Mapping[str, Any]) -> str:
    """What was measured of the model's constants, and what others of them follow from."""
    figures: dict[str, float] = {}
    for check in document["checks"]:
        if (check["stage"], check["status"]) == (CONSTANTS, "passed"):
            figures |= check["figures"]
    rows = [
        (name, *(f"{figures.get(name + end, value):.6g}" for end in ("", LOW, HIGH)))
        for name, value in figures.items()
        if not name.endswith((LOW, HIGH))
    ]
    return table(("", "value", "low", "high"), rows) if rows else ""


def _checks(document: Mapping[str, Any]) -> str:
    rows = []
    for check in document["checks"]:
        few = check["figures"] if check["stage"] != TIMING else {}
        figures = ", ".join(f"{name} {value:.6g}" for name, value in few.items())
        facts = ", ".join(f"{name}: {value}" for name, value in check["facts"].items())
        page = f"documented: {check['page']}" if check["page"] else ""
        said = "; ".join(text for text in (figures, facts, page) if text)
        rows.append((check["stage"], check["name"], check["status"], f"{check['seconds']:.1f}", said))
    return table(("stage", "check", "", "s", "figures"), rows)
