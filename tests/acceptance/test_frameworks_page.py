"""The tests of docs/frameworks/ pass, and record and report what their pages show."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from texts import parse_comm

from pytest_fsdp_comm.comm.profile import remove_overlap
from pytest_fsdp_comm.snapshots.comm_text import format_profile

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.stem: page.read_text() for page in (DOCS / "frameworks").glob("*.md")}
AUTOMODEL = {"nemo_automodel", "megatron_fsdp", "torchdata", "transformers"}
# What each test of a page imports; a test whose framework is missing here is not run.
NEEDED = {
    "accelerate": [{"accelerate"}, {"accelerate"}, {"trl"}],
    "automodel": [AUTOMODEL, AUTOMODEL, {"megatron_fsdp"}],
    "lightning": [{"lightning"}],
    "torchtitan": [{"torchtitan", "triton"}, {"torchtitan", "triton"}, {"torchao"}],
    "transformers": [{"transformers", "accelerate"}, {"transformers", "accelerate"}, {"peft"}],
}
# Tests that cannot be simulated, or that are simulated on the page.
NOT_SIMULATED = {"automodel_2", "torchtitan_1"}
LIMIT = 40


@dataclass
class Guard:
    """A test of a page, and the blocks between it and the next test."""

    source: str
    after: str

    def blocks(self, language):
        return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", self.after)

    def changed(self):
        """Return the source after the change that the page shows."""
        source = self.source
        for lines in map(str.splitlines, self.blocks("diff")):
            before, after = (
                "".join(f"{line[1:]}\n" for line in lines if line[0] in kept)
                for kept in (" -", " +")
            )
            assert source.count(before) == 1
            source = source.replace(before, after)
        return source


GUARDS = {
    f"{name}_{number}": Guard(*part.split("\n```\n", 1))
    for name, page in PAGES.items()
    for number, part in enumerate(re.split(r"(?m)^```python\n", page)[1:])
}


def test_guards_are_shorter_than_40_lines():
    names = [name for name, guard in GUARDS.items() if guard.blocks("diff")] + ["accelerate_2"]
    assert len(names) == 5
    assert all(len(GUARDS[name].source.splitlines()) < LIMIT for name in names)


def test_each_framework_has_a_page_and_is_run():
    numbered = [
        f"{name}_{number}" for name, tests in NEEDED.items() for number in range(len(tests))
    ]
    assert sorted(GUARDS) == sorted(numbered)
    index = (DOCS / "frameworks.md").read_text()
    for name, page in PAGES.items():
        titles = re.findall(r"(?m)^## (.+)$", page)
        anchors = [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles]
        links = [f"{name}.md#{anchor}" for anchor in anchors] or [f"{name}.md"]
        assert [link for link in links if f"(frameworks/{link})" not in index] == []


def test_framework_tests_record_lines_of_their_pages(pytester):
    # Only looked for: imported here, they would be in this process for the rest of the session.
    installed = {
        name: GUARDS[name]
        for page, tests in NEEDED.items()
        for name, packages in ((f"{page}_{n}", needed) for n, needed in enumerate(tests))
        if all(map(find_spec, packages))
    }
    if not installed:
        pytest.skip("no framework is installed")
    pytester.makepyfile(**{f"test_{name}": guard.source for name, guard in installed.items()})
    arguments = ("-p", "no:cacheprovider")
    recorded = pytester.runpytest_subprocess(*arguments, "--snapshot-update").parseoutcomes()
    assert recorded.keys() <= {"passed", "warning", "warnings"}
    again = pytester.runpytest_subprocess(*arguments).parseoutcomes()
    assert again["passed"] == recorded["passed"] >= len(installed)
    for name, guard in installed.items():
        files = pytester.path.glob(f"snapshots/test_{name}/*.comm")
        lines = {line for file in files for line in file.read_text().splitlines()}
        assert set(guard.blocks("text")[0].splitlines()) - lines == set(), name
    fail(pytester, arguments, installed)
    simulate(pytester, arguments, installed.keys() - NOT_SIMULATED)


def fail(pytester, arguments, guards):
    """Each test reports the lines that its page shows, after the page's change."""
    for name, guard in guards.items():
        if not guard.blocks("diff"):
            continue
        path = pytester.path / f"test_{name}.py"
        path.write_text(guard.changed())
        output = pytester.runpytest_subprocess(*arguments, "-vv", path).outlines
        reported = [line.removeprefix("E").strip() for line in output if line.startswith("E ")]
        (failure,) = guard.blocks("text")[1:]
        for shown in failure.splitlines():
            assert any(line.startswith(shown) for line in reported), shown


def simulate(pytester, arguments, names):
    """Each test records the same of simulated ranks."""
    for name in names:
        source = GUARDS[name].source.replace("distributed(", "distributed(simulate=True, ")
        (pytester.path / f"test_simulated_{name}.py").write_text(source)
    recorded = pytester.runpytest_subprocess(
        *arguments, "--snapshot-update", *sorted(pytester.path.glob("test_simulated_*.py"))
    ).parseoutcomes()
    assert recorded.keys() <= {"passed", "warning", "warnings"}
    for name in names:
        for file in pytester.path.glob(f"snapshots/test_{name}/*.comm"):
            simulated = pytester.path / f"snapshots/test_simulated_{name}" / file.name
            assert sent(simulated) == sent(file)


def sent(file):
    """Without the header, and without what a snapshot says of simulated ranks alone."""
    text = file.read_text()
    if not file.name.endswith(".tree.comm"):
        text = format_profile(remove_overlap(parse_comm(text)))
    return [line for line in text.splitlines()[1:] if not line.startswith(("answered ", "ranks "))]
