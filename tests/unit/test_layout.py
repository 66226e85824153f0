"""Rules about the source itself: sizes, imports, and what importing wsync may do."""

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("wsync", "adapters")
CODE = (*LIBRARY, "tests", "benchmarks", "examples")
TEXT = (*CODE, "docs", "scripts", ".ci")

MAX_FILE_LINES = 400
MAX_MEDIAN_FILE_LINES = 200
MAX_P90_FUNCTION_LINES = 35

FRAMEWORKS = ("accelerate", "deepspeed", "megatron", "peft", "ray", "sglang", "transformers", "trl", "vllm")
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
# Calls that pickle without saying so.
PICKLING_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "ForkingPickler",
}
# The one place of the library that may touch environment variables, and reads them. The test kit starts ranks,
# and a rank is told what it is through its environment.
READS_ENVIRONMENT: tuple[str, ...] = ("wsync/transports/nccl_environment.py",)
STARTS_RANKS = "wsync/testing/"


def walk(*folders: str) -> Iterator[Path]:
    """Files below `folders`, without caches, each once (`wsync/adapters` is a link to `adapters`)."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT).parts
            if path.is_file() and "__pycache__" not in inside and inside[:2] != ("wsync", "adapters"):
                yield path


def python_files(*folders: str) -> list[Path]:
    return [path for path in walk(*folders) if path.suffix == ".py"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=relative(path))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Absolute names of imported modules; `from a import b` counts as `a` and as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def mentioned_names(tree: ast.Module) -> Iterator[str]:
    """Identifiers and attribute names that the code uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def test_the_walk_sees_the_library() -> None:
    seen = {relative(path) for path in python_files(*CODE)}
    assert {"wsync/errors.py", "adapters/engines/__init__.py", "tests/unit/test_layout.py"} <= seen
    assert not any(name.startswith("wsync/adapters/") for name in seen)


def test_adapters_is_a_relative_link() -> None:
    link = ROOT / "wsync" / "adapters"
    assert link.is_symlink()
    assert link.readlink() == Path("../adapters")


def test_no_file_is_too_long() -> None:
    sizes = {relative(path): num_lines(path) for path in python_files(*CODE)}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_files_of_the_library_are_short() -> None:
    sizes = [num_lines(path) for path in python_files(*LIBRARY)]
    assert statistics.median(size for size in sizes if size) <= MAX_MEDIAN_FILE_LINES


def test_functions_of_the_library_are_short() -> None:
    sizes = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in python_files(*LIBRARY)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert statistics.quantiles(sizes, n=10)[-1] <= MAX_P90_FUNCTION_LINES


def test_imports_are_absolute_and_name_the_package() -> None:
    offenders = []
    for path in python_files(*CODE):
        tree = parse(path)
        levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        roots = {name.split(".")[0] for name in imported_modules(tree)}
        if any(levels) or "adapters" in roots:
            offenders.append(relative(path))
    assert offenders == []


def test_nothing_in_the_library_pickles() -> None:
    offenders = []
    for path in python_files(*LIBRARY):
        tree = parse(path)
        used = {name.split(".")[0] for name in imported_modules(tree)} & PICKLERS
        used |= set(mentioned_names(tree)) & PICKLING_CALLS
        offenders += [f"{relative(path)}: {name}" for name in sorted(used)]
    assert offenders == []


def test_environment_variables_are_read_in_one_place() -> None:
    assert len(READS_ENVIRONMENT) <= 1
    access = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    offenders = []
    for path in python_files(*LIBRARY):
        tree = parse(path)
        names = set(mentioned_names(tree)) | {name.rsplit(".", 1)[-1] for name in imported_modules(tree)}
        if names & access and not relative(path).startswith((STARTS_RANKS, *READS_ENVIRONMENT)):
            offenders.append(relative(path))
    assert offenders == []


def test_nothing_names_a_machine() -> None:
    folders = "|".join(("work", "root", "home", "opt", "Users"))
    forbidden = re.compile(
        rf"(?<![\w./:~-])/(?:{folders})/|(?:extra-)?index-url|\bpypi\b\.|download\.pytorch", re.IGNORECASE
    )
    own_patterns = Path(__file__).resolve()
    files = [*walk(*TEXT), *(path for path in sorted(ROOT.iterdir()) if path.is_file())]
    offenders = []
    for path in files:
        if path.resolve() == own_patterns or path.suffix in {".png", ".svg", ".safetensors"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if forbidden.search(line):
                offenders.append(f"{relative(path)}:{number}: {line.strip()}")
    assert offenders == []


@pytest.mark.parametrize(
    "statement",
    ["import wsync", "import wsync.adapters, wsync.adapters.engines, wsync.adapters.trainers, wsync.transports"],
)
def test_importing_is_quiet_and_loads_no_framework(statement: str) -> None:
    report = f"import sys; print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{statement}\n{report}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    assert done.stderr == ""


def test_importing_changes_neither_environment_nor_signals_nor_threads() -> None:
    program = """
import os, signal, threading, torch
def state():
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    return dict(os.environ), handlers, threading.enumerate(), torch.get_num_threads()
before = state()
import wsync
assert state() == before
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
