"""Teach a small language model to read digits, and show that it looks at the images.

Run with `make demo`, or `python examples/demo.py --help`. Everything happens on the CPU, without a download: the
images are scikit-learn's 1,797 handwritten digits, the model is a small CLIP vision encoder and a small Llama.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from cornstarch import MultimodalModel, MultimodalModelProcessor

QUESTION = "which digit is <vision> ?"
DIGITS = "zero one two three four five six seven eight nine".split()
WORDS = ["<pad>", "</s>", "<unk>", "which", "digit", "is", "?", *DIGITS]
HELD_OUT = 360
BATCH = 64

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Scores:
    """What the trained model gets right on images it has not seen."""

    true_images: float
    shuffled_images: float
    answers: list[str]


def compose() -> tuple[MultimodalModel, MultimodalModelProcessor]:
    """Build the model and its processor from their parts."""
    vision = CLIPVisionModel(
        CLIPVisionConfig(
            image_size=8,
            patch_size=2,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    llm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )
    )  # fmt: skip
    mllm = MultimodalModel(encoders={"vision": vision}, language_model=llm)

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    size = {"height": 8, "width": 8}
    pixels = CLIPImageProcessorPil(size=size, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    # With `model=` the processor knows how many tokens an image takes, and tells the model where they stand.
    return mllm, MultimodalModelProcessor(encoder_processors={"vision": pixels}, llm_tokenizer=tokenizer, model=mllm)


def load_images() -> tuple[list[Image.Image], Tensor]:
    """Return the digits as images, in a fixed random order, and which digit each shows."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0)).tolist()
    images = [Image.fromarray((digits.images[i] * (255 / 16)).astype("uint8")).convert("RGB") for i in order]
    return images, torch.tensor([int(digits.target[i]) for i in order])


def make_batch(processor: MultimodalModelProcessor, images: list[Image.Image], digits: Tensor) -> Batch:
    """Return questions with their answers; only the answer and the end of the text are trained on."""
    texts = [f"{QUESTION} {DIGITS[digit]} </s>" for digit in digits.tolist()]
    batch = dict(processor(text=texts, images=images, return_tensors="pt"))
    labels = batch["input_ids"].clone()
    labels[:, :-2] = -100
    return {**batch, "labels": labels}


def select(batch: Batch, rows: Tensor) -> Batch:
    """Return some rows of a batch."""
    return {name: value[rows] for name, value in batch.items()}


def train(mllm: MultimodalModel, batch: Batch, steps: int, console: Console) -> list[float]:
    """Train every part of the model, and return the loss of each step."""
    mllm.train(encoders_mode={"vision": (True, True)}, llm_mode=True)
    optimizer = torch.optim.AdamW(mllm.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    draw = torch.Generator().manual_seed(1)
    losses: list[float] = []
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps)
        start = time.perf_counter()
        for step in range(1, steps + 1):
            rows = torch.randint(len(batch["input_ids"]), (BATCH,), generator=draw)
            loss = mllm(**select(batch, rows)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(mllm.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rate = step * BATCH / (time.perf_counter() - start)
            line = f"loss {losses[-1]:.4f}  {rate:,.0f} images/s"
            progress.update(task, advance=1, description=line)
            if not console.is_terminal and (step % 50 == 0 or step == steps):
                console.print(f"step {step}/{steps}  {line}")
    return losses


@torch.no_grad()
def evaluate(mllm: MultimodalModel, batch: Batch) -> Scores:
    """Ask about every held-out image, then ask the same questions with the images shuffled between them."""
    mllm.eval()
    truth = batch["input_ids"][:, -2]
    question = {name: value[:, :-2] for name, value in batch.items() if name in ("input_ids", "attention_mask")}
    pixels = batch["pixel_values"]
    shuffled = pixels[torch.randperm(len(pixels), generator=torch.Generator().manual_seed(2))]

    def answers(images: Tensor) -> Tensor:
        return mllm(**question, pixel_values=images).logits[:, -1].argmax(-1)

    given = answers(pixels)
    return Scores(
        true_images=(given == truth).float().mean().item(),
        shuffled_images=(answers(shuffled) == truth).float().mean().item(),
        answers=[WORDS[i] if i < len(WORDS) else "?" for i in given.tolist()],
    )


@torch.no_grad()
def save_and_check(mllm: MultimodalModel, batch: Batch, folder: Path) -> bool:
    """Save the model, load it again, and say whether both give the same logits, bit by bit."""
    mllm.save_pretrained(folder)
    loaded = MultimodalModel.from_pretrained(folder)
    loaded.eval()
    return torch.equal(mllm(**batch).logits, loaded(**batch).logits)


def write_report(path: Path, scores: Scores, losses: list[float], images: list[Image.Image], digits: Tensor) -> None:
    """Write one HTML page that needs no other file: scores, the loss, and images with their answers."""
    top = max(losses)
    points = " ".join(
        f"{600 * i / max(len(losses) - 1, 1):.1f},{150 * (1 - loss / top):.1f}" for i, loss in enumerate(losses)
    )
    cards = []
    for image, digit, answer in zip(images[:40], digits.tolist(), scores.answers, strict=False):
        file = io.BytesIO()
        image.resize((48, 48), Image.Resampling.NEAREST).save(file, "PNG")
        right = answer == DIGITS[digit]
        cards.append(
            f'<figure class="{"right" if right else "wrong"}">'
            f'<img alt="{DIGITS[digit]}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
            f"<figcaption>{html.escape(answer)}</figcaption></figure>"
        )
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Cornstarch demo</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 42rem; margin: 2rem auto; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; border: 1px solid #8886; }}
figure {{ display: inline-block; margin: .3rem; padding: .3rem; text-align: center; border: 2px solid #2a8; }}
figure.wrong {{ border-color: #d43; }}
</style>
<h1>A small model that reads digits</h1>
<p>Held-out images answered rightly: <b>{scores.true_images:.1%}</b>. The same questions with the images shuffled
between them: <b>{scores.shuffled_images:.1%}</b> (chance is 10%). So the answers come from the images.</p>
<h2>Loss</h2>
<svg viewBox="0 0 600 150" role="img" aria-label="loss by step, from {losses[0]:.2f} to {losses[-1]:.4f}">
<polyline points="{points}" fill="none" stroke="#2a8" stroke-width="2"/></svg>
<p>{len(losses)} steps, from {losses[0]:.2f} to {losses[-1]:.4f}.</p>
<h2>Held-out images and the model's answers</h2>
{"".join(cards)}
<p>Images: scikit-learn's copy of the UCI handwritten digits (Alpaydin and Kaynak).</p>
</html>
""",
        encoding="utf-8",
    )


def main() -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where to write (default: runs/demo)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")

    console = Console(soft_wrap=True)
    disable_progress_bar()  # transformers' own, one per part that is saved or loaded
    torch.set_num_threads(1)  # such small tensors gain nothing from more, and lose a lot on a busy machine
    torch.manual_seed(0)
    start = time.perf_counter()
    mllm, processor = compose()
    images, digits = load_images()
    trained, held_out = slice(HELD_OUT, None), slice(HELD_OUT)
    console.print(
        f"Model: {type(mllm.language_model).__name__} + {type(mllm.encoders['vision'].module).__name__}, "
        f"{sum(p.numel() for p in mllm.parameters()):,} parameters. "
        f"Data: {len(images) - HELD_OUT:,} images to train on, {HELD_OUT} held out."
    )
    losses = train(mllm, make_batch(processor, images[trained], digits[trained]), options.steps, console)
    test_batch = make_batch(processor, images[held_out], digits[held_out])
    scores = evaluate(mllm, test_batch)

    options.out.mkdir(parents=True, exist_ok=True)
    same = save_and_check(mllm, select(test_batch, torch.arange(16)), options.out / "model")
    processor.save_pretrained(options.out / "processor")
    write_report(options.out / "report.html", scores, losses, images[held_out], digits[held_out])

    console.print(
        f"Held-out accuracy: {scores.true_images:.1%} with the true images, "
        f"{scores.shuffled_images:.1%} with images shuffled between samples (chance: 10%)."
    )
    console.print(f"Saved, loaded again, same logits: {'yes' if same else 'NO'}")
    console.print(
        f"Model: {options.out / 'model'}   Report: {options.out / 'report.html'}   "
        f"({time.perf_counter() - start:.0f} s)"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
