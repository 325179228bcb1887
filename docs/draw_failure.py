"""Draw docs/pictures/failure.svg: the example fails after an edit that looks harmless.

Run `python docs/draw_failure.py` if the words or colours of a failure change.
``tests/acceptance/test_demonstrations.py`` makes the same edit and compares the texts.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "failure.svg"
COLUMNS = 100

# rich's template without its web font: browsers do not load fonts for an SVG in an <img>.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
    font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
}}
{styles}
</style>
<defs>
{lines}
</defs>
<rect fill="#0d1117" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, 24)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Run the edited example and write the picture."""
    with tempfile.TemporaryDirectory() as scratch:
        output = fail(Path(scratch))
    failure = output[output.index(">       ") :]
    failure = failure[: re.search(r"^-+ snapshot report", failure, flags=re.MULTILINE).start()]
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    for line in failure.splitlines():
        console.print(indented(Text.from_ansi(line), console), soft_wrap=True)
    svg = console.export_svg(code_format=SVG, unique_id="failure", title="")
    # rich pads lines with spaces.
    PICTURE.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")


def fail(project: Path) -> str:
    """Return what pytest prints in colour if ``lm_head`` is passed to `fully_shard`."""
    for part in ("examples", "snapshots"):
        shutil.copytree(ROOT / part, project / part)
    # The copy needs a root directory without the options of this repository.
    (project / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    code = project / "examples" / "llama_training.py"
    root = "    fully_shard(model, mesh=mesh)\n"
    edited = code.read_text(encoding="utf-8").replace(
        root, f"    fully_shard(model.lm_head, mesh=mesh)\n{root}"
    )
    code.write_text(edited, encoding="utf-8")
    test = "examples/test_llama.py::test_train_step[untied]"
    command = [sys.executable, "-m", "pytest", "--color=yes", "--world-size", "4", test]
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    result = subprocess.run(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    return result.stdout


def indented(line: Text, console: Console) -> Text:
    """Wrap a line at spaces, and indent the new lines like the first one."""
    indent = len(line.plain) - len(line.plain.lstrip("E> "))
    first, *further = line[indent:].wrap(console, COLUMNS - indent)
    return Text("\n").join([line[:indent] + first, *(Text(" " * indent) + row for row in further)])


if __name__ == "__main__":
    main()
