"""A report as JUnit XML, which CI systems show: one test case per file and check."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

if TYPE_CHECKING:
    from mxconvert.verify.report import Finding, VerifyReport

_ARTIFACT = "(artifact)"
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: VerifyReport) -> str:
    """Return the report as a JUnit document; equal reports give equal text."""
    failures: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in report.findings:
        failures[finding.check, finding.path or _ARTIFACT].append(finding)
    cases = {(check.value, path) for path, check in report.checked} | set(failures)
    numbers = f'tests="{len(cases)}" failures="{len(failures)}" errors="0"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites name="mxconvert verify" {numbers}>',
        f'  <testsuite name="{report.level.value}" {numbers} skipped="0">',
    ]
    for check, path in sorted(cases):
        lines += _case(check, path, failures.get((check, path), []))
    if report.not_checked:
        lines.append(f"    <system-out>{_text(chr(10).join(report.not_checked))}</system-out>")
    return "\n".join([*lines, "  </testsuite>", "</testsuites>", ""])


def _case(check: str, path: str, findings: list[Finding]) -> list[str]:
    head = f'    <testcase classname="mxconvert.verify.{check}" name={_attribute(path)}'
    if not findings:
        return [head + "/>"]
    detail = "\n".join(finding.message for finding in findings)
    first = findings[0]
    failure = f"<failure type={_attribute(first.code)} message={_attribute(first.message)}>"
    return [f"{head}>", f"      {failure}{_text(detail)}</failure>", "    </testcase>"]


def _clean(text: str) -> str:
    return _FORBIDDEN.sub(lambda match: ascii(match.group())[1:-1], text)


def _text(text: str) -> str:
    return escape(_clean(text))


def _attribute(text: str) -> str:
    return quoteattr(_clean(text))
