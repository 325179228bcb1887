"""Render the pages of a report from values, without a browser and torch."""

import json
import re
from dataclasses import replace

import pytest
from page_checks import check_page
from report_values import (
    KIB,
    compared,
    failure_of,
    profile_of,
    read,
    record_step,
    result,
    with_overlap,
)

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.comm.events import Beside, Phase
from pytest_fsdp_comm.comm.profile import CommProfile, Row, make_comparable
from pytest_fsdp_comm.reports.ci.outcomes import Origin
from pytest_fsdp_comm.reports.explanation import Failure, Statement
from pytest_fsdp_comm.reports.html import pages
from pytest_fsdp_comm.reports.html.pages import (
    page_name,
    render_pages,
    render_single_page,
    status_of,
)
from pytest_fsdp_comm.reports.html.tables import (
    cost_rows,
    differing_modules,
    module_table,
    side_rows,
)
from pytest_fsdp_comm.reports.html.values import (
    MAX_ENTRIES,
    Record,
    Run,
    share_timelines,
    timeline_of,
)
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.text.fqn import name_owners

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'{{7*7}}\N{BUG}\u2028\udc80"


HOSTILE_TEXT = {"head": HOSTILE, "change": (HOSTILE,), "likely": (HOSTILE,)}


def pages_of(*results, **changes):
    """Return the index, and the pages of tests by name."""
    *tests, (name, index) = render_pages(Run(tests=results, **changes), read)
    assert name == "index.html"
    return index, {name.removeprefix("tests/"): page for name, page in tests}


def data_of(page):
    """Return the data that the script draws."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(found)


@pytest.mark.parametrize("layers", [2, 126])
def test_page_is_complete_and_small_for_any_model(layers):
    one = compared(record_step(layers), record_step(layers, steps=2, extra=3))
    index, tests = pages_of(result(one, problem="E  assert", message="assert"))
    check_page(index)
    ((name, page),) = tests.items()
    read_page = check_page(page)
    assert f'href="tests/{name}"' in index
    assert "../index.html" in read_page.links
    assert len(page.encode()) < {2: 80_000, 126: 250_000}[layers]
    data = data_of(page)
    (timeline,) = data["sections"]["v0"]["timelines"]
    # Of a step: 8 of each layer, 3 of the root, and the 3 that are extra; all of them differ in
    # something but those.
    assert len(timeline["order"]) == 2 * (8 * layers + 3 + 3)
    assert len(data["entries"]) == 8 * layers + 3 + 1
    assert data["entries"][:2] == [
        ["unshard", "", "forward", "", 8 * KIB],
        ["all_gather", "", "forward", "dp", 8 * KIB],
    ]
    # The module of the extra calls; layers send twice as much as in the snapshot.
    assert None in data["sections"]["v0"]["differing"]


def test_hostile_names_cannot_break_out_of_a_page():
    recording = record_step(2, name=HOSTILE)
    # Text is written with escapes in snapshots, but as it is in timelines.
    one = compared(recording, recording, failure=failure_of(**HOSTILE_TEXT))
    one = replace(one, name=HOSTILE, file=HOSTILE)
    bad = result(one, nodeid=f"t.py::t[{HOSTILE}]", problem=HOSTILE, message=HOSTILE)
    index, tests = pages_of(bad, command=HOSTILE)
    for page in (index, *tests.values()):
        read_page = check_page(page)
        assert "<img" not in page
        assert "49" not in "".join(read_page.text)
        assert re.findall(r"<script[^>]*>", page).count("<script>") == 1
    data = data_of(next(iter(tests.values())))
    assert any((entry[1] or "").startswith("</script>") for entry in data["entries"])


def test_index_lists_failures_first_with_result_words():
    same = compared(record_step(2), record_step(2), verdict="same", failure=None)
    results = (
        result(outcome="skipped", nodeid="t.py::skipped"),
        result(same, outcome="passed", nodeid="t.py::same"),
        result(replace(same, verdict="updated"), outcome="passed", nodeid="t.py::written"),
        result(outcome="error", nodeid="t.py::broke", message="ValueError: no"),
        result(replace(same, verdict="missing"), nodeid="t.py::missing"),
        result(compared(record_step(2), record_step(4)), nodeid="t.py::differs"),
    )
    index, _ = pages_of(*results)
    found = re.findall(r'scope="row"><a [^>]*>(\w+)</a>', index)
    assert found == ["differs", "missing", "broke", "written", "same", "skipped"]
    assert "differs <b>1</b>" in index
    assert "ValueError: no" in index
    assert status_of(results[0]).word == "skipped"
    assert status_of(replace(results[-1], outcome="xfailed")).word == "expected failure"
    check_page(index)


@pytest.mark.parametrize("message", ["", "ValueError: x"])
def test_failed_test_without_calls_has_no_bytes(message):
    unused = {"mesh_axes": (), "collectives": (), "reshards": ()}
    nothing = replace(record_step(0), peak_gathered_nbytes=0, **unused)
    outcome = "failed" if message else "passed"
    index, _ = pages_of(result(compared(nothing, nothing), outcome=outcome, message=message))
    assert (re.findall(r">(\S+ B)<", index) == ["0 B"] * 2) == (not message)
    one = compared(record_step(1), record_step(2))
    index, _ = pages_of(result(one, outcome=outcome, message=message))
    assert re.findall(r">after ([^<]+)<", index) == ["33.0 KiB", "16.0 KiB"]


def test_world_size_is_that_of_the_recordings():
    one = compared(record_step(1), record_step(2))
    lost = replace(one, old="", new="")
    cases = {
        (): "2 ranks",
        (one,): "4 ranks",
        (one, lost): "4 ranks",
        (lost,): "2 ranks",
    }
    for values, words in cases.items():
        test = result(*values)
        test = replace(test, record=replace(test.record, world_size=2))
        (page,) = pages_of(test)[1].values()
        assert re.findall(r"<span>(\d+ ranks?)\b", page) == [words]


def test_index_has_the_cost_of_a_later_comparison():
    one = compared(record_step(1), record_step(2))
    index, _ = pages_of(result(*[replace(one, old="", new="")] * 12, one))
    assert re.findall(r">after ([^<]+)<", index) == ["33.0 KiB", "16.0 KiB"]


def test_single_page_has_as_many_tests_as_its_index(monkeypatch):
    monkeypatch.setattr(pages, "_MAX_TESTS", 2)
    results = [result(outcome="passed", nodeid=f"t.py::test_{number}") for number in range(5)]
    text = render_single_page(Run(tests=results), read)
    check_page(text)
    assert re.findall(r'<a href="#(t\d+-)">', text) == ["t0-", "t1-"]
    assert re.findall(r'id="(t\d+-)"', text) == ["t0-", "t1-"]
    assert "The 3 tests with the best results are not listed" in text


def test_single_page_has_the_index_and_all_tests():
    timelines = (timeline_of(record_step(2)),)
    results = (
        result(outcome="passed", nodeid="t.py::passed"),
        result(
            compared(record_step(2), record_step(4), timelines=timelines),
            compared(record_step(2), record_step(3), timelines=timelines),
            nodeid="t.py::differs",
            problem="E  assert 0",
        ),
        result(compared(record_step(1), record_step(2)), nodeid="t.py::other"),
    )
    text = render_single_page(Run(tests=results, versions="torch 2.13.0"), read)
    page = check_page(text)
    names = re.findall(r'<a href="#(t\d+-)">(\w+)</a>', text)
    assert names == [("t1-", "differs"), ("t2-", "other"), ("t0-", "passed")]
    assert {*page.ids} >= {"t0-", "t1-", "t1-v0", "t1-v1", "t1-failure", "t2-v0"}
    assert {*data_of(text)["sections"]} == {"t1-v0", "t1-v1", "t2-v0"}
    assert "tests/" not in "".join(page.links)
    assert "torch 2.13.0" in text


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({}, "Communication"),
        ({"name": "tree", "kind": "tree"}, "Sharding"),
        ({"name": "second"}, "Communication: second"),
        ({"file": "snapshots/test_x/test_y.ws4.evaluation.comm"}, "Communication: evaluation"),
    ],
)
def test_section_title_names_the_snapshot(fields, title):
    one = compared(record_step(1), record_step(2), **fields)
    _, tests = pages_of(result(one))
    (page,) = tests.values()
    assert re.findall(r'<h2 id="v0">(.*?)</h2>', page) == [title]


def test_index_puts_broken_training_first_with_a_badge():
    """Even if the change was accepted; a page about it marks its line."""
    change = failure_of(change=("layers.{0,2} changed",))
    lost = failure_of(breaks_training=("gradients of layers.{0,2} are no longer reduced",))
    both = (record_step(2), record_step(3))
    names = ("updated", "same_severity", "differs")
    index, tests = pages_of(
        result(compared(*both, failure=change), nodeid="t.py::same_severity"),
        result(
            compared(*both, failure=change),
            compared(*both, failure=lost, name="other"),
            nodeid="t.py::differs",
        ),
        result(compared(*both, verdict="updated", failure=lost), nodeid="t.py::updated"),
    )
    found = re.findall(r'scope="row"><a [^>]*>(\w+)</a>', "".join(index).replace("<wbr>", ""))
    assert found == ["differs", "updated", "same_severity"]
    assert {*found} == {*names}
    assert index.count('<b class="badge">breaks training</b>') == 2
    page = next(page for name, page in tests.items() if "differs" in name)
    assert "<li>breaks training: gradients of layers.{0,2} are no longer reduced</li>" in page
    check_page(index)


def test_index_cells_are_cut_between_words():
    line = f"a in forward: x 1 -> 2, {'zzz ' * 99}"
    one = compared(record_step(2), record_step(3), failure=failure_of(change=(line,)))
    index, _ = pages_of(result(one))
    (cell,) = re.findall('class="what">(.*?)</td>', index)
    assert cell.startswith("a in forward: x 1 -&gt; 2, zzz ")
    assert cell.endswith(" zzz...")
    assert len(cell) < 210


def test_index_cell_names_the_lines_that_send():
    changes = (
        Statement(severity="change", text="2 layers more", place="at a.py:1"),
        Statement(severity="change", text="y", place="at b.py:2"),
    )
    failure = Failure(head="", compared="comm_mode", statements=changes)
    index, _ = pages_of(result(compared(record_step(2), record_step(3), failure=failure)))
    assert 'class="what">2 layers more, at a.py:1\ny, at b.py:2</td>' in index


def test_index_shows_the_cost_of_the_recording_that_differs():
    """Even if a recording that matches comes first, and on simulated ranks."""
    same = compared(record_step(2), record_step(2), verdict="same")
    more = compared(record_step(2), record_step(2, steps=2), failure=failure_of(change=("x",)))
    index, _ = pages_of(result(same, more))
    (row,) = re.findall(r'<td role="cell" class="n" data-label="Bytes">(.*?)</td>', index)
    assert "+100 %" in row


def test_a_long_index_is_cut_with_a_count_of_the_rest():
    one = result(outcome="passed", message="y" * 999)
    index, tests = pages_of(*(replace(one, nodeid=f"t.py::test[{at}]") for at in range(1600)))
    check_page(index)
    assert "100 tests with the best results are not listed" in index
    assert len(tests) == 1600


def test_index_without_plugin_tests_has_explanation():
    index, tests = pages_of()
    check_page(index)
    assert not tests
    assert "No test recorded or compared communication." in index


def test_page_links_commit_and_breaks_long_ids():
    one = replace(
        result(compared(record_step(2), record_step(3))),
        nodeid="tests/test_a.py::test_step[ws-4]",
        address="https://host/r/blob/abcdef/tests/test_a.py#L7",
    )
    origin = Origin(commit="abcdef" * 4, branch="<b>faster", address="https://host/r")
    index, tests = pages_of(one, origin=origin)
    check_page(index, elsewhere=[origin.commit_address])
    assert f'<a href="{origin.commit_address}">abcdefabcdef</a> of &lt;b&gt;faster</p>' in index
    assert "test_<wbr>step[<wbr>ws-<wbr>4]</a>" in index
    (page,) = tests.values()
    check_page(page, elsewhere=[one.address])
    assert f'<a href="{one.address}">tests/<wbr>test_<wbr>a.<wbr>py</a>' in page


def test_both_sides_of_a_changed_number_have_a_label():
    index, _ = pages_of(result(compared(record_step(2), record_step(2, steps=2))))
    (row,) = re.findall(r'<td role="cell" class="n" data-label="Bytes">(.*?)</td>', index)
    assert re.fullmatch(r'<b class="delta more">\+100 %</b><small>before .*<small>after .*', row)


def test_a_page_without_a_recording_explains_itself():
    lost = replace(result(problem="rank 1 died", outcome="failed"), record=Record(world_size=2))
    lost = replace(lost, record=replace(lost.record, silent_ranks=(1,)))
    _, tests = pages_of(lost)
    (page,) = tests.values()
    check_page(page)
    assert "This test recorded nothing." in page
    assert "later comparisons" not in page
    assert "Rank 1 ended without sending a recording, so it is missing below." in page
    assert "rank 1 died" in page


def test_timeline_keeps_first_entries_counts_others():
    recording = record_step(126, steps=12)
    timeline = timeline_of(recording)
    assert len(timeline.order) == MAX_ENTRIES
    of_all = len(recording.collectives) + len(recording.reshards)
    assert timeline.left_out == of_all - MAX_ENTRIES
    ranks = tuple(replace(timeline, ranks=(rank,), peak=rank) for rank in range(10))
    one = compared(record_step(126), record_step(126, steps=2), timelines=ranks)
    _, tests = pages_of(result(one))
    (page,) = tests.values()
    check_page(page)
    assert len(page.encode()) < 1_000_000
    assert page.count("<figure") == 4
    assert "later events are omitted" in page
    assert "The timelines of ranks 4-9 differ from these" in page


def listed(page):
    """Return the text of each cell in the list of a timeline, row by row."""
    (table,) = re.findall(r'<table class="list.*?</table>', page, re.DOTALL)
    rows = re.findall(r'<tr role="row".*?</tr>', table, re.DOTALL)
    return [
        [re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]


def test_timeline_shows_overlap_and_host_waits():
    recording = with_overlap(record_step(2))
    _, tests = pages_of(result(compared(recording, recording)))
    (page,) = tests.values()
    check_page(page)
    head, *rows = listed(page)
    assert head[5] == "Overlap"
    cells = [(row[1], row[2], row[3], row[5], row[6]) for row in rows]
    # The modules beside a call are named by their unit.
    beside = "beside layers.0 (1.5 GFLOP)"
    assert cells[:6] == [
        ("unshard", "(root)", "forward", "", ""),
        ("all_gather[dp]", "(root)", "forward", "exposed", "train.py:7"),
        ("unshard", "layers.0", "forward", "", ""),
        ("all_gather[dp]", "layers.0", "forward", "exposed", "train.py:7"),
        ("all_reduce[tp]", "layers.0", "forward", beside, "train.py:7"),
        ("host_wait item", "layers.0", "forward", "", "model.py:37"),
    ]
    assert ("reduce_scatter[dp]", "layers.1", "backward", beside, "train.py:7") in cells
    entries = data_of(page)["entries"]
    assert entries[1] == ["all_gather", "", "forward", "dp", 8 * KIB, "exposed"]
    assert entries[5] == ["host_wait item", "layers.0", "forward", "", 0]


def test_modules_outside_units_are_named_themselves():
    recording = with_overlap(record_step(2))
    beside = tuple(Beside(module=name, flops=999) for name in ("layers.10.a", "head", None))
    calls = tuple(replace(event, beside=beside) for event in recording.collectives)
    entries = timeline_of(replace(recording, collectives=calls)).entries
    assert {entry.overlap for entry in entries} == {
        "",
        "exposed",
        "beside head, layers.10.a, (no-module) (3.0 kFLOP)",
    }


def test_timeline_of_real_ranks_is_silent_on_overlap():
    recording = record_step(2)
    _, tests = pages_of(result(compared(recording, recording)))
    (page,) = tests.values()
    assert "Overlap" not in listed(page)[0]
    assert "exposed" not in page[page.index("<main") :].split("<script")[0].lower()
    assert {len(entry) for entry in data_of(page)["entries"]} == {5}


def test_ranks_that_recorded_the_same_share_a_timeline():
    timelines = [timeline_of(record_step(2, extra=rank == 2, rank=rank)) for rank in range(4)]
    shared = share_timelines(timelines)
    assert [timeline.ranks for timeline in shared] == [(0, 1, 3), (2,)]


def test_modules_add_up_by_axis_and_phase():
    table = module_table(profile_of(record_step(4)), profile_of(record_step(4, extra=2)))
    assert table.columns == (("dp", "forward"), ("dp", "backward"), ("tp", "forward"))
    rows = {row.name: row for row in table.rows}
    assert list(rows) == ["(root)", "itself", "layers.{0..3}", "(no-module)"]
    # 8 KiB of the root, 4 of each layer; in backward all but the last are gathered one ahead.
    whole, layers = rows["(root)"].cells, rows["layers.{0..3}"].cells
    assert [cell[1] for cell in whole] == [24 * KIB + 8, 32 * KIB, 2 * KIB]
    assert [cell[0] for cell in whole] == [24 * KIB, 32 * KIB, 2 * KIB]
    assert [cell[1] for cell in layers] == [16 * KIB, 32 * KIB, 2 * KIB]
    assert rows["layers.{0..3}"].count == 4


def test_only_ranks_that_differ_are_named():
    alike = [record_step(2, rank=rank) for rank in range(4)]
    odd = profile_of(*alike[:3], record_step(2, extra=1, rank=3))
    (row,) = [row for row in side_rows(profile_of(*alike), odd) if " on rank" in row.after]
    assert (row.owners, str(row.key), row.key.phase) == ((None,), "all_reduce[dp]", "forward")
    assert row.after.endswith(" on rank 3")


def test_before_and_after_are_marked_in_words():
    rows = side_rows(profile_of(record_step(2)), profile_of(record_step(4, extra=1)))
    marks = {(row.mark, name_owners(row.owners), str(row.key)) for row in rows}
    assert ("new", "layers.{2..3}", "all_gather[dp]") in marks
    assert ("same", "(root)", "all_gather[dp]") in marks
    assert ("new", "(no-module)", "all_reduce[dp]") in marks
    fewer = side_rows(profile_of(record_step(4)), profile_of(record_step(2)))
    assert {row.mark for row in fewer} == {"removed", "same"}


def test_before_says_in_which_backwards_gradients_were_reduced():
    def reduced(backwards):
        calls = Calls(nbytes=64, dtype="float32", role="gradients", count=1, backwards=backwards)
        row = Row(phase=Phase.BACKWARD, owner="a", what="reduce_scatter", axis="dp", calls=(calls,))
        return CommProfile(world_size=2, mesh_axes=(), rows=(row,))

    last, first = reduced("the last of 2 backwards"), reduced("the first of 2 backwards")
    (row,) = side_rows(*make_comparable(last, first), last)
    assert row.before.endswith(" in the last of 2 backwards")
    assert row.after.endswith(" in the first of 2 backwards")
    # It is not compared, so equal rows do not show it.
    (row,) = side_rows(*make_comparable(last, reduced("the last of 4 backwards")), last)
    assert (row.mark, row.before) == ("same", "x1 of 64 B float32 gradients")


def test_only_modules_that_differ_are_marked():
    old, new = record_step(2), record_step(3)
    assert differing_modules(side_rows(profile_of(old), profile_of(new))) == {"layers.2"}
    assert differing_modules(side_rows(profile_of(new), profile_of(new))) == set()
    _, tests = pages_of(result(compared(old, new)))
    marked = re.findall(r"differs:</span></b> <code>(.*?)</code>", *tests.values())
    assert {name.replace("<wbr>", "") for name in marked} == {"layers.2"}


def test_cost_table_has_growth_only_if_changed():
    cost = cost_of_change(profile_of(record_step(2)), profile_of(record_step(4)))
    rows = {row.label: row for row in cost_rows(cost)}
    assert (rows["bytes on tp"].before, rows["bytes on tp"].after) == ("1.0 KiB", "2.0 KiB")
    assert rows["bytes on tp"].change == "+100 %"
    assert rows["peak gathered"].change == ""
    # Of real ranks, nobody knows what is exposed.
    assert "exposed" not in rows
    exposed = replace(cost, exposed_before=KIB, exposed_after=3 * KIB)
    (row,) = [row for row in cost_rows(exposed) if row.label == "exposed"]
    assert (row.before, row.after, row.change) == ("1.0 KiB", "3.0 KiB", "x3.0")


def test_page_without_snapshot_has_rows_and_ranks():
    ranks = [*(record_step(2, rank=rank) for rank in range(3)), record_step(2, extra=1, rank=3)]
    new = format_profile(profile_of(*ranks))
    one = replace(compared(ranks[0], ranks[0]), old="", new=new)
    _, tests = pages_of(result(one))
    (page,) = tests.values()
    check_page(page)
    assert "Calls by module" in page
    assert "on rank 3</td>" in page
    assert "Before" not in page


def test_page_names_are_unique_for_any_test_id():
    ids = ["a.py::t[x/y]", "a.py::t[x-y]", "a.py::t[x y]", f"a.py::t[{'x' * 900}]", f"a::{HOSTILE}"]
    names = [page_name(nodeid) for nodeid in ids]
    assert len(set(names)) == len(ids)
    assert all(re.fullmatch(r"[\w-]{1,80}\.html", name) for name in names)
    assert names[0] == page_name(ids[0])


def test_values_beyond_those_of_a_page_are_counted():
    one = result(*[compared(record_step(2), record_step(3))] * 15)
    ((page),) = pages_of(one)[1].values()
    check_page(page)
    assert "3 later comparisons are omitted" in page


def test_page_with_unreadable_snapshot_is_complete():
    broken = {"verdict": "broken", "failure": Failure.from_error("line 1 is odd")}
    one = compared(record_step(2), record_step(2), **broken)
    _, tests = pages_of(result(replace(one, old="no snapshot")))
    (page,) = tests.values()
    check_page(page)
    assert "not make_comparable" in page
    assert "line 1 is odd" in page
    assert "Before and after" not in page
    assert "<figure" in page


def test_index_names_the_error_that_prevented_a_comparison():
    text = "rank 0 made comparison 1, but rank 1 ended the test without it"
    failure = Failure.from_error(text, text)
    one = compared(record_step(2), record_step(2), verdict="broken", failure=failure)
    index, tests = pages_of(result(one, message="rank 1: FileNotFoundError: data.bin"))
    (page,) = tests.values()
    assert "FileNotFoundError: data.bin" in index
    assert text not in index
    assert text in page
    # Without a message of pytest's, the reason is all there is.
    assert text in pages_of(result(one))[0]
