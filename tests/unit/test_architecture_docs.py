"""Files, rooms and notes that docs/architecture.md and comments name exist."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "pytest_fsdp_comm"


def test_files_and_rooms_on_the_page_exist():
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE))
    assert len(named) > 30
    for name in named:
        # A file may be named without its room, after another file of the same room.
        matches = [(ROOT / name).exists(), (PACKAGE / name).exists(), *PACKAGE.rglob(name)]
        assert any(matches), name


def test_test_files_named_in_any_file_exist():
    """Check the package, the docs, the settings, the tests and the benchmarks."""
    places = [PACKAGE, ROOT / "docs", ROOT / "tests", ROOT / "benchmarks"]
    files = [file for place in places for file in place.rglob("*") if file.suffix in {".py", ".md"}]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.py")]
    named = {
        (file, name)
        for file in files
        for name in re.findall(r"\btests/[\w/]+\.py", file.read_text(encoding="utf-8"))
        # An example from a user's project.
        if re.match(r"tests/(unit|recording|sharding|acceptance|regressions|typing)/", name)
    }
    assert len(named) > 20
    for file, name in named:
        assert (ROOT / name).exists(), f"{file} names {name}"


def test_page_describes_every_room():
    rooms = {file.parent for file in PACKAGE.rglob("*.py")} - {PACKAGE}
    for room in rooms:
        assert f"`{room.relative_to(PACKAGE)}/`" in PAGE or f"`{room.name}/`" in PAGE or (
            f"`{room.name}`" in PAGE
        ), room  # fmt: skip
        text = (room / "__init__.py").read_text()
        assert re.match(r'"""[A-Z].{20,}', text), room


def test_notes_are_unique_and_referred_to():
    written, named = Counter(), Counter()
    for file in PACKAGE.rglob("*"):
        if file.suffix in {".py", ".js", ".css", ".jinja"}:
            text = file.read_text(encoding="utf-8")
            written.update(re.findall(r"^\s*(?:#|//) Note \[([^\]]+)\](?::|$)", text, re.MULTILINE))
            named.update(re.findall(r"Note \[([^\]]+)\]", re.sub(r"\n\s*(?:#|//)?\s*", " ", text)))
    assert len(written) > 30
    assert {name: count for name, count in written.items() if count > 1} == {}
    assert named.keys() - written.keys() == set()
    # A mechanism that nothing else refers to needs no name: a plain comment is enough.
    assert {name for name in written if named[name] < 2} == set()
