"""`python -m wsync.bench`."""

import sys

from wsync.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
