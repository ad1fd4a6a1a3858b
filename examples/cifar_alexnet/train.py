"""Run the training of run.yaml from Python, with existing objects: a module, a loss and datasets.

python examples/cifar_alexnet/train.py
"""

from __future__ import annotations

import argparse
from typing import Any

import datasets
from alexnet import build, loss
from torch.utils.data import Dataset

from cornstarch.train import Trainer


class Images(Dataset):
    """A torch dataset. Any map-style dataset of dictionaries, or of pairs of inputs and labels, works."""

    def __init__(self, table: datasets.Dataset) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._table[index]
        return {"image": row["img"], "label": row["label"]}


def main() -> None:
    """Train and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a folder written by save_to_disk (default: CIFAR-10 from the Hub)")
    parser.add_argument("--output", default="runs/cifar-alexnet-python")
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    tables = datasets.load_from_disk(options.data) if options.data else datasets.load_dataset("uoft-cs/cifar10")
    trainer = Trainer.from_objects(
        build(classes=tables["train"].features["label"].num_classes, width=options.width),
        loss=loss,
        train_data=Images(tables["train"]),
        evaluation_data=Images(tables["test"]),
        name="cifar-alexnet-python",
        output=options.output,
        optimizer={"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
        schedule={"name": "cosine", "warmup": 0.05},
        loop={"epochs": options.epochs, "batch_size": options.batch_size},
        checkpoint={"best_by": "accuracy"},
    )
    result = trainer.fit()
    assert result.evaluation is not None
    print(f"accuracy {result.evaluation['accuracy']:.1%}, report {result.report}")


if __name__ == "__main__":
    main()
