"""A report's document, of this version or of the one before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.plain_files import read_text
from moe_triton.tools.selftest import report

REMEDY = "Pass the folder that moe-triton selftest --backend npu wrote, or its report.json."
WITH_CONSTANTS = 2
"""The version whose reports hold a whole machine, with what was assumed where nothing was measured."""
VERSIONS = WITH_CONSTANTS, report.VERSION


def read_document(path: Path) -> Mapping[str, Any]:
    """Reads a selftest's report.

    Args:
        path: of its folder, or of its JSON.

    Raises:
        ArgumentError: there is none, it cannot be read, or it is of another version.
    """
    file = path / report.JSON_NAME if path.is_dir() else path
    try:
        document = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise bad(str(path), f"it must be a report that can be read ({error})") from None
    if not is_report(document):
        raise bad(str(path), f'its "format" must be "{report.FORMAT}"')
    return of_known_version(document)


def of_known_version(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A report, if it can be read.

    Raises:
        ArgumentError: it is of another version.
    """
    if document.get("version") not in VERSIONS:
        found, known = document.get("version"), " and ".join(map(str, VERSIONS))
        raise bad(f"of version {found}", f"this moe_triton reads versions {known}")
    return document


def is_report(document: object) -> bool:
    """Whether a JSON document is a selftest's report, of any version."""
    return isinstance(document, dict) and document.get("format") == report.FORMAT


def bad(value: object, rule: str) -> ArgumentError:
    """The error about a report."""
    return ArgumentError("report", value, rule, REMEDY, code=INVALID_ARGUMENT)
