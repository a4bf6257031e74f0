"""The benchmark of tuned settings: that it runs, on tables that change a kernel's settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from moe_triton import tables
from moe_triton.core.cpu_family import cpu_family
from tests.patience import seconds

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs(tmp_path: Path) -> None:
    name, path = f"kernels-cpu-{cpu_family()}", tmp_path / "records.json"
    known = json.loads((tables.FOLDER / "kernels-cpu-amd-25-17.json").read_text())
    rows = [row for row in known["rows"] if row[1] == "weights" and "TILE" in row[-3]]
    assert rows
    (tmp_path / f"{name}.json").write_text(json.dumps(known | {"name": name, "rows": rows}))
    sizes = "--tokens", "4", "--iterations", "2", "--groups", "2"
    command = [
        sys.executable,
        "-m",
        "benchmarks.tuned",
        *sizes,
        "--tables",
        str(tmp_path),
        "--json",
        str(path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=seconds(200))
    found = [r for r in json.loads(path.read_text()) if r["metric"] == "tuned_vs_plain"]
    assert {(r["case"]["operator"], r["case"]["rows"]) for r in found} == {
        (operator, rows) for operator in ("dispatch", "combine") for rows in ("bf16", "int8")
    }
    assert all(r["value"] > 0 for r in found)
