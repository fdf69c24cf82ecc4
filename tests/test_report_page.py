"""The report's page: one file, right numbers, no name that becomes markup, same bytes each time."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mxconvert.report import render_page, summarize
from mxconvert.report.page.charts import Bar, Line, bars, lines
from mxconvert.report.page.embed import embedded_data, fill
from mxconvert.report.page.markup import Markup, escape, tag
from mxconvert.report.text import ratio
from mxconvert.statistics import Header, Histograms, TensorStats
from tests.support import shell
from tests.support.statistics import NAME, PROJECTIONS, model_records, weight
from tests.test_report import write_report

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.report.summary import Summary

HEADER = Header(tool="mxconvert 0.1.0", artifact="ab" * 32, scale_rule="mse", source="cd" * 32)
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\x1b"
VOID = {"meta", "input", "link", "br", "img"}


class Page(HTMLParser):
    """Parses a page and insists that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.data = ""
        self.texts: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = attributes["id"] or ""
            self.rows[self._table] = []
        elif tag == "tr":
            self.rows[self._table].append([])
        elif tag in {"td", "th"}:
            self.rows[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"td", "th"}:
            self.rows[self._table][-1][-1] += data
        if self.open and self.open[-1] == "script" and self.tags[-1][1].get("id") == "data":
            self.data += data
        self.texts.append(data)


def summary_of(layers: int = 4, experts: int = 16) -> Summary:
    return summarize(HEADER, model_records(range(layers), experts))


def decoded(column: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    raw = base64.b64decode(column["data"])
    values = np.frombuffer(raw, "<f4" if column["type"] == "f4" else "<u2").reshape(shape)
    return values if column["type"] == "f4" else values * column["scale"]


def test_the_page_needs_nothing_else() -> None:
    """It is opened from disk, years later, behind a firewall: no request of any kind."""
    text = render_page(summary_of(), "model", 20)
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for name, attributes in page.tags:
        assert not {"src", "href", "action", "srcset"} & attributes.keys(), name
        assert not [key for key in attributes if key.startswith("on")], name
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    policy = next(a["content"] for t, a in page.tags if "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_same_input_gives_the_same_page(tmp_path: Path) -> None:
    """No clock, no host, no order of a set: a page can be compared and cached."""
    folder = write_report(tmp_path / "model", model_records(range(4), 16), HEADER)
    for name in ("a.html", "b.html"):
        shell("report", folder, "--html", tmp_path / name).ok()
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_tables_hold_the_figures_without_script() -> None:
    """A reader that runs no script sees every number of the main tables."""
    summary = summary_of()
    page = Page(render_page(summary, "model", 20))
    layers = page.rows["layers"][1:]
    assert [row[0] for row in layers] == ["0", "1", "2", "3"]
    for row, group in zip(layers, summary.layers, strict=True):
        assert row[1] == str(group.tensors)
        assert row[3] == ratio(group.sums.relative_rmse)
    assert [row[0] for row in page.rows["projections"][1:]] == sorted(PROJECTIONS)
    weights = page.rows["weights"][1:]
    assert [row[0] for row in weights] == [stats.name for stats in summary.worst]
    assert len(weights) == summary.total.tensors == 192
    outliers = page.rows["outliers"][1:]
    assert [row[:2] for row in outliers] == [
        [str(o.layer), str(o.expert)] for o in summary.outliers
    ]
    assert ratio(summary.total.sums.relative_rmse) in page.texts


def test_tables_can_be_read_aloud() -> None:
    """Each has a caption, scoped heads, and a place that the keyboard can scroll."""
    page = Page(render_page(summary_of(), "model", 20))
    tables = [a for t, a in page.tags if t == "table"]
    assert len(tables) == len([t for t, _ in page.tags if t == "caption"]) == 5
    assert all(a.get("scope") in {"col", "row"} for t, a in page.tags if t == "th")
    for name, attributes in page.tags:
        if name == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
    assert ("html", {"lang": "en"}) in page.tags


def test_embedded_numbers_equal_the_aggregates() -> None:
    """What the heat map and the drill-down show is what was measured."""
    summary = summary_of(5, 9)
    grid = summary.grid
    assert grid is not None
    data = json.loads(Page(render_page(summary, "m", 20)).data)
    assert data == embedded_data(summary)
    assert (data["layers"], data["experts"]) == (list(range(5)), list(range(9)))
    assert data["planes"] == [*sorted(PROJECTIONS), "all"]
    shape = (5, 9, 4)
    columns = {column["name"]: decoded(column, shape) for column in data["columns"]}
    assert np.array_equal(columns["relative_rmse"], grid.relative_rmse.astype("f4"))
    for name in ("flushed", "saturated"):
        exact = getattr(grid, name) / grid.elements
        assert np.abs(columns[name] - exact).max() <= exact.max() / 65535
    for stats in summary.worst:
        assert stats.layer is not None
        assert stats.expert is not None
        pattern = data["names"][data["planes"].index(stats.projection)]
        assert fill(pattern, stats.layer, stats.expert) == stats.name


def test_missing_experts_stay_empty() -> None:
    records = [weight("a", 0.1, layer=0, expert=0, projection="w")]
    records.append(weight("b", 0.2, layer=1, expert=1, projection="w"))
    data = embedded_data(summarize(HEADER, records))
    values = decoded(data["columns"][0], (2, 2, 2))
    assert np.isnan(values[0, 1]).all()
    assert np.isnan(values[1, 0]).all()
    assert data["names"] == [""]


def test_names_do_not_become_markup() -> None:
    """A tensor's name comes from whoever made the checkpoint."""
    header = Header(tool=EVIL, artifact=EVIL, scale_rule=EVIL, source=EVIL)
    records = [
        weight(EVIL, 0.1, layer=0, expert=0, projection=EVIL, role=EVIL, file=EVIL),
        weight(EVIL + ".layers.0.x.experts.1.weight", 0.2, layer=0, expert=1, projection=EVIL),
        Histograms(file=EVIL, codes=(1,) * 16, scales={120: 3}, sampled=EVIL),
    ]
    text = render_page(summarize(header, records), EVIL, 20)
    page = Page(text)
    assert [t for t, _ in page.tags].count("script") == 2
    assert "img" not in {t for t, _ in page.tags}
    assert not [a for _, a in page.tags if "onerror" in a]
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert json.loads(page.data)["planes"][0].startswith("</script>")


def test_a_model_without_experts_has_a_page() -> None:
    """`--scope linear` of a dense model: no heat map, every table."""
    records = [
        weight(f"model.layers.{n}.mlp.up_proj.weight", 0.1 + n / 100, layer=n, role="dense MLP")
        for n in range(3)
    ]
    page = Page(render_page(summarize(HEADER, records), "dense", 20))
    assert "canvas" not in {t for t, _ in page.tags}
    assert page.rows["projections"][1][0] == "up_proj"
    assert len(page.rows["weights"]) == 4


def test_an_empty_report_has_a_page() -> None:
    assert Page(render_page(summarize(HEADER, []), "none", 20)).rows["weights"] == [
        ["weight", "role", "layer", "expert", "shape", "relative RMSE", "SQNR, dB", "cosine",
         "largest error", "to zero", "saturated"]
    ]  # fmt: skip


def test_zero_and_infinite_errors_are_shown() -> None:
    zero = weight("zero", 0.0, layer=0, expert=0, projection="w")
    text = render_page(summarize(HEADER, [zero]), "zero", 20)
    assert Page(text).rows["weights"][1][5] == "0.0000"
    assert "∞" in text


@pytest.mark.parametrize("value", [1.0, 1e-7, 0.3, 1e9])
def test_charts_have_axes_at_any_size(value: float) -> None:
    """Ticks are few and labels differ, whatever the numbers."""
    column = bars("t", "d", [Bar(value, "w", "x"), Bar(0.0, "z")], "x")
    points = tuple((n, value * (1 + n / 10), "w") for n in range(5))
    line = lines("t", "d", [Line("a", points), Line("b", points[:1])], "x")
    for chart in (column, line):
        labels = re.findall(r'text-anchor="end">([^<]+)<', chart)
        assert 2 <= len(labels) <= 9
        assert len(set(labels)) == len(labels)
    assert "nan" not in column + line


def test_text_is_escaped_unless_it_is_markup() -> None:
    assert escape('<&"') == "&lt;&amp;&quot;"
    assert escape(Markup("<b>")) == "<b>"
    assert tag("p", "<", title='"', hidden=True, class_=None) == '<p title="&quot;" hidden>&lt;</p>'


def test_a_page_of_the_reference_models_size_stays_small() -> None:
    """Kimi-K3 has 247,296 quantized weights: a page of a few MB, whatever their number.

    A tenth of its experts here; the embedded part grows with them, the rest does not.
    """
    name = NAME.replace("model.", "language_model.model.")
    records = model_records(range(1, 93), 90, ("w1", "w2", "w3"), name=name)
    summary = summarize(HEADER, records)
    text = render_page(summary, "K3", 20)
    embedded = len(Page(text).data)
    assert summary.total.tensors == 92 * 90 * 3
    assert embedded < 92 * 90 * 4 * 8 * 4 / 3 * 1.05
    assert len(text) - embedded < 400_000
    assert text.count("<tr>") < 700
    assert isinstance(summary.worst[0], TensorStats)
