"""The report: right figures, plain words, one safe file without references to anything outside."""

from __future__ import annotations

import http.server
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from anydraft.measure import bench_results, bench_stats, report
from anydraft.measure.report_svg import svg, ticks
from anydraft.measure.report_view import View, charts, views
from anydraft.measure.report_words import paragraph, reason, won
from cli_toys import Tool
from made_results import PAIRS, MadePair, made_results

EVIL = '"><script src=//evil.example/x.js></script><img src=http://evil.example/y>&${x}|`'


@pytest.fixture
def tool(monkeypatch, capsys, tmp_path) -> Tool:
    monkeypatch.chdir(tmp_path)
    return Tool(monkeypatch, capsys)


def view(pair: MadePair) -> View:
    (found,) = views(made_results((pair,)))
    return found


class Page(HTMLParser):
    """The elements of a page, with complaints about what is not closed."""

    VOID = {"meta", "link", "path", "rect", "circle", "br", "img"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# --- the page -------------------------------------------------------------------------------------


def references(page: Page) -> list[str]:
    """What a browser would fetch or run."""
    found = [tag for tag, _ in page.elements if tag in ("script", "img", "iframe", "object")]
    for tag, attributes in page.elements:
        found += [f"{tag} {n}" for n in attributes if n.startswith("on")]
        for name in ("src", "href", "srcset", "data", "poster", "action", "xlink:href"):
            value = attributes.get(name)
            if value and not value.startswith("#") and value != "data:,":
                found.append(f"{tag} {name}={value}")
    return found


def test_the_page_refers_to_nothing_outside():
    text = report.html(made_results())
    assert references(Page(text)) == []
    assert re.findall(r"url\(|@import|https?:", text) == []
    assert "default-src 'none'" in text


def test_every_string_is_escaped():
    results = made_results((MadePair(EVIL, 0.7, 0.004, 0.1, note=EVIL),))
    for entry in results["prompts"]:
        entry["kind"] = EVIL
    for run in results["runs"]:
        run["kind"] = run["kind"] + EVIL
    entry = results["pairs"][0]
    entry["target"] |= {"name": EVIL, "runtime": EVIL, "dtype": EVIL}
    entry["prediction"] |= {"quiet": False, "not_quiet": EVIL}
    results["machine"] |= {"cpu": EVIL, "gpu": EVIL, "torch": EVIL}
    results["created"] = EVIL
    page = Page(report.html(results))
    assert references(page) == []
    assert EVIL in page.text
    text = report.markdown(results)
    assert "<script" not in text
    assert "<img" not in text


def test_the_page_serves_dark_screens_narrow_ones_and_paper():
    text = report.html(made_results())
    assert "@media (prefers-color-scheme: dark)" in text
    assert "@media print" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text


def test_every_pair_has_its_charts_and_its_paragraph():
    page = Page(report.html(made_results()))
    drawings = [a for tag, a in page.elements if tag == "svg" and a.get("role") == "img"]
    assert len(drawings) == 4 * len(PAIRS) + 1  # one pair has the adaptive policy, too
    for label in ("Speed-up against K", "What verifying costs", "Acceptance", "Where a round"):
        assert sum(str(a["aria-label"]).startswith(label) for a in drawings) == len(PAIRS)
    for pair in PAIRS:
        assert pair.name in page.text
    assert "Each token is verified in a pass of its own." in page.text


def test_unfinished_and_empty_results_are_shown_as_such():
    results = made_results()
    assert "not finished" not in report.html(results)
    results["complete"] = False
    assert "not finished" in report.html(results)
    results["runs"], results["cells"] = [], []
    for text in (report.html(results), report.markdown(results)):
        assert "no finished run" in text


def test_results_without_predictions_or_drafts_are_shown():
    results = made_results((PAIRS[0],))
    results["pairs"][0]["prediction"] = None
    (found,) = views(results)
    assert [c.title for c in charts(found)][1] == "What verifying costs: v(n)"  # from the runs
    assert (
        "predicted" not in report.html(results).lower().split("<h2>words")[0].split("</style>")[1]
    )
    results["runs"] = [r for r in results["runs"] if r["contender"] == "plain"]
    assert "Plain decoding ran at" in Page(report.html(results)).text
    assert report.markdown(results)


# --- figures --------------------------------------------------------------------------------------


def test_charts_hold_the_cells_figures():
    found = view(PAIRS[0])
    speed, cost, acceptance, rounds, chosen = charts(found)
    measured = {line.name: line for line in speed.lines}
    cells = {c["num_draft_tokens"]: c for c in found.drafted()}
    assert dict(measured["measured"].points)[3.0] == cells[3]["speedup"]["geometric_mean"]
    assert measured["measured"].intervals[3.0][0] == cells[3]["speedup"]["low"]
    assert dict(measured["predicted"].points)[0.0] == 1.0
    assert measured["adaptive"].points[0][1] == pytest.approx(1.7, rel=0.05)
    curve = {line.name: dict(line.points) for line in cost.lines}
    assert curve["this target"][9.0] == pytest.approx(1 + 8 * 0.08)
    assert curve["serial"][9.0] == 9.0
    assert curve["free"][9.0] == 1.0
    assert acceptance.lines[1].points[1][1] == pytest.approx(0.75**2, abs=0.01)
    assert chosen.stacks == {"1": [25.0], "2": [0.0], "3": [75.0]}
    assert rounds.stacks["3"] == pytest.approx([30 * 1.24, 12.0, 0.5 * 40 / 40], rel=0.01)


def test_drawings_place_points_where_they_belong():
    speed = charts(view(PAIRS[0]))[0]
    drawing = svg(speed)
    found = re.findall(r"<title>measured: ([\d.]+) at (\d)</title><circle cx=\"([\d.]+)\" "
                       r"cy=\"([\d.]+)\"", drawing)  # fmt: skip
    assert len(found) == 7
    xs = [float(x) for _, _, x, _ in found]
    assert xs == sorted(xs)
    one, best = found[0], max(found, key=lambda f: float(f[0]))
    assert float(best[3]) < float(one[3])  # faster is higher up
    assert f'M50 {one[3]}H406" class="reference"' in drawing  # the line at 1


def test_axes_are_marked_with_round_numbers():
    assert ticks(0, 2.1, 5) == pytest.approx([0, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0, 83, 5)[-1] == 100
    assert ticks(0, 0.0007, 5)[-1] >= 0.0007


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "paid", "why"),
    [
        (PAIRS[0], True, ""),
        (PAIRS[1], False, "draft too slow"),
        (PAIRS[2], False, "verification serial"),
        (PAIRS[3], False, "acceptance too low"),
        (MadePair("even", 0.28, 0.005, 0.1), None, "acceptance too low"),
    ],
)
def test_the_reason_is_the_one_that_the_pair_was_made_with(pair, paid, why):
    found = view(pair)
    assert found.best is not None
    assert won(found) is paid
    assert reason(found, found.best).name == why
    start = {True: "It pays", False: "It does not pay", None: "It hardly matters"}[paid]
    assert paragraph(found).startswith(start)


def test_the_paragraph_says_how_far_the_prediction_was_off():
    text = paragraph(view(PAIRS[0]))
    assert re.search(r"was 1\.\d\d, [3-7]% too high", text)
    assert "All 21 drafted answers are token for token those of plain decoding." in text


def test_differences_are_not_hidden():
    results = made_results((PAIRS[0],))
    results["runs"][1]["identity"] = "near-tie"
    assert "20 are token for token" in paragraph(views(results)[0])
    results["runs"][2]["identity"] = "violation"
    assert "this is a bug" in paragraph(views(results)[0])
    assert "1 violation" in report.html(results)


def test_a_noisy_machine_is_said():
    results = made_results((PAIRS[0],))
    results["pairs"][0]["prediction"] |= {"quiet": False, "not_quiet": "the same pass varied"}
    assert "The machine was not quiet: the same pass varied." in paragraph(views(results)[0])


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_beside_the_results_or_where_it_is_told(tool):
    bench_results.write("r.json", made_results())
    assert tool("report", "r.json").code == 0
    assert Path("r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    ran = tool("report", "r.json", "--format", "md", "--output", "-")
    assert ran.out.startswith("# anydraft: does drafting help here?\n")
    assert "## quick draft: pays" in ran.out
    assert "| K = 3 |" in ran.out
    assert tool("report", "r.json", "--format", "csv", "--output", "t.csv").code == 0
    assert Path("t.csv").read_text().startswith("pair,")


@pytest.mark.slow
def test_a_picture_is_drawn(tool):
    pytest.importorskip("matplotlib")
    bench_results.write("r.json", made_results(PAIRS[:1]))
    ran = tool("report", "r.json", "--format", "png")
    assert ran.code == 0, ran.err
    assert Path("r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("form", "package"), [("png", "matplotlib"), ("parquet", "pyarrow")])
def test_a_missing_package_is_named_with_its_install_line(tool, monkeypatch, form, package):
    for name in (package, "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    bench_results.write("r.json", made_results())
    ran = tool("report", "r.json", "--format", form)
    assert ran.code == 2
    assert f"{package} is needed: pip install 'anydraft[report]'" in ran.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "r.json is damaged: it is not complete JSON"),
        ('{"a": 1}', "r.json is not a result file of `anydraft bench`"),
        ('{"schema": "anydraft.bench", "version": 9}', "has version 9 of the result format"),
    ],
)
def test_files_that_are_no_results_are_refused(tool, content, message):
    Path("r.json").write_text(content)
    ran = tool("report", "r.json")
    assert ran.code == 2
    assert message in ran.err
    assert not Path("r.html").exists()


def test_unknown_formats_and_missing_files_are_refused(tool):
    assert "--format must be one of html, md" in tool("report", "x", "--format", "pdf").err
    assert "cannot read absent.json" in tool("report", "absent.json").err
    bench_results.write("r.json", made_results())
    assert "goes to a file" in tool("report", "r.json", "--format", "csv", "--output", "-").err
    assert tool("report", "r.json", "--output", "no/where.html").code == 4


# --- in a browser ---------------------------------------------------------------------------------


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The folder on a local port; what is asked of it is noted."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, directory=str(folder), **named)

        def log_message(self, format: str, *arguments: Any) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def opened(folder: Path, page: str) -> tuple[list[str], list[str]]:
    """Open a page in Chromium: lines of its console, and what was asked of any server."""
    with served(folder) as (address, asked):
        done = subprocess.run(
            [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
             "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
             f"--log-net-log={folder / 'net.json'}", f"--screenshot={folder / 'page.png'}",
             "--window-size=900,1200", f"{address}/{page}"],
            capture_output=True, text=True, timeout=90, check=True,
        )  # fmt: skip
    assert (folder / "page.png").stat().st_size > 5_000
    log = (folder / "net.json").read_text()  # the browser's own requests are in it, too
    by_page = re.findall(rf'"initiator":"{address}"', log)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return console, asked[1:] + by_page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_opens_the_page_without_error_or_request(tmp_path):
    results = made_results()
    results["pairs"][0]["note"] = EVIL
    (tmp_path / "r.html").write_text(report.html(results), encoding="utf-8")
    assert opened(tmp_path, "r.html") == ([], [])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_browser_would_have_said_so(tmp_path):
    bad = "<!doctype html><p>Bad</p><img src='x.png'><script>throw Error('seen')</script>"
    (tmp_path / "bad.html").write_text(bad, encoding="utf-8")
    console, requests = opened(tmp_path, "bad.html")
    assert "seen" in " ".join(console)
    assert "/x.png" in requests


def test_cells_in_the_file_are_those_of_its_runs():
    results = made_results()
    assert results["cells"] == bench_stats.summarise(results["runs"])
