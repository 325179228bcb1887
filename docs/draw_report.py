"""Draw the pictures of the HTML report and of GitHub's step summary: `python docs/draw_report.py`.

They show the failure of `docs/how-to/overlap.md`, in a Chromium that must be installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "how-to" / "overlap.md"

# Roughly as GitHub shows a summary.
SUMMARY = """<!doctype html><html><head><meta charset="utf-8"><style>
body {{ margin: 0; padding: 24px; font: 14px/1.5 system-ui, sans-serif; color: #1f2328; }}
table {{ border-collapse: collapse; }} td, th {{ border: 1px solid #d1d9e0; padding: 6px 13px; }}
code, pre {{ font: 85%/1.45 ui-monospace, Menlo, Consolas, monospace; background: #f0f1f3; }}
code {{ padding: .2em .4em; border-radius: 6px; }} pre {{ padding: 16px; overflow: auto; }}
pre code {{ padding: 0; }} h3 {{ margin-top: 0; }}
</style></head><body>{}</body></html>"""


def main() -> None:
    """Run the page's test before and after the change, and take the pictures."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import opened_browser  # noqa: PLC0415  # a module of the tests

    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch)
        fail(project)
        with opened_browser(project / "profile") as page:
            (test,) = (project / "report" / "tests").glob("*ws512*")
            page.show(project / "report" / "index.html", width=1000, height=660)
            page.screenshot(PICTURES / "report.png", whole=False)
            page.show(test, width=1000, height=760)
            page.evaluate("document.querySelector('.timeline').scrollIntoView()")
            page.screenshot(PICTURES / "timeline.png", whole=False)
            summary = project / "summary.html"
            markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
            text = (project / "summary.md").read_text(encoding="utf-8")
            summary.write_text(SUMMARY.format(markdown.render(text)), encoding="utf-8")
            page.show(summary, width=900, height=410)
            page.screenshot(PICTURES / "summary.png", whole=False)


def fail(project: Path) -> None:
    """Record the page's test in a project, change it as the page says, and let it fail."""
    test, change = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text("utf-8"))[:2]
    file = project / "test_overlap.py"
    (project / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    file.write_text(test, encoding="utf-8")
    run(project, "--snapshot-update")
    body = re.search(r"(?ms)^    def forward\(.*?(?=^\S|\Z)", test)
    indented = "".join(f"    {line}" for line in change.splitlines(keepends=True))
    file.write_text(test.replace(body[0], f"{indented}\n\n"), encoding="utf-8")
    summary = {"GITHUB_STEP_SUMMARY": str(project / "summary.md")}
    run(project, "--comm-report=report", "--comm-artifacts=comm-artifacts", **summary)


def run(project: Path, *arguments: str, **environment: str) -> None:
    """Run the tests that compare snapshots."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "test_step and not hides", *arguments]
    subprocess.run(command, cwd=project, env={**os.environ, **environment}, check=False)


if __name__ == "__main__":
    main()
