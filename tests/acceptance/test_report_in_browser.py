"""The pages of a report in a browser: layout, contrast and keys, without network requests."""

from dataclasses import replace

import pytest
from browser import find_browser, opened_browser
from report_values import (
    KIB,
    compared,
    failure_of,
    profile_of,
    read,
    record_step,
    result,
    stack,
    with_overlap,
)

from pytest_fsdp_comm.reports.html.pages import render_pages, render_tree_page
from pytest_fsdp_comm.reports.html.values import Run, timeline_of
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.text.words import show_nbytes

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
    const [ink, paper] = [light(numbers(style.color)), light(behind(element))];
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
    timelines = tuple(timeline_of(record_step(2, extra=rank, rank=rank)) for rank in range(3))
    results = (
        result(
            compared(small, record_step(3, extra=1), timelines=timelines),
            nodeid="tests/test_model.py::test_small[" + "very_long_name_" * 20 + "]",
            problem="E  assert " + "x" * 300,
        ),
        result(compared(record_step(126), large), nodeid="test_model.py::test_large"),
        result(outcome="passed", nodeid="test_model.py::test_other"),
    )
    directory = tmp_path_factory.mktemp("report")
    (directory / "tests").mkdir()
    files = {}
    for path, page in render_pages(Run(tests=results, command="pytest"), read):
        file = directory / path
        file.write_text(page, encoding="utf-8")
        names = ("large", "other", "small", "index")
        files[next(name for name in names if name in path)] = file
    return files


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("name", ["index", "small", "large"])
def test_pages_fit_any_width_in_both_themes(browser, pages, name):
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


# What is shown of tables, by table, with the edges of its box.
CELLS = """
[...document.querySelectorAll('.stacked :is(td, th), .cost .n')].filter(one => one.offsetWidth
  && !one.closest('thead')).map(one => {
    const { left, right } = one.getBoundingClientRect();
    return [one.closest('table').className.split(' ')[0], one.innerText, left, right];
  })
"""


def test_all_that_tables_tell_is_on_a_small_screen(browser, pages, tmp_path):
    tree, ranks = tmp_path / "tree.html", tmp_path / "ranks.html"
    tree.write_text(render_tree_page(stack(odd=7)), encoding="utf-8")
    unlike = profile_of(*(record_step(2, extra=rank, rank=rank) for rank in range(4)))
    differing = replace(compared(record_step(2), record_step(3)), new=format_profile(unlike))
    (_, page), _ = render_pages(Run(tests=(result(differing),)), read)
    ranks.write_text(page, encoding="utf-8")
    cells = []
    for page in (pages["large"], ranks, tree):
        browser.show(page, width=360)
        browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        cells += browser.evaluate(CELLS)
    assert {name for name, *_ in cells} == {"cost", "sides", "list", "modules", "shards"}
    assert [cell for cell in cells if cell[1] and (cell[2] < 0 or cell[3] > 360)] == []


# The edges of what stays in view of the modules' table, as it is scrolled in a narrow box.
SCROLLED = """
(() => {
  const box = document.querySelector('.modules').parentElement;
  Object.assign(box.style, { width: '400px', maxHeight: '150px' });
  box.scrollTo(80, 120);
  const heads = [...box.querySelectorAll('thead th')];
  const edge = (element, name) => Math.round(element.getBoundingClientRect()[name]);
  const last = [...box.querySelectorAll('tbody tr')].at(-1);
  return {
    scrolled: [box.scrollLeft, box.scrollTop],
    left: [box, heads[0], last.firstElementChild].map(one => edge(one, 'left')),
    top: [box, ...heads].map(one => edge(one, 'top')),
    right: heads.map((head, at) => [head, last.children[at]].map(one => edge(one, 'right'))),
    heads: heads.map(head => head.innerText.split(/\\s+/).join(' ')),
  };
})()
"""


def test_headings_and_names_of_modules_stay_in_view(browser, pages):
    browser.show(pages["large"])
    seen = browser.evaluate(SCROLLED)
    assert seen["scrolled"] == [80, 120]
    assert seen["heads"] == ["Module", "dp forward", "dp backward", "tp forward"]
    assert len(set(seen["left"])) == 1
    assert len(set(seen["top"])) == 1
    assert all(head == cell for head, cell in seen["right"])


@pytest.fixture
def draw(browser, tmp_path):
    """Shows the timeline of a recording beside a snapshot; returns what reads the drawing."""

    def show(old, new):
        (_, page), _ = render_pages(Run(tests=(result(compared(old, new)),)), read)
        file = tmp_path / "page.html"
        file.write_text(page, encoding="utf-8")
        browser.show(file)
        assert browser.complaints == []
        return browser.evaluate

    return show


TEXTS = "[...document.querySelectorAll('{}')].map(one => one.textContent)"
BARS = """
[...document.querySelectorAll('.units .bar')].map(
  one => [one.title.split(':')[0], one.dataset.phase, Math.round(parseFloat(one.style.top) / 22)]
)
"""
STROKES = """
[...document.querySelectorAll('.axis')].map(one => [
  one.dataset.axis,
  ...['gather', 'scatter', 'reduce', 'other'].map(name =>
    [...one.querySelectorAll('.' + name)].map(path => path.getAttribute('d')).join('')
      .split('M').length - 1),
])
"""


def test_timeline_draws_units_collectives_and_peak(draw):
    evaluate = draw(record_step(3), record_step(3))
    # Before the peak: 2 of the root, 4 of each layer, 2 of the last one in backward.
    assert evaluate(TEXTS.format("figcaption")) == [
        "Ranks 0-3 27 events; peak 16.0 KiB at event 17 of 27, unshard of layers.1 in backward"
    ]
    # The root throughout; forward one layer at a time; backward two at a time.
    assert evaluate(BARS) == [
        ["(root), 8.0 KiB", "forward", 0],
        *([f"layers.{layer}, 4.0 KiB", "forward", 1] for layer in range(3)),
        ["layers.2, 4.0 KiB", "backward", 1],
        ["layers.1, 4.0 KiB", "backward", 2],
        ["layers.0, 4.0 KiB", "backward", 1],
    ]
    assert evaluate(TEXTS.format(".span")) == ["forward", "backward"]
    assert evaluate(TEXTS.format(".memory .peak, .memory .grid")) == ["8.0 KiB", "peak 16.0 KiB"]
    # 4 all-gathers in forward and 3 in backward, which reduces 3 times; an all-reduce a layer.
    assert evaluate(STROKES) == [["dp", 7, 3, 0, 0], ["tp", 0, 0, 3, 0]]
    assert evaluate(TEXTS.format(".axis .cap")) == [
        "dp 10 collectives, 44.0 KiB",
        "tp 3 collectives, 1.5 KiB",
    ]


def test_timeline_marks_exposed_calls_and_host_waits(draw):
    recording = with_overlap(record_step(3))
    evaluate = draw(recording, recording)
    assert evaluate(TEXTS.format(".axis .cap")) == [
        "dp 10 collectives, 44.0 KiB; 4 exposed, 20.0 KiB",
        "tp 3 collectives, 1.5 KiB",
        "host waits for the GPU 3 times",
    ]
    assert evaluate(STROKES)[:2] == [["dp", 7, 3, 0, 0], ["tp", 0, 0, 3, 0]]
    colors = (
        "new Set([...document.querySelectorAll('{}')].map(one => getComputedStyle(one).stroke))"
    )
    colors = f"[...{colors}]"
    (exposed,) = evaluate(colors.format(".stroke.exposed"))
    assert evaluate(colors.format(".dot")) == [exposed]
    others = evaluate(colors.format(".stroke:not(.exposed)"))
    assert exposed not in others
    count = (
        "[...document.querySelectorAll('{}')].map(one => one.getAttribute('d')).join('')"
        ".split('M').length - 1"
    )
    assert evaluate(count.format(".dot")) == 4
    assert evaluate(count.format(".stroke.wait")) == 3
    # The row describes the call nearest to the pointer.
    point = (
        "(() => {{ const row = document.querySelectorAll('.axis')[{}];"
        "const box = row.getBoundingClientRect();"
        "row.dispatchEvent(new MouseEvent('mousemove', {{ clientX: box.left + {} * box.width }}));"
        "return row.title }})()"
    )
    assert evaluate(point.format(0, 0)) == (
        "2 of 30: all_gather[dp] of (root), forward, 8.0 KiB, exposed"
    )
    assert evaluate(point.format(0, 1)) == (
        "29 of 30: reduce_scatter[dp] of layers.0, backward, 4.0 KiB, beside layers.0 (1.5 GFLOP)"
    )
    assert evaluate(point.format(2, 0)) == "6 of 30: host_wait item of layers.0, forward"


def test_timeline_marks_modules_that_differ(draw):
    evaluate = draw(record_step(2), record_step(3))
    signs = evaluate("[...document.querySelectorAll('.bar')].filter(one => one.title).map("
        "one => [one.title.split(',')[0], one.firstChild.textContent])")  # fmt: skip
    assert {tuple(pair) for pair in signs} == {
        ("(root)", ""),
        ("layers.0", ""),
        ("layers.1", ""),
        ("≠ layers.2", "≠ "),
    }


def test_timeline_unit_gathered_earlier_starts_at_0(draw):
    recording = record_step(1)
    late = replace(recording, reshards=recording.reshards[1:], peak_gathered_nbytes=20 * KIB)
    evaluate = draw(recording, late)
    (caption,) = evaluate(TEXTS.format("figcaption"))
    assert "peak 20.0 KiB; the highest value in the chart is 12.0 KiB at event " in caption
    assert "the peak also counts parameters that were gathered before" in caption
    assert ["\N{NOT EQUAL TO} (root), 8.0 KiB", "outside", 0] in evaluate(BARS)


def test_bytes_are_drawn_as_tables_write_them(draw):
    # Halves between two digits, and what rounds up to the next unit.
    sizes = [0, 7, 1023, 1280, 1792, 3 * KIB + 256, KIB * KIB - 20, 5 * KIB**3 // 4, KIB**6]
    recording = record_step(1)
    collectives = tuple(
        replace(recording.collectives[0], index=index, nbytes_sent=0, nbytes_received=nbytes)
        for index, nbytes in enumerate(sizes)
    )
    evaluate = draw(recording, replace(recording, collectives=collectives, reshards=()))
    for at, nbytes in enumerate(sizes):
        evaluate(
            f"{{ const range = document.querySelector('[data-walk]'); range.value = {at + 1};"
            "range.dispatchEvent(new Event('input')) }"
        )
        said = evaluate("document.querySelector('figure output').value")
        # Without bytes, a call has none or does not tell: the list shows nothing either.
        size = f", {show_nbytes(nbytes)}" if nbytes else ""
        assert said.endswith(f", forward{size}; 0 B gathered")


def test_a_tree_has_a_bar_for_each_unit(browser, tmp_path):
    tree = stack(odd=7)
    tree = replace(tree, units=(replace(tree.units[0], nbytes_gathered=8192), *tree.units[1:]))
    (tmp_path / "tree.html").write_text(render_tree_page(tree), encoding="utf-8")
    browser.show(tmp_path / "tree.html", width=360)
    assert browser.complaints == []
    assert browser.evaluate(OVERFLOW) == 0
    widths = "[...document.querySelectorAll('.meter .{}')].map(one => one.style.width)"
    assert browser.evaluate(widths.format("gathered")) == ["100%", "25%", "25%", "25%"]
    assert browser.evaluate(widths.format("kept")) == ["12.5%"] * 4


def test_filters_and_cursor_work_by_keyboard(browser, pages):
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


def test_search_finds_tests_by_part_of_name(browser, pages):
    browser.show(pages["index"])
    browser.evaluate("document.querySelector('[type=search]').focus()")
    for letter in "LARGE":
        browser.press(letter, code=ord(letter), text=letter)
    shown = "[...document.querySelectorAll('tbody tr')].filter(row => row.offsetHeight).length"
    assert browser.evaluate(shown) == 1
    assert browser.evaluate("document.querySelector('output').value") == "1 of 3"


def test_index_is_narrowed_by_result_and_severity(browser, pages):
    browser.show(pages["index"])
    shown = "[...document.querySelectorAll('tbody tr')].filter(row => row.offsetHeight).length"
    choose = (
        "((id, value) => {{ const box = document.getElementById(id); box.value = value;"
        "box.dispatchEvent(new Event('input', {{bubbles: true}})); }})('{}', '{}')"
    )
    for choice, expected in [
        (("status", "differs"), 2),
        (("severity", "change"), 2),
        (("status", "not compared"), 0),
        (("severity", ""), 1),
        (("status", ""), 3),
    ]:
        browser.evaluate(choose.format(*choice))
        assert browser.evaluate(shown) == expected, choice
    assert browser.evaluate("document.querySelector('output').value") == ""


def test_button_copies_the_accept_command(browser, tmp_path):
    failure = failure_of(change=("x",), command="pytest --snapshot-update ", test="t.py::a")
    report = result(compared(record_step(2), record_step(3), failure=failure), nodeid="t.py::a")
    pages = dict(render_pages(Run(tests=(report,)), read))
    file = tmp_path / "page.html"
    file.write_text(next(iter(pages.values())), encoding="utf-8")
    browser.show(file)
    browser.evaluate("document.querySelector('[data-copies]').click()")
    assert browser.evaluate("getSelection().toString()") == failure.accept
    said = browser.evaluate("document.querySelector('[data-copies]').textContent")
    assert said in {"Copied", "Press Ctrl+C"}


def test_page_without_scripts_is_readable(browser, pages):
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
    lists = "document.querySelectorAll('.listing[open] tbody tr').length"
    drawn = "[...document.querySelectorAll('.track')].filter(one => one.offsetHeight).length"
    assert browser.evaluate(lists) > 20
    assert browser.evaluate(drawn) == 0
    browser.show(pages["small"], script=True)
    assert browser.evaluate(lists) == 0
    assert browser.evaluate(drawn) == 1
    assert browser.evaluate(controls) > 0
