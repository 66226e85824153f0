"""`python -m wsync.planner`."""

import sys

from wsync.planner.cli import main

if __name__ == "__main__":
    sys.exit(main())
