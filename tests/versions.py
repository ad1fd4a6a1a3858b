"""Which versions a page of results is of, and what torch has compiled."""

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


def compile_counts() -> dict[str, int]:
    """Return how many graphs torch has compiled in this process so far, and how often a function had to be left."""
    from torch._dynamo.utils import counters

    return {"graphs": int(counters["stats"]["unique_graphs"]), "breaks": sum(counters["graph_break"].values())}
