"""Reports: what is in them, and what must never be."""

from __future__ import annotations

import getpass
import json
import socket
from datetime import datetime, timezone
from pathlib import Path

import pytest

from moe_triton.model.constants import Machine, machine_named
from moe_triton.tools.selftest.check import Result
from moe_triton.tools.selftest.measured import constants_of, product_of
from moe_triton.tools.selftest.private import scrubbed
from moe_triton.tools.selftest.report import CONSTANTS_NAME, JSON_NAME, MARKDOWN_NAME, Report
from moe_triton.tools.selftest.settings import Settings
from tests.selftest.probes import measured_constants

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
    assert document["version"] == 2
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
    assert "| memcpy_gb_per_s | 700 | 700 | 700 | measured | on Ascend910_9391 2026-03-04 |" in text
    assert "| flag_cycles | 6 | 2 | 30 | assumed |" in text
    assert "| environment | assumption: a | failed | 1.5 | documented: Page of a |" in text
    assert "Times" not in text
    assert text.count("```") == 4


def test_an_unfinished_report_says_so(tmp_path: Path) -> None:
    report(RESULTS[0], complete=False).write(tmp_path)
    assert "FAILED, NOT COMPLETE" in (tmp_path / MARKDOWN_NAME).read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [JSON_NAME, MARKDOWN_NAME, CONSTANTS_NAME]
    )


def test_constants_are_those_of_the_product_with_what_was_measured(tmp_path: Path) -> None:
    report(*RESULTS).write(tmp_path)
    machine = Machine.from_json((tmp_path / CONSTANTS_NAME).read_text(encoding="utf-8"))
    assert machine.name == "A3"
    assert machine.memcpy_gb_per_s == 700
    assert measured_constants(machine) == {"memcpy_gb_per_s"}


def test_streaming_rates_become_bytes_per_cycle_and_core() -> None:
    figures = {
        "blocks": 40.0,
        "stream_gb_per_s": 1480.0,
        "stream_gb_per_s low": 1400.0,
        "stream_gb_per_s high": 1500.0,
        "stream_alone_gb_per_s": 37.0,
        "call_overhead_us": 9.0,
        "call_overhead_us low": 8.0,
        "call_overhead_us high": 12.0,
    }
    results = [
        Result("streaming", "constants", "passed", figures=figures),
        Result("failed", "constants", "failed", figures={"flag_latency_us": 3.0}),
        Result("other", "timing", "passed", figures={"sync_all_us": 3.0}),
    ]
    machine = constants_of(results, "npu", "Ascend910B3", "2026-03-04")
    stream = machine.constants["stream_bytes_per_cycle"]
    assert (stream.value, stream.low, stream.high) == pytest.approx(
        tuple(rate / 40 / 1.85 for rate in (1480, 1400, 1500))
    )
    assert (stream.kind, stream.source) == ("measured", "on Ascend910B3 2026-03-04")
    assert machine.stream_bytes_per_cycle_alone == pytest.approx(37 / 1.85)
    called = machine.constants["call_overhead_us"]
    assert (called.value, called.low, called.high) == (9, 8, 12)
    assert {"flag_latency_us", "sync_all_us"}.isdisjoint(measured_constants(machine))
    assert machine.sync_all_us == machine_named("A2").sync_all_us


@pytest.mark.parametrize(
    ("backend", "soc", "nearest"),
    [
        ("npu", "Ascend910B3", "hop_node_us"),
        ("npu", "Ascend910_9391", "hop_sibling_us"),
        ("cpu", "x", "hop_sibling_us"),
    ],
)
def test_the_neighbour_that_was_written_to_is_the_nearest_of_the_product(
    backend: str, soc: str, nearest: str
) -> None:
    figures = {"hop_us": 0.4, "hop_us low": 0.3, "hop_us high": 0.6}
    machine = constants_of([Result("w", "constants", "passed", figures=figures)], backend, soc, "x")
    hop = machine.constants[nearest]
    assert (hop.value, hop.low, hop.high) == (0.4, 0.3, 0.6)
    assert measured_constants(machine) == {nearest}


@pytest.mark.parametrize(
    ("soc", "product"),
    [("Ascend910B3", "A2"), ("Ascend910_9391", "A3"), ("Ascend910C", "A3"), ("unknown", "A3")],
)
def test_products_are_known_by_their_devices(soc: str, product: str) -> None:
    assert product_of("npu", soc) == product
    assert product_of("cpu", soc) == "cpu"


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
