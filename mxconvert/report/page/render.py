"""The page as a whole."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from mxconvert.report.page import sections
from mxconvert.report.page.embed import as_script, embedded_data
from mxconvert.report.page.markup import Markup, join, tag
from mxconvert.report.page.tables import group_table, outlier_table, shown_weights, weight_table

if TYPE_CHECKING:
    from mxconvert.report.summary import Summary


def render_page(summary: Summary, title: str, top: int) -> str:
    """Return the page.

    Args:
        summary: What to show.
        title: Of the page, for example the artifact's name.
        top: Worst weights and outliers to list at least.
    """
    data = as_script(embedded_data(summary))
    script = _asset("script.js")
    body = join(
        [
            _header(summary, title),
            tag("main", *_parts(summary, top, len(data)), id="main"),
            tag("script", Markup(data), type="application/json", id="data"),
            tag("script", Markup(script)),
        ],
        "\n",
    )
    page = tag("html", _head(title, script), tag("body", body), lang="en")
    return f"<!doctype html>\n{page}\n"


def _asset(name: str) -> str:
    return resources.files("mxconvert.report").joinpath("assets", name).read_text("utf-8")


def _head(title: str, script: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"Quantization error of {title}"),
        tag("style", Markup(_asset("style.css"))),
    )


def _header(summary: Summary, title: str) -> Markup:
    toggle = tag("button", "Theme: system", id="theme", type="button", hidden=True)
    return tag(
        "header",
        tag("div", tag("p", "MXFP4 quantization error", class_="kicker"), toggle, class_="line"),
        tag("h1", title),
        sections.facts(summary),
    )


def _parts(summary: Summary, top: int, embedded: int) -> list[Markup]:
    outliers = (
        [tag("h2", "Outlier experts", id="outlier-experts"), outlier_table(summary, top)]
        if summary.grid is not None
        else []
    )
    return [
        sections.cards(summary),
        tag("h2", "Where the error is", id="where"),
        tag(
            "div",
            sections.layer_chart(summary),
            sections.spread_chart(summary),
            class_="charts",
        ),
        group_table("Error by projection", "projection", summary.projections, name="projections"),
        group_table("Error by role", "role", summary.roles, name="roles"),
        group_table("Error by layer", "layer", summary.layers, name="layers"),
        sections.heat_map(summary),
        *outliers,
        tag("h2", "Scales and codes", id="histograms"),
        sections.exponents(summary),
        tag("div", sections.scale_chart(summary), sections.code_chart(summary), class_="charts"),
        tag("h2", "Weights", id="all"),
        weight_table(summary, top),
        sections.about(summary, len(shown_weights(summary, top)), embedded),
    ]
