"""Links, commands, settings and environment variables on pages exist; the README is short."""

import ast
import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from _pytest.config.argparsing import Parser

import pytest_fsdp_comm
from pytest_fsdp_comm.options import PATH_OPTIONS, add_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "tests" / "README.md"])
PACKAGE = ROOT / "pytest_fsdp_comm"


def without_code(text):
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", text)


def anchors(page):
    """Return the anchors of headings, as GitHub and MyST create them."""
    headings = re.findall(r"(?m)^#+ (.+)$", without_code(page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_each_page_has_a_place_in_the_navigation():
    tree = re.compile(r"(?ms)^```\{toctree\}\n(.*?)^```$")
    trees = "".join(text for page in DOCS.rglob("*.md") for text in tree.findall(page.read_text()))
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert pages - {"index"} <= set(trees.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_a_page_is_valid(page):
    for block in re.findall(r"(?ms)^```python.*?\n(.*?)^```$", page.read_text()):
        compile(block, str(page), "exec")


def test_commands_on_pages_have_options_that_exist(pytestconfig):
    options = set(re.findall(r"(--[a-z-]+|-\w)\b", pytestconfig._parser.optparser.format_help()))
    sessions = set(re.findall(r"(?m)^def (\w+)\(session", (ROOT / "noxfile.py").read_text()))
    named = 0
    for page in PAGES:
        text = page.read_text()
        for command in re.findall(r"(?:`|^\$ |-m )(pytest -[^`\n]*)", text, re.MULTILINE):
            named += 1
            used = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", command))
            assert used - options - {"-n", "-vv"} == set(), f"{page.name}: {command}"
        assert set(re.findall(r"\bnox -s (\w+)", text)) <= sessions, page.name
        for script in re.findall(r"`python3? ([\w/]+\.py)", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"
    assert named > 10


def test_path_options_on_pages_have_an_equals_sign(pytestconfig):
    """A path as a separate argument may change pytest's root directory."""
    parser = Parser(_ispytest=True)
    add_options(parser)
    group = parser.getgroup("fsdp-comm").options
    paths = {option.names()[0] for option in group if option.attrs()["metavar"] in {"DIR", "FILE"}}
    assert paths == set(PATH_OPTIONS)
    help_text = pytestconfig._parser.optparser.format_help()
    workflows = (ROOT / ".github").rglob("*.yml")
    texts = {file: file.read_text() for file in [*PAGES, *workflows, *PACKAGE.rglob("*.py")]}
    for option in PATH_OPTIONS:
        assert f"  {option}=" in help_text
        for file, text in texts.items():
            assert re.findall(rf"{option}\s+[^\s|]+", text) == [], file


def test_the_table_of_settings_matches_the_code():
    table = runpy.run_path(str(DOCS / "settings_table.py"))["table"]()
    page = (DOCS / "reference" / "options.md").read_text()
    assert table in page, "run: python docs/settings_table.py"


def test_every_environment_variable_is_documented():
    """Check all variables but those that only this plugin or torchrun sets and reads."""
    internal = {"PYTEST_FSDP_COMM_LAUNCH", "PYTEST_FSDP_COMM_LAUNCHED", "PYTEST_FSDP_COMM_RANK"}
    internal |= {"PYTEST_FSDP_COMM_OWN_RANK", "PYTEST_FSDP_COMM_COLLECTION", "PYTEST_CURRENT_TEST"}
    internal |= {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
    foreign = ("GIT_", "SEEK_", "TORCHELASTIC_", "TORCH_NCCL_", "DDP_")
    text = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r'"((?:[A-Z]+_)+[A-Z]+|CI|RANK)"', file.read_text()):
            if name not in internal and not name.startswith(foreign):
                assert f"`{name}`" in text, f"{name} of {file.relative_to(ROOT)} is on no page"


def written_text(node):
    """Return the text of a string in the code, with `...` for its variable parts."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(written_text, node.values))
    return "..."


def test_symptoms_on_the_page_are_messages_of_the_code():
    page = (DOCS / "how-to" / "troubleshooting.md").read_text().partition("\n## Nothing is")[0]
    symptoms = re.findall(r"(?m)^\| (`.+?) \| ", page)
    assert 15 <= len(symptoms) <= 30
    files = [file.read_text() for file in PACKAGE.rglob("*.py")]
    strings = [written_text(node) for text in files for node in ast.walk(ast.parse(text))]
    messages = "\n".join(strings).replace("{", "").replace("}", "")
    for symptom in re.findall(r"`(.+?)`", "".join(symptoms)):
        parts = [part.strip(" ,()") for part in symptom.split("...")]
        assert [part for part in parts if part not in messages] == [], symptom


def test_first_lines_for_reviewers_are_first_lines_of_failures():
    page = (DOCS / "how-to" / "reviewing.md").read_text()
    shown = re.findall(r"(?m)^\| `(.+?)` \| ", page)
    assert len(shown) > 20
    expected = json.loads((ROOT / "tests" / "regressions" / "expected.json").read_text())
    # Pages whose own tests compare these lines.
    others = [(DOCS / name).read_text() for name in ("how-to/overlap.md", "recording.md")]
    for line in shown:
        assert any(first.startswith(line) for first in expected.values()) or any(
            line in text for text in others
        ), line


def test_the_reference_has_every_public_name():
    page = (DOCS / "reference" / "api.md").read_text()
    listed = re.findall(r"auto(?:class|exception|function):: (\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(pytest_fsdp_comm.__all__)


def test_readme_is_short_and_starts_with_the_problem():
    assert len(README.split()) < 700
    problem = without_code(README).split("\n## ")[0]
    # One link for each claim, and the picture.
    assert len(re.findall(r"\]\(https://github\.com/\S+\)", problem)) == 2
    assert "![" in problem


def test_unreleased_version_is_not_on_pypi():
    is_released = re.search(r"(?m)^## \[\d", (ROOT / "CHANGELOG.md").read_text()) is not None
    workflow = ROOT / ".github/workflows/communication-gate.yml"
    for file in [ROOT / "README.md", *DOCS.rglob("*.md"), workflow]:
        text = file.read_text()
        installs = re.search(r"pip install .*pytest-fsdp-comm(?!\[)", text) is not None
        assert ("ntil the first release" in text) == (installs and not is_released), file


def test_readme_links_on_pypi_lead_to_the_repository():
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = metadata["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = README
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    targets = re.findall(r"\]\((.+?)\)", without_code(text))
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    source = metadata["project"]["urls"]["Source"]
    assert f"({source}/blob/main/docs/tutorial.md)" in text
    assert (
        f"({source.replace('github.com', 'raw.githubusercontent.com')}/main/docs/pictures" in text
    )
