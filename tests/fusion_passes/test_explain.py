"""The explain command on a user's model file: terminal, JSON, and the page in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from typer.testing import CliRunner, Result

from fusion_passes.cli.app import app

ROOT = Path(__file__).parents[2]
MODEL = "tests.support.user_model"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", "--device", "cpu", *arguments], env={"COLUMNS": "160"})


def test_verdicts_and_graphs_on_a_terminal() -> None:
    result = explain(f"{MODEL}:half", "--world-size", "2")
    assert result.exit_code == 0
    text = result.stdout
    assert "2 all-reduces" in text
    assert "norm_not_recognised: " in text
    assert "programs.py:" in text
    assert "1 of 2 all-reduces fused (add_norm 1); left alone: norm_not_recognised 1" in text
    assert "note: fake CPU tensors" in text
    before, after = text.split(", after")
    assert "┃ all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(" in before
    assert "┃ rsqrt" in before
    assert "┃ auto_functionalized_v2" in after
    assert "  var_mean: " in before
    assert "┃ var_mean: " not in before, "what was left alone is marked at its all-reduce only"


def test_repeated_layers_are_folded_and_graphs_can_be_left_out() -> None:
    result = explain(f"{MODEL}:twelve", "--world-size", "2")
    assert result.exit_code == 0
    assert "25 of 25 all-reduces fused (norm 1, add_norm 24); left alone: -" in result.stdout
    assert "more times the" in result.stdout
    assert result.stdout.count("┃ rsqrt") < 10
    short = explain(f"{MODEL}:half", "--no-graph")
    assert "┃ all_reduce:" not in short.stdout
    assert "all_reduce_1" in short.stdout


def test_json_and_exit_status() -> None:
    result = explain(f"{MODEL}:half", "--json", "--world-size", "4")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (data["world_size"], data["all_reduces"], data["fused"], data["missed"]) == (4, 2, 1, 1)
    assert [site["rule"] for site in data["sites"]] == ["add_norm", None]
    assert data["sites"][1]["reason"]["code"] == "norm_not_recognised"
    assert "world_size=4" in data["after"]
    assert explain(f"{MODEL}:half", "--json", "--strict").exit_code == 1
    assert explain(f"{MODEL}:llama", "--world-size", "2", "--json", "--strict").exit_code == 0
    alone = explain(f"{MODEL}:alone")
    assert alone.exit_code == 1
    assert "no all-reduce in any graph" in alone.stderr


def test_factory_in_a_file(tmp_path: Path) -> None:
    source = tmp_path / "my_own_model.py"
    source.write_text("from tests.support.user_model import half\ndef make():\n    return half()\n")
    assert json.loads(explain(f"{source}:make", "--json").stdout)["fused"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "must be MODULE:FACTORY"),
        ("no_such_module:make", "no_such_module: no such module"),
        ("no/such/file.py:make", "no/such/file.py: no such file"),
        (f"{MODEL}:no_such_function", "has no function 'no_such_function'"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    result = explain(name)
    assert result.exit_code == 2
    assert message in result.stderr


def test_factory_that_returns_no_inputs() -> None:
    result = explain(f"{MODEL}:nothing")
    assert result.exit_code == 2
    assert "must return (module, inputs)" in result.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; on Debian, apt-get install chromium")
    # No sandbox: it cannot be had by root, and the page is our own. The rest keeps the browser off the network.
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
    quiet = ["--no-first-run", "--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*flags, *quiet])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name in ("half", "deep"):
        assert explain(f"{MODEL}:{name}", "--world-size", "2", "--html", str(folder / f"{name}.html")).exit_code == 0
    return folder


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith("file:") else None)
    yield page
    page.close()
    assert problems == [], "no error in a script, and nothing fetched"


def test_page_shows_graphs_side_by_side(page: Page, pages: Path, tmp_path: Path) -> None:
    page.goto(f"file://{pages}/half.html")
    expect(page.locator("#summary")).to_contain_text("1 of 2 all-reduces fused (add_norm 1)")
    expect(page.locator("#summary")).to_contain_text("1 missed")
    before, after = page.locator(".pane").nth(0), page.locator(".pane").nth(1)
    expect(before.get_by_text("_c10d_functional.all_reduce(").first).to_be_visible()
    expect(after.get_by_text("call_trtllm_fused_allreduce_norm")).to_be_visible()
    boxes = [pane.bounding_box() for pane in (before, after)]
    assert boxes[0] and boxes[1]  # noqa: PT018
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280, "nothing sticks out"
    # The region has one colour on both sides, and another than what was left alone and what stayed.
    colours = page.evaluate(
        """() => Object.fromEntries(['.pane:nth-child(1) .fused', '.pane:nth-child(2) .fused', '.left', '.line:not(.fused, .left)']
        .map(query => [query, [...new Set([...document.querySelectorAll('.panes ' + query)].map(one => getComputedStyle(one).backgroundColor))]]))"""
    )
    was, now, left, plain = colours.values()
    assert was == now
    assert len({*was, *left, *plain}) == len(was) + len(left) + len(plain) == 3
    page.screenshot(path=tmp_path / "half.png", full_page=True)
    assert (tmp_path / "half.png").stat().st_size > 10_000


def test_page_tells_about_a_line_by_pointer_and_by_keyboard(page: Page, pages: Path) -> None:
    page.goto(f"file://{pages}/half.html")
    about = page.locator("#about")
    page.locator(".line.left").first.hover()
    expect(about).to_contain_text("norm_not_recognised: ")
    expect(about).to_contain_text("bf16[2, 8, 64]")
    expect(about).to_contain_text("programs.py:")
    page.keyboard.press("Tab")
    expect(page.locator("#only-left")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.locator(".pane").first.locator(".line").first).to_be_focused()
    for _ in range(100):
        if "rsqrt" in about.inner_text():
            break
        page.keyboard.press("ArrowDown")
    expect(about).to_contain_text("add_norm")
    page.keyboard.press("Enter")
    page.locator(".line.left").first.hover()
    expect(about).to_contain_text("rsqrt")  # pinned
    page.keyboard.press("Escape")
    page.locator(".line.left").nth(1).hover()
    expect(about).not_to_contain_text("rsqrt")


def test_page_filters_what_was_left_alone(page: Page, pages: Path) -> None:
    page.goto(f"file://{pages}/half.html")
    expect(page.locator("#sites tbody tr:visible")).to_have_count(2)
    page.get_by_label("only what was left alone").check()
    expect(page.locator("#sites tbody tr:visible")).to_have_count(1)
    expect(page.locator("#sites tbody tr:visible")).to_contain_text("norm_not_recognised")


def test_page_of_sixty_layers(page: Page, pages: Path, tmp_path: Path) -> None:
    page.goto(f"file://{pages}/deep.html")
    expect(page.locator("#sites tbody tr")).to_have_count(121)
    visible = page.evaluate("[...document.querySelectorAll('.line')].filter(line => line.checkVisibility()).length")
    every = page.locator(".line").count()
    assert visible < 800 < 6000 < every
    # A site deep inside a fold can be reached from the table.
    page.get_by_role("button", name="all_reduce_90", exact=True).click()
    for pane in page.locator(".pane").all():
        expect(pane.locator(".line.same").first).to_be_in_viewport()
    expect(page.locator("#about")).to_contain_text("layers.44.mlp.down")
    page.screenshot(path=tmp_path / "deep.png")
