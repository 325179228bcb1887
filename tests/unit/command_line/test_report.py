"""``fsdp-comm report`` makes pages of artifacts, and of what ``diff`` tells."""

import sample_profiles

from pytest_fsdp_comm.snapshots.comm_text import format_profile

OLD, NEW = (format_profile(sample_profiles.profile(layers=layers)) for layers in (3, 4))


def test_artifacts_become_pages_with_the_story_of_each_test(write, fsdp_comm, project):
    write("ci/received/test_a/test_x.ws8.comm", NEW)
    write("ci/expected/test_a/test_x.ws8.comm", OLD)
    write("ci/received/test_a/test_new.ws8.comm", NEW)
    made = fsdp_comm("report", "ci", "-o", "pages")
    assert (made.status, made.lines) == (0, ["pages/index.html: 2 tests"])
    pages = [page.read_text() for page in (project / "pages/tests").iterdir()]
    assert len(pages) == 2
    assert any("layers: 3 -&gt; 4 modules" in page for page in pages)
    index = (project / "pages/index.html").read_text().replace("<wbr>", "")
    assert "test_x.ws8" in index
    assert "test_new.ws8" in index


def test_report_accepts_the_arguments_of_diff(write, fsdp_comm, project):
    write("old.comm", OLD)
    write("new.comm", NEW)
    assert fsdp_comm("report", "old.comm", "new.comm").status == 0
    assert (project / "comm-report/index.html").exists()
    assert fsdp_comm("report", "nope").status == 2


def test_artifacts_of_first_recordings_alone_are_reported_and_left_as_they_are(
    write, fsdp_comm, project
):
    write("ci/received/test_a/test_new.ws8.comm", NEW)
    assert fsdp_comm("report", "ci", "-o", "pages").lines == ["pages/index.html: 1 test"]
    assert [path.name for path in (project / "ci").iterdir()] == ["received"]
