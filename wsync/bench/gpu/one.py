"""One case in this process: `python -m wsync.bench.gpu.one CASE FILE` writes its outcome to FILE."""

import json
import os
import sys
from pathlib import Path


def main(name: str, out: Path) -> None:
    """Run it. The environment is this process's own: it ends with the case."""
    from wsync.bench.gpu.cases import CASES

    outcome = CASES[name].run(name)
    unfinished = out.with_suffix(".part")
    unfinished.write_text(json.dumps(outcome.as_json()))
    unfinished.replace(out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # an engine's threads would keep the process
