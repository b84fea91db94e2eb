"""The page: whole, self-contained, escaped, and true to the plan."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from lowtide.base.messages import bytes_text
from lowtide.ir.graph import Graph, Kind, Storage
from lowtide.plan.plan import Plan
from lowtide.report import page, save
from tests.graphs import array
from tests.planned import PROVENANCE, chain, plan_of

EVIL = "</script><script>alert('x')</script>"
MOST_BYTES = 5 * 2**20  # of the page of a plan of 5,000 operators


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text within scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.found[-1] if self.found else ("", {})
        if tag == "script":
            self.texts.setdefault(attributes.get("id") or "code", data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.found if found == tag]


def data_of(text: str) -> dict[str, Any]:
    """What the page's script reads."""
    found: dict[str, Any] = json.loads(Elements(text).texts["data"])
    return found


@pytest.fixture(scope="module")
def limited() -> Plan:
    return plan_of(chain(24), memory_bytes=12 * 4096)


def test_the_figures_are_the_plans(limited: Plan) -> None:
    text = page(limited)
    report = limited.cost_report
    assert report is not None
    assert report.evictions
    for nbytes in (limited.peak_bytes, limited.eager_peak_bytes, limited.resident_bytes, limited.lower_bound_bytes):
        assert f"<strong>{bytes_text(nbytes)}</strong>" in text
    data = data_of(text)
    assert max(footprint for _, _, footprint in data["steps"]) == limited.peak_bytes
    assert (len(data["steps"]), len(data["at"])) == (len(limited.order), len(limited.order) + 1)
    assert sum(data["at"]) == 10_000
    for step, (_, _, footprint) in enumerate(data["steps"]):
        assert sum(nbytes for _, nbytes, _, _, _, start, end in data["tensors"] if start <= step < end) == footprint


def test_it_asks_no_network_and_runs_no_code_but_its_own(limited: Plan) -> None:
    elements = Elements(page(limited))
    assert not [attributes for _, attributes in elements.found if attributes.keys() & {"src", "href", "action", "onclick", "onload"}]
    policy = next(attributes["content"] for attributes in elements.of("meta") if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert len(elements.of("script")) == 2
    assert "innerHTML" not in elements.texts["code"]


def test_names_are_escaped_wherever_they_stand() -> None:
    plan = plan_of(chain(8, module=EVIL), memory_bytes=7 * 4096)
    text = page(replace(plan, provenance=replace(PROVENANCE, device=EVIL)), title=EVIL)
    elements = Elements(text)
    assert EVIL not in text
    assert len(elements.of("script")) == 2
    assert any(EVIL in str(step) for step in data_of(text)["steps"])  # the data have the name itself


def test_what_a_picture_shows_stands_in_words_too(limited: Plan) -> None:
    elements = Elements(page(limited))
    charts = [attributes for attributes in elements.of("div") if attributes.get("role") == "img"]
    assert len(charts) == 4  # lowtide, eager, what memory buys, addresses
    assert all(attributes["aria-label"] for attributes in charts)
    assert all(attributes.get("aria-hidden") == "true" for attributes in elements.of("svg"))
    assert all(attributes.get("tabindex") == "0" for attributes in elements.of("div") if "scroll" in (attributes.get("class") or ""))
    assert [attributes["for"] for attributes in elements.of("label")] == ["step"]


def test_the_same_plan_gives_the_same_page(limited: Plan) -> None:
    assert page(limited) == page(limited) == page(Plan.from_json(limited.to_json()))


def test_a_plan_without_a_limit_or_without_steps_has_a_page_too() -> None:
    assert "What memory buys" not in page(plan_of(chain(6)))
    x = array(Storage("x", 64, "cpu", Kind.INPUT))
    assert "Memory over one step" in page(plan_of(Graph((x,), (), (x,))))


def test_a_large_plan_is_a_small_page(tmp_path: Path) -> None:
    save(plan_of(chain(5_000)), tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size <= MOST_BYTES


BROWSER = shutil.which("chromium")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def shown(text: str, folder: Path, *options: str) -> str:
    """What a browser makes of a page."""
    (folder / "plan.html").write_text(text, encoding="utf-8")
    command = [
        str(BROWSER),
        "--headless",
        *QUIET,
        f"--user-data-dir={folder / 'browser'}",
        *options,
        "--dump-dom",
        f"file://{folder}/plan.html",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_the_script_runs_in_a_browser(limited: Plan, tmp_path: Path) -> None:
    text = shown(page(limited), tmp_path)
    assert limited.peak is not None
    assert f"step {limited.peak.step} of {len(limited.order)}: make" in text
    assert 'id="asking" hidden' not in text


@pytest.mark.skipif(BROWSER is None, reason="no browser")
@pytest.mark.parametrize("width", [500, 1400])
def test_nothing_reaches_over_the_side_of_the_window(limited: Plan, tmp_path: Path, width: int) -> None:
    measure = "<script>document.title = document.documentElement.scrollWidth - document.documentElement.clientWidth</script>"
    text = shown(page(limited).replace("</body>", f"{measure}</body>"), tmp_path, f"--window-size={width},800")
    assert "<title>0</title>" in text


def inked(folder: Path, name: str, *options: str) -> list[list[bool]]:
    """By row, then by column of a screenshot: whether there is something other than the ground."""
    shot = folder / f"{name}.png"
    shown(
        (folder / "plan.html").read_text(encoding="utf-8"),
        folder,
        "--hide-scrollbars",
        "--window-size=500,2400",
        *options,
        f"--screenshot={shot}",
    )
    differs = np.abs(imread(shot)[:, :, :3] - imread(shot)[:1, :1, :3]).sum(2) > 0.1
    return [differs.any(axis).tolist() for axis in (1, 0)]


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_light_and_dark_are_laid_out_alike(limited: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.html").write_text(page(limited), encoding="utf-8")
    light, dark = inked(tmp_path, "light"), inked(tmp_path, "dark", "--force-dark-mode")
    assert light == dark
    assert imread(tmp_path / "light.png").mean() > 0.8 > 0.3 > imread(tmp_path / "dark.png")[:, :, :3].mean()
    assert 0.3 < sum(light[0]) / len(light[0]) < 1


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_what_is_printed_is_not_cut_off(limited: Plan, tmp_path: Path) -> None:
    """As the printer's rules lay it out on a sheet: long names and lines are broken."""
    text = page(limited).replace("@media print", "@media all").replace('<pre class="scroll" tabindex="0">', f"<pre>{'x' * 500}")
    measure = "<script>document.title = document.documentElement.scrollWidth - document.documentElement.clientWidth</script>"
    text = text.replace("<td>", f"<td>{'a_long_name' * 4}", 1)
    assert "<title>0</title>" in shown(text.replace("</body>", f"{measure}</body>"), tmp_path, "--window-size=700,800")
