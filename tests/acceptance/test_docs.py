"""The tests on the pages pass, record what the pages show, and fail as the tutorial says.

Pages of frameworks have a test of their own, test_frameworks_page.py.
"""

import re
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


def is_complete(code):
    return "def test_" in code and "import pytest" in code


def lines_of(files):
    return {line.strip() for file in files for line in file.read_text().splitlines()}


def test_the_pages_show_real_output(pytester):
    arguments = ("-p", "no:cacheprovider", "--snapshot-disable-unused")
    tests = {
        f"test_{name}_{number}": code
        for name, page in PAGES.items()
        for number, code in enumerate(filter(is_complete, blocks(page, "python")))
    }
    assert len(tests) > 10
    assert NOT_RUN.keys() == {name for name, page in PAGES.items() if "```python no-run" in page}
    training, test, *edits = blocks(TUTORIAL, "python")
    pytester.makepyfile(training=training, test_training=test, **tests)
    result = pytester.runpytest_subprocess(*arguments, "--snapshot-update").parseoutcomes()
    assert result.keys() <= {"passed", "skipped", "warning", "warnings"}
    snapshots = pytester.path / "snapshots"
    for name, page in PAGES.items():
        if any(is_complete(code) for code in blocks(page, "python")):
            recorded = lines_of(snapshots.glob(f"test_{name}_*/*.comm"))
            shown = "".join(blocks(page, "text")).splitlines()
            assert [line for line in shown if line not in recorded and ": " not in line] == []

    no_snapshot, recorded, *failures = blocks(TUTORIAL, "text")
    before = (snapshots / "test_training" / "test_train_step.ws4.comm").read_text().splitlines()
    assert recorded.splitlines()[1:] == before[1:]

    def edit(function):
        tail = training.index("def train_step")
        pytester.makepyfile(training=training[:tail] + function)

    # What can be run in one session is: a test that has no snapshot, the first edit, and another
    # page's mistake.
    edit(edits[0])
    swapped = tests["test_hsdp_0"].replace("replicate=2, shard=2", "shard=2, replicate=2")
    swapped = re.sub(r"    assert .*replicate.*\n", "", swapped)
    pytester.makepyfile(test_unrecorded=test, test_hsdp_0=swapped)
    chosen = ("test_unrecorded.py", "test_training.py", "test_hsdp_0.py")
    result = pytester.runpytest_subprocess(*arguments, *chosen)
    result.assert_outcomes(failed=3)
    said = result.stdout.str()
    assert no_snapshot in said.replace("test_unrecorded", "test_training")
    assert failures[0] in said
    (swap,) = blocks(PAGES["hsdp"], "text")[1].splitlines()
    assert swap in said

    edit(edits[1])
    result = pytester.runpytest_subprocess(*arguments, "--comm-artifacts=received", chosen[1])
    assert failures[1] in result.stdout.str()
    received = lines_of((pytester.path / "received").rglob("*.comm"))
    (diff,) = blocks(TUTORIAL, "diff")
    for line in diff.splitlines():
        assert line[1:] in (before if line[0] in "- " else received)
        assert line[1:] in received or line[0] == "-"
