"""Code that does not come with Cornstarch: modules that register parts, and what a config names. No torch.

A config can name any function of any installed package, and a run's folder contains a config. Opening a folder that
somebody else has made must not run code. So what a config names is imported only from modules that the user names
outside of it: on the command line (`--allow-code my_package`) or in Python (`allow_code("my_package")`).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from cornstarch.errors import ConfigError

# Environment variables, because worker processes and the processes of a trial need the same modules.
EXTENSIONS = "CORNSTARCH_IMPORT"
"""The environment variable with the modules of `cornstarch --import`, separated by commas."""
ALLOWED = "CORNSTARCH_ALLOW_CODE"
"""The environment variable with what `allow_code` was given: a JSON list."""
_KEY_BYTES = 32
_OWN = [f"cornstarch.demo:{name}" for name in ("digits", "parity", "speakers")]  # rows that come with Cornstarch


def import_extensions(modules: Sequence[str] = ()) -> None:
    """Import modules that register parts, and those of the process that started this one; set `EXTENSIONS`."""
    names = list(dict.fromkeys([*_list_extensions(), *modules]))
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(f"--import {name}: the module cannot be imported ({error}).") from error
    if names:
        os.environ[EXTENSIONS] = ",".join(names)


def allow_code(*names: str) -> None:
    """Allow configs to use code from these packages, modules, or models (`trust_remote_code`), until the process ends.

    A module that was imported with `cornstarch --import` is allowed, too.
    """
    known = _list_allowed()
    os.environ[ALLOWED] = json.dumps(list(dict.fromkeys([*known, *names])))


def allow_in(environment: dict[str, str], *names: str) -> None:
    """Allow code in the processes that get these environment variables, beside what is allowed here."""
    environment[ALLOWED] = json.dumps([*_list_allowed(), *names])


def import_named(where: str, path: str) -> Any:
    """Return what a config names as `package.module:name`; refuse modules that the user has not allowed.

    `where` says where the name is from: the key of the config, and its value.
    """
    module, _, names = path.partition(":")
    if path not in _OWN:
        _check_module(where, module)
    try:
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
            if isinstance(found, ModuleType):
                # `my_package:os.system` is not the code of my_package, but what it happens to import.
                raise ConfigError(
                    f"{where}\n  {name} is another module; name the module where the function is defined."
                )
    except ConfigError:
        raise
    except Exception as error:  # importing runs the user's code
        raise ConfigError(f"{where}\n  It cannot be imported: {type(error).__name__}: {error}.") from error
    if path not in _OWN and isinstance(origin := getattr(found, "__module__", None), str):
        _check_module(where, origin)
    return found


def is_code_allowed(name: str) -> bool:
    """Return whether the user has allowed the code in a folder, or of a model."""
    return name in _list_allowed()


def read_signing_key() -> bytes | None:
    """Return the key with which this user signs files that are run when they are read; None if there can be none.

    It is made on first use, in a file of the user's own that others cannot read.
    """
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "cornstarch"
    path = folder / "signing.key"
    try:
        if not path.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=folder)  # ranks may do so at the same time: the first one's key counts
            with os.fdopen(handle, "wb") as file:
                file.write(os.urandom(_KEY_BYTES))
            with suppress(FileExistsError):
                os.link(name, path)
            os.unlink(name)
        key = path.read_bytes()
    except OSError:  # a home that cannot be written
        return None
    return key if len(key) == _KEY_BYTES else None


def check_remote_code(source: str | None) -> None:
    """Refuse `trust_remote_code` of a config for a folder or hub name whose code the user has not allowed."""
    if source not in _list_allowed():
        raise ConfigError(
            f"trust_remote_code = true for {source or 'a model without a path'}\n  Code in a model's folder runs only "
            f"if you allow it outside of the config. If you trust it, add --allow-code {source or '<path>'} to the "
            f"command; in Python: cornstarch.allow_code({source or '<path>'!r})."
        )


def _check_module(where: str, module: str) -> None:
    names = [*_list_extensions(), *_list_allowed()]
    if not any(module == name or module.startswith(f"{name}.") for name in names):
        package = module.partition(".")[0]
        raise ConfigError(
            f"{where}\n  It is code of {package}, which a config may use only if you allow it. If you trust it, add "
            f"--allow-code {package} to the command; in Python: cornstarch.allow_code({package!r})."
        )


def _list_extensions() -> list[str]:
    return list(filter(None, os.environ.get(EXTENSIONS, "").split(",")))


def _list_allowed() -> list[str]:
    try:
        found = json.loads(os.environ.get(ALLOWED, "[]"))
    except json.JSONDecodeError as error:
        raise ConfigError(f'{ALLOWED} is no JSON list ({error}); expected a list such as ["my_package"].') from error
    return [str(one) for one in found] if isinstance(found, list) else [str(found)]
