"""What `import wsync` offers: the names, their order, and that documents speak only of what is there."""

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import wsync

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md")
FIXED = {
    "Bucket",
    "Engine",
    "Loader",
    "Plan",
    "Producer",
    "Receiver",
    "Region",
    "Sender",
    "Session",
    "SyncConfig",
    "SyncReport",
    "TensorMeta",
    "TensorSpec",
    "Ticket",
    "Transport",
    "WsyncError",
    "connect",
    "merge_weight_chunks",
    "split_weight_chunks",
    "sync",
    "sync_async",
}


def test_all_is_sorted_and_is_what_is_public() -> None:
    public = {name for name, value in vars(wsync).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert list(wsync.__all__) == sorted(wsync.__all__)
    assert set(wsync.__all__) == public
    assert len(wsync.__all__) == len(public)


def test_the_fixed_names_are_there() -> None:
    assert set(wsync.__all__) >= FIXED


def test_every_error_is_public() -> None:
    import wsync.errors

    errors = {
        name
        for name, value in vars(wsync.errors).items()
        if inspect.isclass(value) and issubclass(value, wsync.WsyncError)
    }
    assert errors <= set(wsync.__all__)


@pytest.mark.parametrize("name", sorted(wsync.__all__))
def test_public_names_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(wsync, name))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_only_what_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w./-])wsync\.([A-Za-z_][\w.]*\w)", text))
    unknown = [name for name in sorted(names) if not exists(name)]
    assert unknown == []


def exists(name: str) -> bool:
    """Whether `wsync.<name>` is public, or a module below wsync, or a top-level name of one. Imports nothing."""
    if name.split(".")[0] in wsync.__all__:
        return True
    path = ROOT / "wsync" / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    if not module.is_file():
        return False
    statements = ast.parse(module.read_text(encoding="utf-8")).body
    return path.name in {getattr(statement, "name", None) for statement in statements}
