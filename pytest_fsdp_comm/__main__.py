"""Run the program ``fsdp-comm`` as ``python -m pytest_fsdp_comm``."""

import sys

from pytest_fsdp_comm.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
