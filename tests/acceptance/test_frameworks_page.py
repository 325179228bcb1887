"""The tests of docs/frameworks/ pass, and record and report what their pages show."""

import re
from importlib.util import find_spec
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.stem: page.read_text() for page in (DOCS / "frameworks").glob("*.md")}
# What a page's test imports; a page whose framework is missing here is not run.
NEEDED = {
    "torchtitan": {"torchtitan", "triton"},
    "torchtitan_405b": {"torchtitan", "triton"},
    "torchao": {"torchao"},
    "accelerate": {"accelerate"},
    "trainer": {"accelerate"},
    "peft": {"peft"},
    "transformers": {"transformers", "accelerate"},
    "transformers_experts": {"transformers", "accelerate"},
    "trl": {"trl"},
    "automodel": {"nemo_automodel", "megatron_fsdp", "torchdata", "transformers"},
    "automodel_experts": {"nemo_automodel", "megatron_fsdp", "torchdata", "transformers"},
    "megatron": {"megatron_fsdp"},
    "lightning": {"lightning"},
    "pipelines": set(),
}


# Their tests cannot be simulated, or are simulated on the page.
NOT_SIMULATED = {"megatron", "torchtitan_405b"}
LIMIT = 40


def blocks(framework, language):
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGES[framework])


def source_of(framework):
    (source,) = blocks(framework, "python")
    return source


def changed(framework):
    """Return the test of a page after the change that the page shows, if any."""
    source = source_of(framework)
    for lines in map(str.splitlines, blocks(framework, "diff")):
        before, after = (
            "".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +")
        )
        assert source.count(before) == 1
        source = source.replace(before, after)
    return source


def test_guards_are_shorter_than_40_lines():
    guards = [name for name in PAGES if blocks(name, "diff")] + ["trl"]
    assert len(guards) == 5
    assert all(len(source_of(name).splitlines()) < LIMIT for name in guards)


def test_each_framework_has_a_page_and_is_run():
    assert PAGES.keys() == NEEDED.keys()
    index = (DOCS / "frameworks.md").read_text()
    assert all(f"(frameworks/{framework}.md)" in index for framework in NEEDED)


def test_framework_tests_record_lines_of_their_pages(pytester):
    # Only looked for: imported here, they would be in this process for the rest of the session.
    installed = [
        framework for framework, packages in NEEDED.items() if all(map(find_spec, packages))
    ]
    pytester.makepyfile(**{f"test_{name}": source_of(name) for name in installed})
    arguments = ("-p", "no:cacheprovider")
    recorded = pytester.runpytest_subprocess(*arguments, "--snapshot-update").parseoutcomes()
    assert recorded.keys() <= {"passed", "warning", "warnings"}
    again = pytester.runpytest_subprocess(*arguments).parseoutcomes()
    assert again["passed"] == recorded["passed"] >= len(installed)
    for name in installed:
        files = pytester.path.glob(f"snapshots/test_{name}/*.comm")
        lines = {line for file in files for line in file.read_text().splitlines()}
        assert lines.issuperset(blocks(name, "text")[0].splitlines())
    fail(pytester, arguments, [name for name in installed if blocks(name, "diff")])
    simulate(pytester, arguments, [name for name in installed if name not in NOT_SIMULATED])


def fail(pytester, arguments, names):
    """Each page's test reports the lines that the page shows, after the page's change."""
    for name in names:
        path = pytester.path / f"test_{name}.py"
        path.write_text(changed(name))
        output = pytester.runpytest_subprocess(*arguments, "-vv", path).outlines
        reported = [line.removeprefix("E").strip() for line in output if line.startswith("E ")]
        (failure,) = blocks(name, "text")[1:]
        for shown in failure.splitlines():
            assert any(line.startswith(shown) for line in reported), shown


def simulate(pytester, arguments, names):
    """Each page records the same of simulated ranks."""
    for name in names:
        how = "simulate=True"
        if name == "pipelines":  # whose ranks differ
            how += ", ranks='all', real={'pp': (2, 2)}"
        source = source_of(name).replace("distributed(", f"distributed({how}, ")
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
    lines = file.read_text().splitlines()[1:]
    return [line for line in lines if not line.startswith(("answered ", "ranks "))]
