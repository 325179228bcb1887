"""``python -m pytest_fsdp_comm``: the program ``fsdp-comm``."""

import sys

from pytest_fsdp_comm.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
