"""The tests on the pages pass, record what the pages show, and fail as the tutorial says.

Pages of frameworks have a test of their own, test_frameworks_page.py.
"""

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    page.stem.replace("-", "_"): page.read_text() for page in sorted((DOCS / "how-to").glob("*.md"))
}
NOT_RUN = {
    "gpu_script": "test_record.py runs it, as a script",
    "reading_a_hang": "it hangs on purpose, for as long as its deadline",
    "record": "test_write_test.py compares it, and test_record.py runs its like, with a script",
}
TUTORIAL = (DOCS / "tutorial.md").read_text()


def blocks(page, language):
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", page)


def guards(page):
    """Return the test modules of a page; tests without imports continue the module before them."""
    modules = []
    for code in blocks(page, "python"):
        if "def test_" in code and "import pytest" in code:
            modules.append(code)
        elif "def test_" in code:
            modules[-1] += f"\n\n{code}"
    return modules


def lines_of(files):
    return {line.strip() for file in files for line in file.read_text().splitlines()}


def test_the_pages_show_real_output(pytester):
    arguments = ("-p", "no:cacheprovider", "--snapshot-disable-unused")
    tests = {
        f"test_{name}_{number}": code
        for name, page in PAGES.items()
        for number, code in enumerate(guards(page))
    }
    assert len(tests) > 10
    assert NOT_RUN.keys() == {name for name, page in PAGES.items() if "```python no-run" in page}
    training, test, *edits = blocks(TUTORIAL, "python")
    pytester.makepyfile(training=training, test_training=test, **tests)
    result = pytester.runpytest_subprocess(*arguments, "--snapshot-update").parseoutcomes()
    assert result.keys() <= {"passed", "skipped", "warning", "warnings"}
    snapshots = pytester.path / "snapshots"
    for name, page in PAGES.items():
        if guards(page):
            recorded = lines_of(snapshots.glob(f"test_{name}_*/*.comm"))
            shown = "".join(blocks(page, "text")).splitlines()
            assert [line for line in shown if line not in recorded and ": " not in line] == []

    no_snapshot, recorded, *failures = blocks(TUTORIAL, "text")
    before = (snapshots / "test_training" / "test_train_step.ws4.comm").read_text().splitlines()
    assert recorded.splitlines()[1:] == before[1:]

    def edit(function):
        tail = training.index("def train_step")
        pytester.makepyfile(training=training[:tail] + function)

    # One session runs a test without a snapshot, the first edit, and the mistakes of other pages.
    edit(edits[0])
    swapped = tests["test_hsdp_0"].replace("replicate=2, shard=2", "shard=2, replicate=2")
    first = tests["test_accumulation_0"].replace("number == len(batches) - 1", "number == 0")
    pytester.makepyfile(test_unrecorded=test, test_hsdp_0=swapped, test_accumulation_0=first)
    chosen = ("test_unrecorded.py", "test_training.py", "test_hsdp_0.py", "test_accumulation_0.py")
    result = pytester.runpytest_subprocess(*arguments, *chosen)
    result.assert_outcomes(failed=5, passed=1)
    said = result.stdout.str()
    assert no_snapshot in said.replace("test_unrecorded", "test_training")
    assert failures[0] in said
    for page in ("hsdp", "accumulation"):
        (failure,) = blocks(PAGES[page], "text")[1].splitlines()
        assert failure in said

    edit(edits[1])
    code, read_in_each_layer = blocks(PAGES["overlap"], "python")
    forward = code[code.index("    def forward") : code.index("\n\ndef record_step")]
    slower = code.replace(forward, textwrap.indent(read_in_each_layer, "    "))
    pytester.makepyfile(test_overlap_0=slower)
    chosen = ("test_training.py", "test_overlap_0.py")
    result = pytester.runpytest_subprocess(*arguments, "--comm-artifacts=received", *chosen)
    result.assert_outcomes(passed=1, failed=3)
    assert failures[1] in result.stdout.str()
    for line in blocks(PAGES["overlap"], "text")[1].splitlines():
        assert line.replace("test_overlap.py", "test_overlap_0.py") in result.stdout.str()
    received = lines_of((pytester.path / "received").rglob("*.comm"))
    before += [*lines_of(snapshots.glob("test_overlap_0/*.ws512.comm"))]
    for page in (TUTORIAL, PAGES["overlap"]):
        (diff,) = blocks(page, "diff")
        for line in diff.splitlines():
            assert line[1:] in (before if line[0] in "- " else received)
            assert line[1:] in received or line[0] == "-"
