"""Which versions a page of results is of."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions_of(*packages: str) -> str:
    """Return the names and versions of those of these packages that are installed."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
