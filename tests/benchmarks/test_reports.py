"""What pages and reports of benchmarks share."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import reports
from moe_triton.tools.text_table import TextTable, names, numbers


def test_a_page_is_written_with_its_machine_tables_and_plots(tmp_path: Path) -> None:
    table = TextTable([names("what"), numbers("us")], [["dispatch", "1.5"]], "Times")
    text = "\n".join(
        [
            *reports.machine_lines({"cores": "2", "huge pages": ""}, {"python": "3.11"}),
            *reports.table_lines("### Times\n", table),
            reports.image_line("Times", "times.svg"),
        ]
    )
    reports.write_page(tmp_path / "docs", "page.md", text)
    written = (tmp_path / "docs" / "page.md").read_text()
    assert written.startswith("## The machine\n\n| | |\n| --- | --- |\n| cores | 2 |\n| python | 3.11 |\n\n")
    assert "### Times\n\n| what" in written
    assert written.endswith("![Times](benchmarks/times.svg)\n")


def test_a_report_says_its_machine_and_versions(tmp_path: Path) -> None:
    found = {"machine": reports.machine(), "versions": reports.versions()}
    assert int(found["machine"]["cores"]) >= 1
    assert found["versions"]["mpi library"] == "none"
    reports.write_json(tmp_path / "a" / "report.json", found)
    assert json.loads((tmp_path / "a" / "report.json").read_text()) == found
