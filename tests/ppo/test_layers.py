"""The table of layers in README.md: each file knows those above it, and none below."""

import ast
import re
from pathlib import Path

import integrations.ppo

FOLDER = Path(integrations.ppo.__file__).parent
PACKAGE = "integrations.ppo"


def table() -> dict[str, int]:
    """File or folder -> the row that names it, from the top."""
    text = (FOLDER / "README.md").read_text().split("## Layers")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name: number for number, row in enumerate(rows) for name in re.findall(r"`([\w./]+)`", row)}


def row_of(layers: dict[str, int], path: Path) -> int:
    """Raises `KeyError` for a file that no row names."""
    inside = path.relative_to(FOLDER)
    return layers[inside.name if len(inside.parts) == 1 else f"{inside.parts[0]}/"]


def imported(path: Path) -> set[Path]:
    """Files of this trainer that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGE):
            continue
        for name in (node.module, *(f"{node.module}.{one.name}" for one in node.names)):
            place = FOLDER.joinpath(*str(name).split(".")[2:])
            found |= {one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()}
    return found - {FOLDER / "__init__.py"}


FILES = [path for path in sorted(FOLDER.rglob("*.py")) if path != FOLDER / "__init__.py"]


def test_the_table_has_every_file_and_no_other() -> None:
    layers = table()
    assert {row_of(layers, path) for path in FILES} == set(layers.values())
    assert all((FOLDER / name).exists() for name in layers)


def test_imports_go_up() -> None:
    layers, wrong = table(), []
    for path in FILES:
        below = [one for one in imported(path) if row_of(layers, one) > row_of(layers, path)]
        wrong += [f"{path.relative_to(FOLDER)} imports {one.relative_to(FOLDER)}" for one in below]
    assert wrong == []


def test_a_strategy_neither_scores_nor_evaluates() -> None:
    """R11."""
    known = {
        one.relative_to(FOLDER).parts[0] for path in FILES if path.parent.name == "strategy" for one in imported(path)
    }
    assert {"engines", "log_probs.py"} <= known, "the search finds nothing"
    assert known.isdisjoint({"advantages.py", "losses.py", "kl.py", "rewards", "experience_maker.py", "trainer"})
