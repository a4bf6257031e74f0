"""Reports: what is in them, and what must never be."""

from __future__ import annotations

import getpass
import json
import socket
from datetime import datetime, timezone
from pathlib import Path

import pytest

from moe_triton.tools.selftest.check import Result, Settings
from moe_triton.tools.selftest.private import scrubbed
from moe_triton.tools.selftest.report import JSON_NAME, MARKDOWN_NAME, Report

MOMENT = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc)
RESULTS = (
    Result("versions", "environment", "passed", facts={"torch": "2.13.0", "driver": "24.1.0.3"}),
    Result("devices", "environment", "passed", figures={"ranks": 8}, facts={"SoC": "Ascend910_9391"}),
    Result("assumption: a", "environment", "failed", ("it | is\nnot so",), page="Page of a", seconds=1.5),
    Result("kernel pack", "kernels", "failed", ("rows differs in ```3``` elements", "and 4 more")),
    Result("kernel keep", "kernels", "skipped", ("because of 'back end'",)),
    Result("memcpy", "constants", "passed", figures={"memcpy_gb_per_s": 700.0, "bad": float("nan")}),
)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine and a user whose names stand in no text by chance."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Node-17.lab.example.com")
    monkeypatch.setattr(getpass, "getuser", lambda: "bob.smith")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/bsmith"))


def report(*results: Result, complete: bool = True) -> Report:
    return Report(Settings(backend="npu"), results, MOMENT, complete)


def test_the_document_holds_every_check_and_the_machine() -> None:
    document = report(*RESULTS).document()
    assert document["format"] == "moe_triton.selftest"
    assert document["version"] == 3
    assert document["date"] == "2026-03-04T05:06:07+00:00"
    assert document["verdict"] == "failed"
    assert document["summary"] == {"passed": 3, "failed": 2, "skipped": 1}
    assert document["machine"] == {"torch": "2.13.0", "driver": "24.1.0.3", "SoC": "Ascend910_9391"}
    assert document["settings"]["backend"] == "npu"
    assert [check["name"] for check in document["checks"]] == [r.name for r in RESULTS[1:]]
    keys = {"stage", "name", "status", "seconds", "details", "figures", "facts", "page"}
    assert all(check.keys() == keys for check in document["checks"])
    assert document["checks"][-1]["figures"] == {"memcpy_gb_per_s": 700.0}
    json.loads(json.dumps(document, allow_nan=False))


def test_it_has_passed_only_if_it_is_complete_and_nothing_failed() -> None:
    good, skipped, bad = RESULTS[0], RESULTS[4], RESULTS[3]
    assert not report(good, skipped).has_failed
    assert report(good, bad).has_failed
    assert report(good, complete=False).has_failed
    assert report(good, skipped).document()["verdict"] == "passed"


def test_markdown_has_each_failure_with_its_details_and_its_page(tmp_path: Path) -> None:
    report(*RESULTS).write(tmp_path)
    text = (tmp_path / MARKDOWN_NAME).read_text(encoding="utf-8")
    assert text.startswith("# moe_triton selftest: FAILED\n")
    assert "### environment: assumption: a\n\n```text\nit | is\nnot so\n```\n\nDocumented: Page of a." in text
    assert "### kernels: kernel pack\n\n```text\nrows differs in '''3''' elements\nand 4 more\n```" in text
    assert "- because of 'back end': kernels: kernel keep" in text
    assert "| memcpy_gb_per_s | 700 | 700 | 700 |" in text
    assert "flag_cycles" not in text  # which was not measured
    assert "| environment | assumption: a | failed | 1.5 | documented: Page of a |" in text
    assert "Times" not in text
    assert text.count("```") == 4


def test_an_unfinished_report_says_so(tmp_path: Path) -> None:
    report(RESULTS[0], complete=False).write(tmp_path)
    assert "FAILED, NOT COMPLETE" in (tmp_path / MARKDOWN_NAME).read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([JSON_NAME, MARKDOWN_NAME])


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("no peer at 10.23.4.5:2222", "no peer at <address>:2222"),
        ("[fe80::1ff:fe23:4567:890a]:80 is dead", "[<address>]:80 is dead"),
        ("from 02:42:ac:11:00:02", "from <address>"),
        ("bound to ::1", "bound to <address>"),
        ("in /home/alice/src/kernel.o", "in <path>/kernel.o"),
        ('File "/home/alice/src/moe_triton/buffer.py", line 3', 'File "moe_triton/buffer.py", line 3'),
        ("/data/x/.venv/lib/python3.11/site-packages/torch/a.py:4", "site-packages/torch/a.py:4"),
        ("/opt/py/lib/python3.11/random.py", "lib/python3.11/random.py"),
        ("/usr/local/Ascend/driver/version.info", "/usr/local/Ascend/driver/version.info"),
        ("12:30:05 and 1/2, 3 / 4 GB/s", "12:30:05 and 1/2, 3 / 4 GB/s"),
        ("version 8.2.1", "version 8.2.1"),
        ("moe_triton::send<a> at std::vector", "moe_triton::send<a> at std::vector"),
    ],
)
def test_what_is_private_is_taken_out_and_nothing_else(text: str, clean: str) -> None:
    assert scrubbed(text) == clean


def test_names_of_host_and_user_are_taken_out_everywhere() -> None:
    results = [
        Result("a", "kernels", "failed", ("node-17 refused bob.smith", "NODE-17.lab.example.com")),
        Result("b", "kernels", "passed", facts={"of bsmith": "/home/bsmith/x", "said": "roots of nodes"}),
    ]
    document = json.dumps(report(*results).document())
    for secret in ("node-17", "bob.smith", "bsmith", "lab.example"):
        assert secret not in document.lower()
    assert "<host> refused <user>" in document
    assert "roots of nodes" in document


def test_a_user_without_a_name_and_names_that_are_words_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise OSError("no such user")

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(Path, "home", lambda: Path("/root"))
    assert scrubbed("root mean square on localhost") == "root mean square on localhost"
