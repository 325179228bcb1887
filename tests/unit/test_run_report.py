"""Files of the HTML report."""

from page_checks import check_page

from pytest_fsdp_comm.reports.html.values import Result, Run
from pytest_fsdp_comm.run_report import write_report


def run_of(*names):
    return Run(tests=tuple(Result(nodeid=f"t.py::{name}", outcome="passed") for name in names))


def test_report_replaces_an_earlier_one(tmp_path):
    write_report(run_of("first", "second"), tmp_path)
    (tmp_path / "notes.txt").write_text("of the user")
    write_report(run_of("third"), tmp_path)
    index = (tmp_path / "index.html").read_text()
    assert "t-third-" in index
    assert "t-first-" not in index
    assert (tmp_path / "notes.txt").exists()


def test_all_links_lead_to_a_page(tmp_path):
    write_report(run_of("one", "a/b", "[<&>]"), tmp_path)
    index = check_page((tmp_path / "index.html").read_text(encoding="utf-8"))
    files = [tmp_path / link for link in index.links if not link.startswith("#")]
    assert len(files) == 3
    for file in files:
        page = check_page(file.read_text(encoding="utf-8"))
        assert "../index.html" in page.links
