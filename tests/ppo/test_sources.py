"""Mistakes that were seen in other trainers' sources, looked for in ours."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import integrations.ppo

FOLDER = Path(integrations.ppo.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: bodies of functions do not, their defaults do."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                yield from ast.walk(default)
        else:
            yield from at_import(node)


def cuda_calls(source: str) -> list[str]:
    calls = [ast.unparse(node.func) for node in at_import(ast.parse(source)) if isinstance(node, ast.Call)]
    return [name for name in calls if "cuda" in name]


def version_comparisons(source: str) -> list[str]:
    comparisons = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return [one for one in comparisons if "__version__" in one]


def test_the_search_finds_what_it_looks_for() -> None:
    assert cuda_calls("def f(d=torch.cuda.current_device()): g(torch.cuda.is_available())") == [
        "torch.cuda.current_device"
    ]
    assert version_comparisons("x = torch.__version__ >= '2.6'") == ["torch.__version__ >= '2.6'"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_device_at_import_and_no_version_compared_as_text(path: Path) -> None:
    assert not cuda_calls(path.read_text())
    assert not version_comparisons(path.read_text())
