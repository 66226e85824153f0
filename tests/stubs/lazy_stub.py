"""Packages that SGLang imports and a text model on a CPU never calls: any name can be imported, none can be called."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class Missing:
    """A name of a stub package. It can be looked at, compared and hashed; calling it raises."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self.__name__} was called, and there is only a stub of it here")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every submodule of one stub package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stub(package: str, version: str) -> None:
    """Turn the module `package`, which is being imported, into a stub."""
    module = sys.modules[package]
    module.__class__ = _Module
    module.__version__ = version  # type: ignore[attr-defined]
    sys.meta_path.append(_Finder(package))
