"""README's tables are those of the registry, and every page that they name is there."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import wsync

ROOT = Path(__file__).parents[2]


def test_every_setting_is_on_its_page() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(wsync.SyncConfig)]


def test_readme_has_the_tables_of_the_registry() -> None:
    made = subprocess.run(
        [sys.executable, "scripts/tables"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()
    assert made in (ROOT / "README.md").read_text(), "run scripts/tables --write"
    pages = re.findall(r"\]\(([^)]+)\)", made)
    assert pages
    missing = [page for page in pages if not (ROOT / page).is_file()]
    assert not missing, f"pages that the tables name and that are not there: {missing}"
