"""`python -m cornstarch.demo FOLDER`: write the demo's config and examples."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cornstarch.demo.demo_files import write_demo
from cornstarch.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Write the files, and print what they are and how to use them."""
    parser = argparse.ArgumentParser(
        prog="python -m cornstarch.demo", description="Write the demo's config and examples to ask its model about."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; created if it does not exist")
    folder: Path = parser.parse_args(arguments).folder
    try:
        written = write_demo(folder)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    width = max(len(str(folder / name)) for name in written)
    for name, meaning in written.items():
        print(f"{folder / name!s:{width}}  {meaning}")
    print(f"\nTrain: cornstarch train {folder / 'demo.yaml'}")
    print(f'Then:  cornstarch generate runs/demo "which digit is <image> ?" --image {folder / "digit.png"}')
    print(f'       cornstarch generate runs/demo "who says <audio> ?" --audio {folder / "speaker.npy"}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
