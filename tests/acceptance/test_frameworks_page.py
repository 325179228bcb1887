"""The tests of docs/frameworks/ pass, and record what their pages show of their snapshots."""

import re
from importlib.util import find_spec
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.stem: page.read_text() for page in (DOCS / "frameworks").glob("*.md")}
# What a page's test imports; a page whose framework is missing here is not run.
NEEDED = {
    "torchtitan": {"torchtitan", "triton"},
    "torchao": {"torchao"},
    "accelerate": {"accelerate"},
    "trainer": {"accelerate"},
    "peft": {"peft"},
    "transformers": {"transformers", "accelerate"},
    "transformers_experts": {"transformers", "accelerate"},
    "trl": {"trl"},
    "megatron": {"megatron_fsdp"},
    "lightning": {"lightning"},
    "pipelines": set(),
}


def block(framework, language):
    (found,) = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGES[framework])
    return found


def test_each_framework_has_a_page_and_is_run():
    assert PAGES.keys() == NEEDED.keys()
    index = (DOCS / "frameworks.md").read_text()
    assert all(f"(frameworks/{framework}.md)" in index for framework in NEEDED)


def test_framework_tests_record_lines_of_their_pages(pytester):
    # Only looked for: imported here, they would be in this process for the rest of the session.
    installed = [
        framework for framework, packages in NEEDED.items() if all(map(find_spec, packages))
    ]
    pytester.makepyfile(**{f"test_{name}": block(name, "python") for name in installed})
    arguments = ("-p", "no:cacheprovider")
    recorded = pytester.runpytest_subprocess(*arguments, "--snapshot-update").parseoutcomes()
    assert recorded.keys() <= {"passed", "warning", "warnings"}
    again = pytester.runpytest_subprocess(*arguments).parseoutcomes()
    assert again["passed"] == recorded["passed"] >= len(installed)
    for name in installed:
        files = pytester.path.glob(f"snapshots/test_{name}/*.comm")
        lines = {line for file in files for line in file.read_text().splitlines()}
        assert lines.issuperset(block(name, "text").splitlines())
    simulate(pytester, arguments, [name for name in installed if name != "megatron"])


def simulate(pytester, arguments, names):
    """Each page records the same of simulated ranks."""
    for name in names:
        how = "simulate=True"
        if name == "pipelines":  # whose ranks differ
            how += ", ranks='all', real={'pp': (2, 2)}"
        source = block(name, "python").replace("distributed(", f"distributed({how}, ")
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
