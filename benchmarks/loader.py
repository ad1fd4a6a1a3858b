"""Measure the loader beside what a user would write: PIL and the model's Hugging Face processor in a `DataLoader`.

Data are ragged JPEG samples (`ragged.py`): 640 x 480, 0 to 4 images and 50 to 2,000 words each. Models are tiny, but
their image processor is SigLIP's at 384 pixels (729 tokens per image): as parts, and as a whole LLaVA.

- plain: `DataLoader` with a collate function that opens JPEG files with PIL, applies the chat template, calls the
  processor once for the batch, pads, and labels the last answer (`PaddedBatches`, as in `h200_train.py`);
- padded, packed: the loader of `cornstarch train` with the same number of workers and of samples per step. It also
  finds every answer of a conversation, checks sizes, and reports broken samples one by one. The lengths for packing
  are counted before, once per dataset; that has a line of its own.

CPU time is that of the process and its workers together, from the start of the workers to their end, after one batch of
four samples in the process that starts them. Each way runs in a process of its own, in turn; the least of `--repeats`
runs counts. Samples per second are left out: on a shared machine they say how busy it is. The two rows "plain" measure
the same: their difference is noise.

    python benchmarks/loader.py --output benchmarks/results/loader.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import ragged
import torch
import transformers
from h200_train import PaddedBatches
from PIL import __version__ as pillow_version

CASES = {"composed": "SigLIP and Qwen3", "whole": "a whole LLaVA"}
WAYS = ("plain", "padded", "packed", "count")
BATCH = 8


def write_case(folder: Path, samples: int) -> None:
    """Write the data and the tiny models."""
    images = ragged.write_images(folder / "images", 64)
    ragged.write_conversations(folder / "rows.json", images, samples, 900, most_words=2000)  # none too long
    tokenizer, images_of = (
        ragged.build_tokenizer(),
        transformers.SiglipImageProcessor(size={"height": 384, "width": 384}),
    )
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=384, patch_size=14,
        vision_use_head=False,  # type: ignore[call-arg]
    )  # fmt: skip
    language = transformers.Qwen3Config(
        vocab_size=8192, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    transformers.SiglipVisionModel(vision).save_pretrained(folder / "vision")
    images_of.save_pretrained(folder / "vision")
    transformers.Qwen3ForCausalLM(language).save_pretrained(folder / "language")
    tokenizer.save_pretrained(folder / "language")
    llava = transformers.LlavaConfig(
        vision_config=vision, text_config=language, vision_feature_select_strategy="full",
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    transformers.LlavaForConditionalGeneration(llava).save_pretrained(folder / "whole")
    transformers.LlavaProcessor(
        images_of, tokenizer, patch_size=14, vision_feature_select_strategy="full", num_additional_image_tokens=0,
        chat_template=ragged.COMPOSED_TEMPLATE,
    ).save_pretrained(folder / "whole")  # fmt: skip


def build_plain(folder: Path, workers: int) -> Iterable[Any]:
    processor = transformers.AutoProcessor.from_pretrained(folder / "whole")
    rows = json.loads((folder / "rows.json").read_text())
    collate = PaddedBatches(processor, folder / "images")
    collate(rows[:4])
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, collate_fn=collate, num_workers=workers)


def build_ours(folder: Path, case: str, workers: int, packing: bool, counts: bool) -> Iterable[Any]:
    from cornstarch.config import RunConfig
    from cornstarch.data.loader import open_data
    from cornstarch.metrics.metrics import Position
    from cornstarch.parallel.mesh import Replica
    from cornstarch.tasks.build import build_task

    parts = {
        "encoders": {"vision": {"path": str(folder / "vision")}},
        "language_model": {"path": str(folder / "language")},
    }
    config = RunConfig.model_validate({
        "model": {"whole": {"path": str(folder / "whole")}} if case == "whole" else parts,
        "data": {
            "train": [{"path": str(folder / "rows.json"), "media": str(folder / "images")}], "packing": packing,
            "max_length": ragged.MAX_LENGTH, "workers": workers,
        },
        "loop": {"batch_size": BATCH, "epochs": 1},
        "output": str(folder / "run"),
    })  # fmt: skip
    task = build_task(config)
    data = open_data(config)
    data.peek_batch(task.collator, 4)  # as `data.workers: auto` does
    if counts:
        return iter([lambda: data.plan_packing(task.collator, workers)])
    return data.plan_packing(task.collator, workers).build_loader(
        task.collator, Position(), Replica.here(), None, workers, False
    )


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(folder: Path, case: str, way: str, workers: int) -> dict[str, float]:
    """Read all batches in this process; return CPU seconds, and how many real tokens they had."""
    torch.set_num_threads(1)
    if way == "plain":
        batches = build_plain(folder, workers)
    else:
        batches = build_ours(folder, case, workers, packing=way in ("packed", "count"), counts=way == "count")
    used, tokens = cpu_seconds(), 0
    for batch in batches:
        if way == "count":
            batch()
        elif way == "plain":
            tokens += int(batch["attention_mask"].sum())
        else:
            tokens += sum(one.tokens for one in batch.microbatches)
            assert not batch.skipped, batch.skipped
    del batches  # workers end, and their time is known
    return {"cpu": cpu_seconds() - used, "tokens": tokens}


def run_way(folder: Path, case: str, way: str, workers: int) -> dict[str, float]:
    """Measure in a new process, without a stored count of lengths from another run but for `packed`."""
    command = [
        sys.executable,
        __file__,
        "--folder",
        str(folder),
        "--case",
        case,
        "--way",
        way,
        "--workers",
        str(workers),
    ]
    cache = folder / "cache"
    if way == "count":
        for file in cache.rglob("*.npy"):
            file.unlink()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def render_table(folder: Path, samples: int, workers: int, repeats: int) -> str:
    heads = ["model", "way", "CPU ms per sample", "CPU, plain = 1", "real tokens per sample"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, title in CASES.items():
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(repeats):  # in turn: others may use the machine, too
            for way in ("plain", "padded", "count", "packed"):
                found[way].append(run_way(folder, case, way, workers))
        best = {way: {key: min(run[key] for run in runs) for key in ("cpu", "tokens")} for way, runs in found.items()}
        for way in WAYS:
            cpu, plain = best[way]["cpu"], best["plain"]["cpu"]
            columns = [title, way, f"{cpu / samples * 1000:.2f}", f"{cpu / plain:.2f}"]
            tokens = f"{best[way]['tokens'] / samples:,.0f}"
            lines.append(f"| {' | '.join([*columns, '' if way == 'count' else tokens])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where data and models are, for one measurement")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options.folder, options.case, options.way, options.workers)))
        return
    with tempfile.TemporaryDirectory() as name:
        write_case(Path(name), options.samples)
        text = render_table(Path(name), options.samples, options.workers, options.repeats)
    print(text)
    if options.output is not None:
        head = (
            f"# The loader beside PIL and a Hugging Face processor\n\nCommand: `python {shlex.join(sys.argv)}`. "
            f"{date.today()}, Python {platform.python_version()}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}, Pillow {pillow_version}, {os.cpu_count()} CPU core(s), {options.workers} "
            f"workers, {options.samples} samples, batches of {BATCH}, least of {options.repeats} runs. The two "
            "rows *plain* measure the same: their difference is noise.\n\n"
        )
        options.output.write_text(head + text + "\n")


if __name__ == "__main__":
    main()
