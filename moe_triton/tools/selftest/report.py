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

from moe_triton.tools.selftest import markdown
from moe_triton.tools.selftest.check import STATUSES, Result
from moe_triton.tools.selftest.checks.environment import DEVICES
from moe_triton.tools.selftest.private import scrubbed
from moe_triton.tools.selftest.settings import Settings

FORMAT, VERSION = "moe_triton.selftest", 3
JSON_NAME, MARKDOWN_NAME = "report.json", "report.md"
VERSIONS = "versions"
UNKNOWN = "unknown"


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
        _replace(folder / MARKDOWN_NAME, markdown.render(document))

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
