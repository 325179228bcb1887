"""What a report leaves in its directory."""

from page_checks import check_page

from pytest_fsdp_comm.reports.html.values import Result, Run
from pytest_fsdp_comm.run_report.writing import write_report


def run_of(*names):
    return Run(tests=tuple(Result(nodeid=f"t.py::{name}", outcome="passed") for name in names))


def test_pages_of_an_earlier_run_are_removed_and_other_files_stay(tmp_path):
    write_report(run_of("first", "second"), tmp_path)
    (tmp_path / "tests" / "mine.html").write_text("<p>of the user")
    (tmp_path / "notes.txt").write_text("too")
    write_report(run_of("second", "third"), tmp_path)
    pages = sorted(page.name.rpartition("-")[0] for page in (tmp_path / "tests").iterdir())
    assert pages == ["", "t-second", "t-third"]
    assert (tmp_path / "tests" / "mine.html").read_text() == "<p>of the user"
    assert (tmp_path / "notes.txt").exists()


def test_all_links_lead_to_a_page(tmp_path):
    write_report(run_of("one", "a/b", "[<&>]"), tmp_path)
    index = check_page((tmp_path / "index.html").read_text(encoding="utf-8"))
    files = [tmp_path / link for link in index.links if not link.startswith("#")]
    assert len(files) == 3
    for file in files:
        page = check_page(file.read_text(encoding="utf-8"))
        assert "../index.html" in page.links
