"""The page in a headless Chromium: its arithmetic, its charts, input of all kinds, phone and desktop."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from support.chromium import PATH, Chromium
from support.cost_cards import round_card
from support.inspected import graph_with_a_gather, inspect_linears, inspect_llama, measured_card
from support.replayed import at_mesh, neutral, replay, with_links

import graphshard
from graphshard.report.html import write_html

pytestmark = pytest.mark.skipif(PATH is None, reason="Chromium is not installed (apt install chromium)")

ROOT = Path(__file__).parents[2]
ARTEFACTS = ROOT / "tests" / "artefacts"
PHONE, DESKTOP = (390, 844), (1280, 900)


@pytest.fixture(scope="module")
def llama():
    return inspect_llama(micro_batches=2)


@pytest.fixture(scope="module")
def page(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(llama, path)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Chromium(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_both_windows_in_both_schemes(browser, page, size, dark):
    browser.open(page, *size, dark=dark)
    data = browser.data()
    assert data["state"] == "ready" and "errors" not in data and browser.problems() == []
    assert (data["width"], data["overflow"]) == (str(size[0]), "0")
    ARTEFACTS.mkdir(exist_ok=True)
    path = ARTEFACTS / f"inspect-{size[0]}-{'dark' if dark else 'light'}.png"
    browser.screenshot(path)
    with Image.open(path) as shot:
        assert shot.width == size[0] and shot.height > 2000
        colours = shot.convert("RGB").getcolors(shot.width * shot.height)
        ground = max(colours)[1]
        assert len(colours) > 200 and max(colours)[0] < 0.95 * shot.width * shot.height
        assert (sum(ground) < 3 * 60) == dark
    for canvas in ("timeline", "memory"):
        assert _num_colours(browser, canvas) > 4


def test_the_script_of_the_docs_picture(browser, page, tmp_path):
    """It draws what the browser above sees in a window of this size."""
    script = ROOT / "benchmarks" / "draw_inspect_page.py"
    command = [sys.executable, script, page, "--out", tmp_path / "page.png", "--width", "900", "--height", "700"]
    subprocess.run(command, check=True, timeout=120)
    browser.open(page, 900, 700)
    browser.screenshot(tmp_path / "expected.png", whole=False)
    with Image.open(tmp_path / "page.png") as drawn, Image.open(tmp_path / "expected.png") as expected:
        assert drawn.size == (900, 700)
        difference = ImageChops.difference(drawn.convert("L"), expected.convert("L"))
        assert sum(difference.histogram()[48:]) < 0.01 * 900 * 700


def test_text_columns_lie_apart_from_numbers_and_to_the_left(browser, page):
    browser.open(page, *DESKTOP)
    cell = "document.querySelector('#{table} tbody tr').cells[{index}]"
    for table, index in (("passes-table", 6), ("collectives-table", 2)):
        style = f"getComputedStyle({cell.format(table=table, index=index)})"
        assert browser.run(f"{style}.textAlign") == "left"
        assert float(browser.run(f"parseFloat({style}.paddingLeft)")) >= 12


def _num_colours(browser, canvas):
    """Colours that cover at least twenty pixels of a canvas."""
    return browser.run(f"""(() => {{
        const canvas = document.getElementById("{canvas}");
        const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const pixels = new Uint32Array(image.data.buffer);
        const counts = new Map();
        for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
        return [...counts.values()].filter((count) => count >= 20).length;
    }})()""")


@pytest.mark.parametrize(
    ("plan", "overlapped", "spread"),
    [("unit", 0.0, 0.0), ("unit", 5e-6, 4e-5), pytest.param("auto", 0.0, 0.0, marks=pytest.mark.slow)],
)
def test_neutral_sliders_give_the_reports_time(browser, tmp_path, plan, overlapped, spread):
    card = round_card(overlapped_latency_seconds=overlapped, collective_spread_seconds=spread)
    report = inspect_llama(plan=plan, micro_batches=3, hardware=card)
    write_html(report, tmp_path / "page.html")
    browser.open(tmp_path / "page.html", *DESKTOP)
    data = browser.data()
    for name in ("neutralSeconds", "stepSeconds"):
        assert float(data[name]) == pytest.approx(report.step_seconds, rel=1e-12)
    assert float(data["exposedSeconds"]) == pytest.approx(report.exposed_seconds, rel=1e-12)
    assert float(data["peakBytes"]) == report.memory.peak_bytes


@pytest.mark.parametrize(("bandwidth", "latency"), [(1.0, 1.0), (0.25, 4.0), (16.0, 0.125)])
def test_sliders_of_links_where_transfers_overlap(browser, tmp_path, bandwidth, latency):
    report = inspect_llama(micro_batches=2, hardware=measured_card())
    write_html(report, tmp_path / "page.html")
    browser.open(tmp_path / "page.html", *DESKTOP, fragment=f"bandwidth={bandwidth}&latency={latency}")
    step, exposed = replay(report, neutral(report), bandwidth=bandwidth, latency=latency)
    data = browser.data()
    assert float(data["stepSeconds"]) == pytest.approx(step, rel=1e-12)
    assert float(data["exposedSeconds"]) == pytest.approx(exposed, rel=1e-12)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.25, 4.0), (16.0, 0.125)])
def test_sliders_of_links_give_what_inspecting_with_them_gives(browser, llama, page, bandwidth, latency):
    again = inspect_llama(micro_batches=2, hardware=with_links(round_card(), bandwidth, latency))
    browser.open(page, *DESKTOP, fragment=f"bandwidth={bandwidth}&latency={latency}")
    data = browser.data()
    assert float(data["stepSeconds"]) == pytest.approx(again.step_seconds, rel=1e-9)
    assert float(data["exposedSeconds"]) == pytest.approx(again.exposed_seconds, rel=1e-9)
    assert float(data["neutralSeconds"]) == pytest.approx(llama.step_seconds, rel=1e-12)
    assert browser.run("document.getElementById('moved').hidden") is False


def test_the_slider_of_devices(browser, llama, page):
    step, exposed = replay(llama, at_mesh(llama, {"shard": 64}), shard_factor=1 / 8)
    browser.open(page, *DESKTOP, fragment="devices=64")
    data = browser.data()
    assert float(data["stepSeconds"]) == pytest.approx(step, rel=1e-12)
    assert float(data["exposedSeconds"]) == pytest.approx(exposed, rel=1e-12)
    rows = _rows(browser, "compare")
    expected = round(64 * 2 * llama.throughput.tokens / step)
    assert rows["Tokens/s in all"][1] == f"{expected:,}"
    shards = sum(llama.memory.categories[name] for name in ("parameters", "optimizer", "gradients"))
    at_peak = llama.memory.peak_bytes - shards * 7 / 8
    assert at_peak <= float(data["peakBytes"]) < llama.memory.peak_bytes


def test_ranks_that_share_a_batch_count_its_tokens_once(browser, tmp_path):
    report = inspect_llama(mesh={"shard": 2, "tp": 2}, placements="llama")
    write_html(report, tmp_path / "page.html")
    browser.open(tmp_path / "page.html", *DESKTOP)
    rows = _rows(browser, "compare")
    for name, ranks in (("Tokens/s in all", 4), ("Tokens/s a rank", 1)):
        expected = f"{round(ranks * report.throughput.tokens_per_second_per_rank):,}"
        assert rows[name][:2] == [expected, expected]


def test_the_slider_of_devices_where_axes_have_names_of_their_own(browser, llama, tmp_path):
    """As in the report of a sharded model."""
    worlds = tuple(replace(world, mesh={"dp": world.num_ranks}) for world in llama.worlds)
    write_html(replace(llama, mesh={"dp": 8}, worlds=worlds), tmp_path / "page.html")
    browser.open(tmp_path / "page.html", *DESKTOP, fragment="devices=64")
    step, _ = replay(llama, at_mesh(llama, {"shard": 64}), shard_factor=1 / 8)
    assert float(browser.data()["stepSeconds"]) == pytest.approx(step, rel=1e-12)
    assert float(browser.data()["peakBytes"]) < llama.memory.peak_bytes


def _rows(browser, table):
    """First cell to the texts of the others."""
    texts = "[...row.cells].map((cell) => cell.textContent)"
    rows = browser.run(f"[...document.querySelectorAll('#{table} tbody tr')].map((row) => {texts})")
    return {row[0]: row[1:] for row in rows}


def _move(browser, slider, value):
    browser.run(f"""(() => {{
        const slider = document.getElementById("{slider}");
        slider.value = "{value}";
        slider.dispatchEvent(new Event("input", {{ bubbles: true }}));
    }})()""")


def test_sliders_and_the_way_back(browser, llama, page):
    browser.open(page, *DESKTOP)
    budget = "document.querySelector('[name=budget-out]').value"
    assert "fits, " in browser.run(budget)
    _move(browser, "budget", 100)
    assert "does not fit" in browser.run(budget)
    assert float(browser.data()["stepSeconds"]) == pytest.approx(llama.step_seconds, rel=1e-12)
    assert browser.run("document.getElementById('moved').hidden") is True
    _move(browser, "bandwidth", -60)
    step, _ = replay(llama, neutral(llama), bandwidth=2.0**-3)
    assert float(browser.data()["stepSeconds"]) == pytest.approx(step, rel=1e-12)
    assert _rows(browser, "compare")["Step"][2] == f"\N{MULTIPLICATION SIGN}{step / llama.step_seconds:.2f}"
    _move(browser, "bandwidth", -20)
    step, _ = replay(llama, neutral(llama), bandwidth=0.5)
    assert _rows(browser, "compare")["Step"][2] == f"+{100 * (step / llama.step_seconds - 1):.1f} %"
    browser.run("document.getElementById('moved-reset').click()")
    assert float(browser.data()["stepSeconds"]) == pytest.approx(llama.step_seconds, rel=1e-12)
    assert _rows(browser, "compare")["Step"][2] == "" and "fits, " in browser.run(budget)


def test_drawn_events_are_those_of_the_report(browser, llama, page):
    """With neutral sliders every stretch, wait and collective lies where the report has it."""
    browser.open(page, *DESKTOP)
    layout = browser.run("""(() => {
        const { stretches, waits, flights, memory, peak } = page.shown().layout;
        const ends = (all) => all.map((one) => [one.start, one.end]);
        return { stretches: ends(stretches), waits: ends(waits), flights: ends(flights), memory, peak };
    })()""")
    begin, stretches, waits, flights, points = 0.0, [], [], [], []
    for half in llama.halves:
        for event in half.compute:
            found = waits if event.kind == "wait" else stretches
            found.append([begin + event.start, begin + event.start + event.seconds])
        flights += [[begin + one.began, begin + one.finished] for one in half.collectives]
        points += [(begin + point.seconds, point.total_bytes) for point in half.memory]
        begin += half.seconds
    for name, expected in (("stretches", stretches), ("waits", waits), ("flights", flights)):
        assert len(layout[name]) == len(expected)
        for one, other in zip(layout[name], expected, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-15)
    assert [point["at"] for point in layout["memory"]] == pytest.approx([at for at, _ in points], abs=1e-15)
    assert [point["total"] for point in layout["memory"]] == [total for _, total in points]
    assert layout["peak"] == llama.memory.peak_bytes


def test_slow_links_cut_stretches_where_waits_appear(browser, page, llama):
    """What is drawn still adds up: no overlap on the stream, and nothing is lost."""
    browser.open(page, *DESKTOP, fragment="bandwidth=0.05")
    layout = browser.run("page.shown().layout")
    stream = sorted((one["start"], one["end"]) for one in (*layout["stretches"], *layout["waits"]))
    assert len(layout["waits"]) > sum(event.kind == "wait" for half in llama.halves for event in half.compute)
    at = 0.0
    for start, end in stream:
        assert start == pytest.approx(at, rel=1e-6, abs=1e-12)
        at = end
    assert at == pytest.approx(layout["seconds"])


def test_pointer_wheel_and_buttons(browser, page):
    browser.open(page, *DESKTOP)
    browser.run("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    box = browser.run("document.getElementById('timeline').getBoundingClientRect().toJSON()")
    x, y = box["x"] + box["width"] / 2, box["y"] + 80
    window = "[page.view.start, page.view.end, page.view.total]"
    _, _, total = browser.run(window)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    browser.settle()
    assert browser.run(window) == [0, total, total], "the page scrolls while the chart has no focus"
    browser.run("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseReleased", x, y, button="left", clickCount=1)
    assert "takes" in browser.run("document.getElementById('detail').textContent")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    browser.settle()
    start, end, _ = browser.run(window)
    assert 0 < start < total / 2 < end < total and end - start == pytest.approx(total / 2.718281828, rel=1e-6)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    for step in range(1, 6):
        browser.mouse("mouseMoved", x - 20 * step, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    moved, _, _ = browser.run(window)
    assert moved > start
    browser.run("document.getElementById('whole').click()")
    assert browser.run(window) == [0, total, total]
    for button, check in (("zoom-in", lambda s, e: e - s < total), ("pan-right", lambda s, e: s > 0)):
        browser.run(f"document.getElementById('{button}').click()")
        assert check(*browser.run(window)[:2])


def test_hovering_and_keys_explain_exposed_waits(browser, llama, page):
    browser.open(page, *DESKTOP)
    browser.run("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    browser.run("document.getElementById('timeline').focus()")
    exposed = [one for half in llama.halves for one in half.collectives if one.exposed_seconds]
    assert len(exposed) > 2
    detail = "document.getElementById('detail').textContent"
    for one in exposed:
        browser.press("n", "n")
        assert one.reason in browser.run(detail) and one.remedy in browser.run(detail)
    browser.press("p", "p")
    assert exposed[-2].remedy in browser.run(detail)
    browser.press("0", "0")
    assert browser.run("[page.view.start, page.view.end === page.view.total]") == [0, True]
    for key in ("ArrowUp", "ArrowUp", "ArrowRight"):
        browser.press(key)
    assert browser.run("page.view.start") > 0
    browser.press("Home")
    box = browser.run("document.getElementById('timeline').getBoundingClientRect().toJSON()")
    lane = browser.run("page.timeline.lanes[0]")
    browser.mouse("mouseMoved", box["x"] + 2, box["y"] + (lane["top"] + lane["bottom"]) / 2)
    browser.settle()
    tip = browser.run("[document.getElementById('tooltip').hidden, document.getElementById('tooltip').textContent]")
    assert tip[0] is False and exposed[0].reason in tip[1] and exposed[0].remedy in tip[1]


def test_fingers_pinch_and_tap(browser, page):
    browser.open(page, *PHONE)
    browser.run("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    browser.send("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
    box = browser.run("document.getElementById('timeline').getBoundingClientRect().toJSON()")
    x, y = box["x"] + box["width"] / 2, box["y"] + 85

    def touch(kind, *places):
        points = [{"x": at, "y": y, "id": number} for number, at in enumerate(places)]
        browser.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    touch("touchStart", x - 20, x + 20)
    for step in range(1, 9):
        touch("touchMove", x - 20 - 10 * step, x + 20 + 10 * step)
    touch("touchEnd")
    browser.settle()
    share = browser.run("(page.view.end - page.view.start) / page.view.total")
    assert 0.1 < share < 0.5
    touch("touchStart", x)
    touch("touchEnd")
    browser.settle()
    assert "takes" in browser.run("document.getElementById('detail').textContent")
    browser.send("Emulation.setTouchEmulationEnabled", enabled=False)


def test_tables_sort(browser, llama, page):
    browser.open(page, *DESKTOP)
    rows = "[...document.querySelectorAll('#collectives-table tbody tr')]"
    column = f"{rows}.map((row) => Number(row.cells[4].dataset.value))"
    sizes = [one.num_bytes for one in llama.collectives]
    assert browser.run(column) == sizes
    press = "document.querySelectorAll('#collectives-table thead button')[4].click()"
    browser.run(press)
    assert browser.run(column) == sorted(sizes, reverse=True)
    browser.run(press)
    assert browser.run(column) == sorted(sizes)
    state = "document.querySelectorAll('#collectives-table thead th')[4].getAttribute('aria-sort')"
    assert browser.run(state) == "ascending"


@pytest.mark.parametrize("table", ["collectives-table", "halves"])
def test_on_a_phone_exposed_time_is_in_view(browser, page, table):
    browser.open(page, *PHONE)
    heads = f"[...document.querySelectorAll('#{table} thead th')]"
    assert browser.run(f"{heads}[1].textContent").startswith("Exposed")
    assert 0 < browser.run(f"{heads}[1].getBoundingClientRect().right") <= PHONE[0]


def test_everything_is_reached_by_tab(browser, page):
    browser.open(page, *DESKTOP)
    reached = set()
    for _ in range(120):
        browser.press("Tab")
        identity = browser.run("document.activeElement.id || document.activeElement.tagName")
        if identity == "BODY":
            break
        reached.add(identity)
    assert {"zoom-in", "exposed-next", "timeline", "memory", "bandwidth", "devices", "budget", "SUMMARY"} <= reached


def test_budgets_of_a_link_and_of_the_report(browser, tmp_path):
    report = inspect_llama(memory_budget="1MiB")
    write_html(report, tmp_path / "page.html")
    out = "document.querySelector('[name=budget-out]').value"
    browser.open(tmp_path / "page.html", *DESKTOP)
    assert browser.run(out).startswith("1.00 MiB a rank: fits, ")
    browser.open(tmp_path / "page.html", *DESKTOP, fragment=f"budget={report.memory.peak_bytes / 2**31}")
    assert "does not fit" in browser.run(out)
    browser.open(tmp_path / "page.html", *DESKTOP, fragment=f"budget={1.01 * report.memory.peak_bytes / 2**30}")
    assert "fits, " in browser.run(out)


def test_text_has_contrast(browser, page):
    """At least 4.5 to 1 for text on cards, in both schemes (WCAG 2.2, 1.4.3)."""
    script = """(() => {
        const light = (hex) => {
            const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
            const linear = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
        };
        const root = getComputedStyle(document.documentElement);
        const of = (name) => light(root.getPropertyValue(`--${name}`).trim());
        const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const pairs = ["ink", "muted", "good", "bad", "exposed", "accent"].map((name) => [name, "card"]);
        pairs.push(["muted", "page"], ["on-exposed", "exposed"], ["muted", "lane"]);
        for (const name of ["page", "added", "removed", "band"]) pairs.push(["ink", name]);
        for (const name of ["compute", "compute-other", "gather", "reduce", "allreduce", "collective"]) {
            pairs.push(["on-compute", name]);
        }
        return Object.fromEntries(pairs.map(([one, other]) => [`${one} on ${other}`, ratio(of(one), of(other))]));
    })()"""
    for dark in (False, True):
        browser.open(page, *DESKTOP, dark=dark)
        ratios = browser.run(script)
        assert not {name: ratio for name, ratio in ratios.items() if ratio < 4.5}


def test_a_failing_script_is_shown_and_reported(browser, page, tmp_path):
    """The checks above would see an error: this page has one."""
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace('"schema_version":1', '"schema_version":1,"halves":3,"ignored":1', 1)
                      .replace('"halves":[', '"hidden":[', 1))  # fmt: skip
    browser.open(broken, *DESKTOP)
    assert "script failed" in browser.data()["errors"] and browser.problems()
    assert browser.run("document.getElementById('errors').hidden") is False


@pytest.mark.parametrize("which", ["own graph", "one rank", "no collectives", "two axes"])
def test_unusual_reports_have_a_page_that_works(browser, tmp_path, which):
    if which == "own graph":
        report = graphshard.inspect_graph(graph_with_a_gather(), hardware=round_card())
    elif which == "one rank":
        report = inspect_linears(mesh={"shard": 1})
    elif which == "two axes":
        report = inspect_linears(mesh={"replicate": 2, "shard": 4})
    else:
        whole = inspect_linears()
        halves = [replace(half, collectives=(), schedule=(), compute=tuple(e for e in half.compute if e.kind != "wait"),
                          seconds=half.compute_seconds, exposed_seconds=0.0) for half in whole.halves]  # fmt: skip
        seconds = sum(half.seconds for half in halves)
        report = replace(whole, halves=tuple(halves), collectives=(), exposures=(), step_seconds=seconds)
        report = replace(report, throughput=None)
    write_html(report, tmp_path / "page.html")
    browser.open(tmp_path / "page.html", *PHONE, fragment="bandwidth=0.5")
    data = browser.data()
    assert data["state"] == "ready" and browser.problems() == [] and data["overflow"] == "0"
    assert float(data["neutralSeconds"]) == pytest.approx(report.step_seconds, rel=1e-9)
