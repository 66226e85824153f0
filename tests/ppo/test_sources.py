"""Mistakes that were seen in other trainers' sources, looked for in ours."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import integrations.ppo
from integrations.ppo.arguments import Arguments

FOLDER = Path(integrations.ppo.__file__).parent
ROOT = FOLDER.parents[1]
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


def stubs(source: str) -> list[str]:
    """Functions that answer what they were to work out, and notes that something is to be done."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    answers = {node.name: node.body[-1] for node in functions if len(node.body) - bool(ast.get_docstring(node)) == 1}
    found = [name for name, line in answers.items() if isinstance(line, ast.Return) and is_constant(line.value)]
    return [*found, *re.findall("TODO|FIXME|NotImplementedError", source)]


def is_constant(value: ast.expr | None) -> bool:
    return value is None or isinstance(value, ast.Constant)


def read_options(source: str) -> set[str]:
    """Names that are looked up in arguments, `args.name` or `self._args.name`."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in found if ast.unparse(node.value).rpartition(".")[2] in ("args", "_args")}


def allocator_settings(source: str) -> list[str]:
    return re.findall(r"PYTORCH\w*ALLOC\w*|expandable_segments:|set_?allocator_?settings", source, re.IGNORECASE)


def test_the_search_finds_what_it_looks_for() -> None:
    assert cuda_calls("def f(d=torch.cuda.current_device()): g(torch.cuda.is_available())") == [
        "torch.cuda.current_device"
    ]
    assert version_comparisons("x = torch.__version__ >= '2.6'") == ["torch.__version__ >= '2.6'"]
    assert stubs("def f(a):\n    'doc'\n    return False\ndef g(a):\n    return a  # TODO") == ["f", "TODO"]
    assert read_options("a = args.one + self.args.two + self._args.three + other.four") == {"one", "two", "three"}
    assert allocator_settings("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'") == [
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:",
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_device_at_import_and_no_version_compared_as_text(path: Path) -> None:
    """R75, R76."""
    assert not cuda_calls(path.read_text())
    assert not version_comparisons(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_nothing_is_left_to_be_written(path: Path) -> None:
    """R64: whether to switch modes was seen to be answered with False, always."""
    assert not stubs(path.read_text())


def test_every_option_is_read() -> None:
    """R79: `loss_agg_mode` was seen to be taken and ignored."""
    read = {name for path in SOURCES if path.name != "conflicts.py" for name in read_options(path.read_text())}
    properties = (FOLDER / "arguments.py").read_text().replace("self.", "args.")
    assert {one.name for one in fields(Arguments)} - read - read_options(properties) == set()


def test_nobody_switches_the_allocator() -> None:
    """R80: expandable segments were seen to be forced on after a sync. wsync says what they are, and leaves them."""
    library = [path for folder in ("wsync", "adapters") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [path for path in (*SOURCES, *library) if allocator_settings(path.read_text())] == []
