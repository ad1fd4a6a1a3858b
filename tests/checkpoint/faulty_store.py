"""An object store in this process that fails, or dies with the process that uses it, at a chosen request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Died(BaseException):
    """The process was killed here; nothing that it still tries reaches the store."""


class FaultyStore(MemoryFileSystem):  # type: ignore[misc]
    """`faulty://`: objects in memory, and a hook that is called before and after each request."""

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    hook: Callable[[str], None] = staticmethod(lambda request: None)

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.hook = staticmethod(lambda request: None)

    def _ask(self, name: str, *given: Any, **options: Any) -> Any:
        type(self).hook(f"before {name} {given[0]}")
        answer = getattr(super(), name)(*given, **options)
        type(self).hook(f"after {name} {given[0]}")
        return answer

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return self._ask("open", path, mode, **options) if "x" in mode else super().open(path, mode, **options)

    def pipe_file(self, *given: Any, **options: Any) -> Any:
        return self._ask("pipe_file", *given, **options)

    def cat_file(self, *given: Any, **options: Any) -> Any:
        return self._ask("cat_file", *given, **options)

    def info(self, *given: Any, **options: Any) -> Any:
        return self._ask("info", *given, **options)

    def find(self, *given: Any, **options: Any) -> Any:
        return self._ask("find", *given, **options)

    def rm_file(self, *given: Any, **options: Any) -> Any:
        return self._ask("rm_file", *given, **options)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)


class FailAt:
    """A hook that fails at the n-th call: once, or, with `Died`, from then on."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.number, self.error = number, error
        self.count = 0
        self.request = ""

    def __call__(self, request: str) -> None:
        self.count += 1
        if self.count == self.number or (self.count > self.number and isinstance(self.error, Died)):
            self.request = self.request or request
            raise self.error
