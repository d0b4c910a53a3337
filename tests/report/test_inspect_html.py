"""The page of a report as text: complete, self-contained, escaped, and of a reasonable size."""

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import pytest
from support.inspected import graph_with_a_gather, inspect_linears, inspect_llama

import graphshard
from graphshard.report.data import PassStep
from graphshard.report.html import SCRIPTS, html_page, write_html
from graphshard.report.html_passes import MAX_LINES

VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Tables as rows of texts, by identity; the texts of elements; every attribute; whether all is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self._open: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.attributes.extend((tag, name, value) for name, value in attrs)
        if tag in VOID:
            return
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self._table = dict(attrs)["id"]
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "td" in self._open or "th" in self._open:
            self.tables[self._table][-1][-1] += data
        for tag in set(self._open):
            self.texts[tag][-1] += data


@pytest.fixture(scope="module")
def llama():
    return inspect_llama(micro_batches=2)


@pytest.fixture(scope="module")
def page(llama):
    return html_page(llama)


def _embedded(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_the_report(llama, page):
    assert _embedded(page) == llama.to_dict()


def test_every_table_has_its_rows(llama, page):
    tables = Page(page).tables
    assert [row[0] for row in tables["halves"][1:]] == ["forward", "backward", "optimizer"]
    categories = {row[0]: row[1] for row in tables["memory-table"][1:]}
    assert list(categories) == [name for name, size in llama.memory.categories.items() if size]
    assert len(tables["collectives-table"]) == 1 + len(llama.collectives)
    for row, one in zip(tables["collectives-table"][1:], llama.collectives, strict=True):
        assert [row[0], *row[2:4], row[5]] == [one.kind.replace("_", "-"), one.half, one.group, str(one.count)]
        assert (row[1] == "-") == (one.exposed_seconds == 0)  # the first number, in view on a phone too
    assert [row[:2] for row in tables["passes-table"][1:]] == [[step.graph, step.name] for step in llama.passes]


def test_the_headline_says_model_mesh_card_and_whether_it_fits(llama, page):
    texts = Page(page).texts
    heading = "Llama, 84.3 thousand parameters, on 8 \N{MULTIPLICATION SIGN} round (shard=8)"
    assert texts["h1"] == [heading] and texts["title"] == [f"{heading} - graphshard inspect"]
    verdict = next(text for text in texts["p"] if text.startswith("A step takes"))
    assert "It fits: a rank needs" in verdict and "the card has 1 GiB" in verdict
    too_much = replace(llama, memory=replace(llama.memory, fits=False, budget_bytes=1024))
    assert "It does not fit</b>: a rank needs" in html_page(too_much)
    assert "the budget is 1 KiB" in html_page(too_much)


def test_exposures_say_why_and_what_would_help(llama, page):
    items = Page(page).texts["li"]
    for one in llama.exposures:
        reason, remedy = one.collective.reason, one.collective.remedy
        assert any(reason[1:] in item and remedy in item for item in items)
    assert page.count("What would help:</b>") == len(llama.exposures) > 2


def test_nothing_is_loaded_from_elsewhere(page):
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'" in page
    names = {name for _, name, _ in Page(page).attributes}
    assert not names & {"src", "href", "srcset", "action", "data", "poster", "onclick", "onload"}
    for word in ("http:", "https:", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert word not in page


def test_every_asset_is_used():
    files = {path.name for path in (resources.files("graphshard.report") / "page").iterdir()}
    assert files == {"page.html", "page.css", *(f"{name}.js" for name in SCRIPTS)}


def test_names_cannot_become_markup(llama):
    nasty = "</script><script>alert(1)</script>&\"'"
    half = llama.halves[0]
    exposure = replace(llama.exposures[0], collective=replace(llama.exposures[0].collective, unit=nasty, reason=nasty))
    report = replace(
        llama,
        model=replace(llama.model, name=nasty),
        halves=(replace(half, compute=(replace(half.compute[0], label=nasty), *half.compute[1:])), *llama.halves[1:]),
        exposures=(exposure,),
        passes=(replace(llama.passes[0], name=nasty, text=nasty), replace(llama.passes[1], text="", skipped=(nasty,))),
        notes=(nasty,),
    )
    text = html_page(report)
    assert text.count("<script") == html_page(llama).count("<script") == text.count("</script>")
    assert "alert(1)</" not in text.replace("\\u003c/script>\\u003cscript>alert(1)\\u003c/", "")
    parsed = Page(text)
    assert parsed.texts["h1"][0].startswith(nasty)
    assert _embedded(text)["model"]["name"] == nasty


def test_diffs_show_what_each_pass_changed(llama, page):
    texts = Page(page).texts
    _, *summaries = texts["summary"]  # the first is that of the sliders
    assert summaries[0].startswith("joint: captured") and "lines" in summaries[0]
    assert any(re.match("forward: lower_shards \\+[\\d,]+ \N{MINUS SIGN}[\\d,]+ lines$", text) for text in summaries)
    assert not any(text.startswith("joint: spread_parameters") for text in summaries)
    assert any("+%unshard_0" in text for text in texts["pre"])


def _step(name: str, text: str) -> PassStep:
    return PassStep(
        graph="joint", name=name, seconds=0.1, num_nodes=3, num_collectives=0, collective_bytes=0, counts={},
        skipped=tuple(f"node_{index} stays" for index in range(50)), text=text,
    )  # fmt: skip


def test_long_graphs_are_cut_and_say_so(llama):
    """Eight passes over 12,000 long lines, of which each changes a third."""
    lines = [f"%mul_{index}: f32[8192, 4096] = mul(%view_{index}, %view_{index}) {'#' * 60}" for index in range(12000)]
    steps = []
    for number in range(8):
        steps.append(_step(f"pass_{number}", "\n".join(lines)))
        lines = [f"{line}{number}" if index % 3 == number % 3 else line for index, line in enumerate(lines)]
    began = time.process_time()
    text = html_page(replace(llama, passes=tuple(steps)))
    assert len(text.encode()) < 2_000_000
    assert time.process_time() - began < 10
    parsed = Page(text)
    assert sum(f"The first {MAX_LINES} of " in paragraph for paragraph in parsed.texts["p"]) == 8
    assert sum(item == "and 30 more" for item in parsed.texts["li"]) == 7
    assert all(block.count("%mul") <= 2 * MAX_LINES for block in parsed.texts["pre"])


def test_the_page_says_what_is_rescaled():
    fixed, planned = (html_page(inspect_linears(plan=plan)) for plan in ("unit", "auto"))
    for text in (fixed, planned):
        assert "Nothing is planned again in the browser." in text
        assert "parameters, optimizer state, gradients and the optimizer's time go with 1 / shard" in text
    assert "these are the times that inspecting with such links gives" in fixed
    assert "with others a new plan may be faster" in planned


def test_a_graph_of_ones_own_has_a_page(tmp_path):
    report = graphshard.inspect_graph(graph_with_a_gather(), hardware="h100-sxm", groups={"mine": 4})
    write_html(report, tmp_path / "graph.html")
    text = (tmp_path / "graph.html").read_text()
    parsed = Page(text)
    assert parsed.texts["h1"] == ["Graph, on 4 \N{MULTIPLICATION SIGN} h100-sxm"]
    assert "changes the size of the outermost axis" not in text
    assert [row[0] for row in parsed.tables["halves"][1:]] == ["graph"]


def test_a_step_without_collectives(llama):
    empty = replace(llama, collectives=(), exposures=(), exposed_seconds=0.0, throughput=None)
    texts = Page(html_page(empty)).texts["p"]
    assert "There are none." in texts and "Compute never waits for a collective." in texts
    assert any("none of it waiting for communication" in text for text in texts)
