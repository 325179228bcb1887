"""The pages of a report in a browser: layout, contrast, keys, and that nothing is loaded."""

import pytest
from browser import find_browser, opened_browser
from report_values import compared, read, record_step, result

from pytest_fsdp_comm.reports.html.pages import Site
from pytest_fsdp_comm.reports.html.timeline import timeline_of
from pytest_fsdp_comm.reports.html.values import RankTimeline, Run

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Contrast of each text with what is behind it: the nearest background that is not transparent.
CONTRAST = """
(() => {
  const channel = (value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = numbers(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, title")) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const drawn = element.closest("svg text");
    const bar = drawn && drawn.parentElement.querySelector("rect.bar");
    const ink = light(numbers(drawn ? style.fill : style.color));
    const paper = light(bar ? numbers(getComputedStyle(bar).fill) : behind(element));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    seen += 1;
    if (ratio < 4.5) poor.add(`${element.tagName} ${element.getAttribute("class")} ${ratio}`);
  }
  return [seen, ...poor];
})()
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The index, and pages of a small and a large model."""
    small, large = record_step(2), record_step(126, extra=3)
    timelines = tuple(
        RankTimeline(ranks=(rank,), timeline=timeline_of(record_step(2, extra=rank)))
        for rank in range(3)
    )
    results = (
        result(
            compared(small, record_step(3, extra=1), timelines=timelines),
            nodeid="tests/test_model.py::test_small[" + "very_long_name_" * 20 + "]",
            problem="E  assert " + "x" * 300,
        ),
        result(compared(record_step(126), large), nodeid="test_model.py::test_large"),
        result(outcome="passed", nodeid="test_model.py::test_other"),
    )
    site = Site(Run(tests=results, command="pytest"), read)
    directory = tmp_path_factory.mktemp("report")
    (directory / "tests").mkdir()
    files = {}
    for name, page in site.test_pages():
        file = directory / "tests" / name
        file.write_text(page, encoding="utf-8")
        files["large" if "large" in name else "other" if "other" in name else "small"] = file
    files["index"] = directory / "index.html"
    files["index"].write_text(site.index_page(), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("name", ["index", "small", "large"])
def test_pages_fit_any_width_and_are_readable_in_both_themes(browser, pages, name):
    for dark in (False, True):
        browser.show(pages[name], width=360, dark=dark)
        assert browser.complaints == []
        assert browser.requests == [pages[name].as_uri()]
        for width in (360, 768, 1600):
            browser.resize(width)
            assert browser.evaluate(OVERFLOW) == 0, width
        browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert browser.evaluate(OVERFLOW) == 0
        seen, *poor = browser.evaluate(CONTRAST)
        assert seen > 20
        assert poor == []


def test_filters_work_by_keyboard_and_say_what_is_left(browser, pages):
    browser.show(pages["small"])
    shown = (
        "document.querySelectorAll('figure:not([hidden]) [data-axis=tp]:not([data-off])').length"
    )
    output = "document.querySelector('figure:not([hidden]) output').value"
    assert browser.evaluate(shown) > 0
    browser.evaluate("document.querySelector('[data-by=axis][value=tp]').focus()")
    browser.press(" ", code=32, text=" ")
    assert browser.evaluate(shown) == 0
    browser.press(" ", code=32, text=" ")
    assert browser.evaluate(shown) > 0
    # The cursor begins at the peak, and walks over what is filtered out.
    browser.evaluate("document.querySelector('figure:not([hidden]) [data-walk]').focus()")
    browser.press("Home", code=36)
    assert browser.evaluate(output).startswith("1 of ")
    assert browser.evaluate(output).endswith(
        ": unshard of (root), forward, 8.0 KiB; 8.0 KiB gathered"
    )
    browser.press("ArrowRight", code=39)
    assert "2 of " in browser.evaluate(output)
    assert "all_gather[dp] of (root)" in browser.evaluate(output)
    browser.evaluate("document.querySelector('[data-by=phase][value=forward]').click()")
    assert ", backward, " in browser.evaluate(output)
    said = browser.evaluate(
        "document.querySelector('figure:not([hidden]) [data-walk]').ariaValueText"
    )
    assert said == browser.evaluate(output)
    assert browser.complaints == []


def test_one_timeline_is_shown_at_a_time_and_magnified(browser, pages):
    browser.show(pages["small"])
    shown = "[...document.querySelectorAll('figure')].filter(one => !one.hidden).length"
    assert browser.evaluate(shown) == 1
    browser.evaluate("document.querySelector('[data-choose]').focus()")
    browser.press("End", code=35)
    assert browser.evaluate(shown) == 3
    width = "document.querySelector('.track').clientWidth"
    before = browser.evaluate(width)
    browser.evaluate("document.querySelector('[data-zoom]').focus()")
    browser.press("End", code=35)
    assert browser.evaluate(width) > before
    assert browser.evaluate(OVERFLOW) == 0


def test_tests_are_found_by_a_part_of_their_names(browser, pages):
    browser.show(pages["index"])
    browser.evaluate("document.querySelector('[type=search]').focus()")
    for letter in "LARGE":
        browser.press(letter, code=ord(letter), text=letter)
    shown = "[...document.querySelectorAll('tbody tr')].filter(row => row.offsetHeight).length"
    assert browser.evaluate(shown) == 1
    assert browser.evaluate("document.querySelector('output').value") == "1 of 3"


def test_without_scripts_all_is_there_to_read_and_no_control_is_dead(browser, pages):
    browser.show(pages["small"], script=False)
    controls = (
        "[...document.querySelectorAll('input, select')].filter(one => one.offsetHeight).length"
    )
    assert browser.evaluate(controls) == 0
    assert (
        browser.evaluate(
            "[...document.querySelectorAll('figure')].filter(one => one.offsetHeight).length"
        )
        == 3
    )
    browser.show(pages["small"], script=True)
    assert browser.evaluate(controls) > 0
