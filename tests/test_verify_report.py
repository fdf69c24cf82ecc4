"""Reports: order, JSON, JUnit XML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxconvert.verify import Check, Level, Sample, VerifyReport, junit_xml
from mxconvert.verify.extras import ignored, may_be_loaded
from mxconvert.verify.report import SHOWN_PER_FILE, Collector


def report_of(collector: Collector) -> VerifyReport:
    return VerifyReport(
        target="A",
        level=Level.DIGEST,
        artifact_id="0" * 64,
        findings=collector.ordered(),
        notes=tuple(collector.notes),
        not_checked=tuple(collector.not_checked),
        checked=tuple(sorted(collector.checked)),
        counts=dict(collector.counts),
    )


def test_order_does_not_depend_on_threads() -> None:
    rows = [
        (Check.DIGEST, "digest", "b"),
        (Check.MANIFEST, "other-artifact", None),
        (Check.DIGEST, "digest", "a"),
        (Check.FILES, "size", "z"),
    ]
    reports = []
    for order in (rows, rows[::-1]):
        collector = Collector()
        for check, code, path in order:
            collector.fail(check, code, "m", path=path)
        reports.append(report_of(collector))
    assert reports[0].findings == reports[1].findings
    assert [f.path for f in reports[0].findings] == [None, "z", "a", "b"]
    assert junit_xml(reports[0]) == junit_xml(reports[1])


def test_a_flood_of_findings_is_counted_not_kept() -> None:
    collector = Collector()
    for number in range(SHOWN_PER_FILE + 7):
        collector.fail(Check.STRUCTURE, "not-stored", "m", path="index", tensor=str(number))
    findings = collector.ordered()
    assert len(findings) == SHOWN_PER_FILE + 1
    assert any("7 more findings of kind not-stored" in finding.message for finding in findings)
    assert collector.counts["findings"] == SHOWN_PER_FILE + 7


def test_json_document() -> None:
    collector = Collector()
    collector.fail(Check.FILES, "size", "a: the size", path="a", expected=1, found=2)
    collector.note("extra-file", "n", "n")
    collector.skip("something")
    collector.skip("something")
    document = report_of(collector).to_json()
    assert document == {
        "schema_version": 1,
        "type": "verify",
        "ok": False,
        "target": "A",
        "location": None,
        "level": "digest",
        "artifact_id": "0" * 64,
        "strict": False,
        "ignored": [],
        "counts": {"findings": 1},
        "findings": [
            {
                "check": "files",
                "code": "size",
                "path": "a",
                "tensor": None,
                "expected": "1",
                "found": "2",
                "message": "a: the size: expected 1, found 2",
            }
        ],
        "notes": [{"code": "extra-file", "path": "n", "message": "n"}],
        "not_checked": ["something"],
        "error": None,
    }


def test_junit_has_one_case_per_file_and_check() -> None:
    collector = Collector()
    collector.look("a", Check.FILES)
    collector.look("a", Check.DIGEST)
    collector.look("b", Check.FILES)
    collector.fail(Check.DIGEST, "digest", 'a: <"&>', path="a")
    collector.fail(Check.DIGEST, "tensor-digest", "second", path="a")
    collector.fail(Check.MANIFEST, "other-artifact", "ids differ")
    collector.skip("the <numbers>")
    text = junit_xml(report_of(collector))
    root = ET.fromstring(text)
    suite = root[0]
    assert suite.get("tests") == "4"
    assert suite.get("failures") == "2"
    cases = {(c.get("classname"), c.get("name")): c for c in suite.findall("testcase")}
    assert len(cases) == 4
    failure = cases["mxconvert.verify.digest", "a"].find("failure")
    assert failure is not None
    assert failure.get("message") == 'a: <"&>'
    assert failure.text == 'a: <"&>\nsecond'
    assert cases["mxconvert.verify.manifest", "(artifact)"].find("failure") is not None
    assert cases["mxconvert.verify.files", "b"].find("failure") is None
    assert suite.findtext("system-out") == "the <numbers>"


@given(st.text(), st.text())
def test_junit_is_always_xml(path: str, message: str) -> None:
    collector = Collector()
    collector.fail(Check.FILES, "size", message, path=path)
    ET.fromstring(junit_xml(report_of(collector)).encode())


def test_passing_report_in_junit() -> None:
    collector = Collector()
    collector.look("a", Check.FILES)
    root = ET.fromstring(junit_xml(report_of(collector)))
    assert root[0].get("failures") == "0"


def test_samples() -> None:
    parts = [Sample.parse(f"{n}/4") for n in (1, 2, 3, 4)]
    for position in range(20):
        assert sum(part.takes(position) for part in parts) == 1


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("x.SAFETENSORS", True),
        ("pytorch_model.bin", True),
        ("x.py", True),
        ("chat_template.jinja", True),
        ("tokenizer.model", True),
        ("vocab", True),
        ("notes.txt", False),
        ("logo.png", False),
        ("x.py~", False),
        ("config.json.bak", False),
        ("mxconvert.manifest.json.sig", False),
        ("README.rst", False),
    ],
)
def test_what_a_loader_may_read(name: str, loaded: bool) -> None:
    assert may_be_loaded(name) == loaded


def test_ignore_patterns_match_paths_and_folders() -> None:
    assert ignored("a/b/c.py", ("a/b",))
    assert ignored("a/b/c.py", ("a/",))
    assert ignored("c.py", ("*.py",))
    assert not ignored("c.py", ("*.txt",))


def test_every_code_and_count_is_documented() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs" / "reference" / "verify.md").read_text()
    sources = "\n".join(p.read_text() for p in (root / "mxconvert" / "verify").glob("*.py"))
    literals = set(re.findall(r'"([a-z]+(?:-[a-z]+)+)"', sources))
    usage = set(re.findall(r'code="([a-z-]+)"', sources))
    elsewhere = {"compressed-tensors", "mxfp-pack-quantized"}
    assert {code for code in literals - usage - elsewhere if f"`{code}`" not in text} == set()
    counts = set(re.findall(r'\bcount\(\s*"([a-z_]+)"', sources))
    assert counts
    assert {name for name in counts if f"`{name}`" not in text} == set()
