"""Write the first lines of the table's failures anew, for review with ``git diff``.

usage: python tests/regressions/regenerate.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TABLE = Path(__file__).with_name("test_table.py")
EXPECTED = Path(__file__).with_name("expected.json")


def main() -> int:
    """Run the table and collect the first lines that it leaves.

    Returns:
        0, or 1 if a case did not get as far as its first line and keeps its old one.
    """
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        # Tests whose line changed fail: that is what this command is for.
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", "-n", "2", str(TABLE)],
            env={**os.environ, "FSDP_COMM_TABLE": directory},
            check=False,
        )
        written = {}
        for file in Path(directory).glob("*/first_lines.json"):
            written |= json.loads(file.read_text(encoding="utf-8"))
    missing = sorted(expected.keys() - written.keys())
    lines = json.dumps(expected | written, indent=1, sort_keys=True, ensure_ascii=False)
    EXPECTED.write_text(lines + "\n", encoding="utf-8")
    for title in missing:
        sys.stdout.write(f"no first line, the old one stays: {title}\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
