"""The first line of the failure text of each case.

``python tests/regressions/regenerate.py`` writes `FILE` anew, with the pinned torch.
"""

import json
from pathlib import Path

from derived import REDUCES_IN_OWN_TYPE

FILE = Path(__file__).with_name("expected.json")
EXPECTED: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
# Older torch has DTensor reduce partial gradients in param_dtype.
if REDUCES_IN_OWN_TYPE:
    for name in ("both_mixed_precision", "checkpointing_and_mixed_precision"):
        for title in (name, f"{name}, back"):
            EXPECTED[title] = EXPECTED[title].replace(", gradients[tp]", "")
