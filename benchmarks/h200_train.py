"""Train on ragged data on one GPU: `cornstarch train` beside `transformers.Trainer` and Lightning.

    python benchmarks/h200_train.py [--cases composed,qwen_full,qwen_lora] [--ways ...] [--steps 60] [--json out.json]

Every way is what a user of it writes: `cornstarch train run.yaml` with `packing: true` and defaults; `Trainer` with
`bf16=True`, fused AdamW, padded batches and eight workers, the model's own class and processor, from weights stored in
bf16 (`trainer`: the optimizer steps bf16 weights) or in float32 (`trainer_float32`: autocast, the arithmetic of our
float32 masters); Lightning with `bf16-true` around the same model and batches. Neither of the two packs conversations
with images, so they pad. JPEG files of 640 x 480, 0 to 4 a sample, 50 to 2,500 words; random weights. Each way runs in
its own process, in turn, and is stopped after `--steps` steps (the peers after `--peer-steps`); the first 40 of ours
and 10 of theirs, in which things are compiled and planned, do not count.

What counts are real tokens per second: text and image tokens without padding. The MFU is the one that the run logs
(`cornstarch.cost.flops`: frozen parts forward only, the head where there are labels, attention by visible pairs). For
the others it is estimated from the same FLOPs per token.

composed: SigLIP-so400m frozen, an MLP projector, Qwen3-1.7B trained, batches of 4 samples. qwen_full, qwen_lora: a
whole Qwen2.5-VL of 3.75 billion parameters, batches of 2 samples for the others (with 8, Trainer runs out of memory),
Cornstarch's default of 8 for ours.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import on_gpu
import ragged
import torch
import yaml

WARM = 10
SETTLED = 40
"""Steps of ours that do not count: until then cuDNN and cuBLAS make plans for numbers of images that are new."""
LIMIT = 180.0
"""Seconds that one way may take."""


@dataclass(frozen=True)
class TrainCase:
    """A model, and the batches of each way."""

    name: str
    model: str
    trained: str = "full"
    batch: int = 4
    """Samples per step of the others."""
    our_batch: int | None = None
    """Of ours; None: the default."""
    tokens_per_image: int = 729
    seconds: float = LIMIT


CASES = {
    one.name: one
    for one in (
        TrainCase("composed", "parts", our_batch=4),
        TrainCase("qwen_full", "qwen", batch=2, tokens_per_image=391),
        TrainCase("qwen_lora", "qwen", "lora", batch=2, tokens_per_image=391),
    )
}
# Options of `cornstarch train` beside the defaults, by the name of the way.
OURS: dict[str, list[str]] = {
    "cornstarch": [],
    "cornstarch_fp8": ["fp8=rowwise"],
    "cornstarch_evaluating": ["loop.evaluate_every=20"],
    "cornstarch_batch8": ["loop.batch_size=8"],
}
PEERS = ("trainer", "trainer_float32", "lightning")


# ---------------------------------------------------------------------------------------------------- what is written


def write_inputs(folder: Path, case: TrainCase, tiny: bool) -> Path:
    """Write the model and the data of a case, if they are not there yet; return the folder of the model."""
    data, model = folder / "data", folder / case.model
    if not (model / "done").exists():
        if case.model == "qwen":
            ragged.write_qwen_vl(model, tiny)
        elif tiny:
            ragged.write_parts(model, "small SigLIP", "small Qwen3")
        else:
            ragged.write_parts(model, "SigLIP-so400m", "Qwen3-1.7B")
        (model / "done").touch()
    if not (data / "images").exists():
        ragged.write_images(data / "images", 16 if tiny else 256)
    images = sorted(path.name for path in (data / "images").iterdir())
    for name, count, seed in (("train", 2000, 3), ("held_out", 24, 4)):
        path = data / f"{case.name}_{name}.json"
        if not path.exists():
            if tiny:
                ragged.write_conversations(path, images, 40, 64, seed, most_words=40)
            else:
                ragged.write_conversations(path, images, count, case.tokens_per_image, seed)
    return model


def write_config(folder: Path, case: TrainCase, model: Path, steps: int) -> Path:
    """Write the YAML file that a user would write."""
    data = folder / "data"
    described: dict[str, Any]
    if case.model == "qwen":
        described = {"whole": {"path": str(model), "train": case.trained}}
    else:
        vision = {"path": str(model / "vision"), "token": "<image>"}
        described = {"language_model": {"path": str(model / "language")}, "encoders": {"vision": vision}}
    config = {
        "name": case.name,
        "model": described,
        "data": {
            "train": {"path": str(data / f"{case.name}_train.json"), "media": str(data / "images")},
            "evaluation": {"path": str(data / f"{case.name}_held_out.json"), "media": str(data / "images")},
            "max_length": ragged.MAX_LENGTH,
            "packing": True,
        },
        "optimizer": {"learning_rate": 1e-5},
        "loop": {"steps": steps} | ({"batch_size": case.our_batch} if case.our_batch else {}),
    }
    path = folder / f"{case.name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


# ---------------------------------------------------------------------------------------------------- ours


def run_cornstarch(
    folder: Path, case: TrainCase, way: str, model: Path, steps: int, options: list[str]
) -> dict[str, Any]:
    """Run `cornstarch train` until it has done its steps, and read what it logged."""
    config = write_config(folder, case, model, steps)
    run = folder / "runs" / f"{case.name}_{way}"
    command = [sys.executable, "-m", "cornstarch", "train", str(config), "--restart", f"output={run}"]
    command += ["logging.progress=lines", *OURS[way], *options]
    began, metrics = time.time(), run / "metrics.jsonl"
    with (folder / f"{case.name}_{way}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None and time.time() - began < case.seconds:
                time.sleep(0.5)
                if _read_steps(metrics, began) and _read_steps(metrics, began)[-1]["step"] >= steps:
                    break  # the checkpoint of the end takes longer than the steps, and is not what is measured
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = _read_steps(metrics, began)
    text = (folder / f"{case.name}_{way}.log").read_text()
    counted = [line for line in lines if line["step"] > min(SETTLED, steps // 2)]
    if not counted:
        return {"way": way, "error": text.strip()[-1500:]}
    return {
        "way": way,
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in counted),
        "mfu": statistics.median(line.get("mfu", 0.0) for line in counted),
        "flops_per_token": statistics.median(
            line.get("flops_per_second", 0.0) / line["tokens_per_second"] for line in counted
        ),
        "milliseconds": statistics.median(line["step_time"] for line in counted) * 1e3,
        "data_wait": statistics.median(line["data_wait"] for line in counted) * 1e3,
        "gigabytes": counted[-1]["memory"] / 1e9,
        "first_step": lines[0]["time"] - began,
        "losses": {line["step"]: line["loss"] for line in lines},
        "log": text[-3000:],
    }


def _read_steps(path: Path, since: float) -> list[dict[str, Any]]:
    """Return the lines of training steps that were written after a moment."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # being written
        if line.get("kind") == "train" and line["time"] > since:
            lines.append(line)
    return lines


# ---------------------------------------------------------------------------------------------------- the others


def build_peer(case: TrainCase, model: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model's own class with its own processor, as a user of transformers loads them."""
    if case.model == "qwen":
        from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

        whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=dtype)
        whole.config.use_cache = whole.config.text_config.use_cache = False
        processor = AutoProcessor.from_pretrained(model)
        if case.trained == "lora":
            from peft import LoraConfig, get_peft_model

            linear = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
            whole = get_peft_model(whole, LoraConfig(r=16, lora_alpha=32, target_modules=linear))
        return whole, processor
    from transformers import (
        AutoImageProcessor,
        AutoTokenizer,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        Qwen3ForCausalLM,
        SiglipVisionModel,
    )

    language = Qwen3ForCausalLM.from_pretrained(model / "language", dtype=dtype)
    vision = SiglipVisionModel.from_pretrained(model / "vision", dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(model / "language")
    config = LlavaConfig(
        vision_config=vision.config, text_config=language.config, vision_feature_layer=-1,
        vision_feature_select_strategy="full", image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        llava = LlavaForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    llava.model.vision_tower.load_state_dict(vision.state_dict(), strict=False)
    llava.model.language_model.load_state_dict(language.model.state_dict())
    llava.model.vision_tower.requires_grad_(False)
    llava.config.use_cache = llava.config.text_config.use_cache = False
    processor = LlavaProcessor(
        AutoImageProcessor.from_pretrained(model / "vision"), tokenizer, patch_size=vision.config.patch_size,
        vision_feature_select_strategy="full", num_additional_image_tokens=0, chat_template=ragged.COMPOSED_TEMPLATE,
    )  # fmt: skip
    return llava, processor


class PaddedBatches:
    """Collates samples with a processor: padded, labels on the answers."""

    def __init__(self, processor: Any, images: Path) -> None:
        self.processor, self.images = processor, images

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from PIL import Image

        texts, shown = [], []
        for row in rows:
            asked, answered = (turn["value"] for turn in row["conversations"])
            images = row.get("image", [])
            content = [{"type": "image"} for _ in images] + [{"type": "text", "text": asked.replace("<image>\n", "")}]
            answer = [{"type": "text", "text": answered}]
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            texts.append(self.processor.apply_chat_template(messages, tokenize=False))
            shown += [Image.open(self.images / name).convert("RGB") for name in images]
        given = {"images": shown} if shown else {}
        batch = dict(self.processor(text=texts, padding=True, return_tensors="pt", **given))
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        turn = self.processor.tokenizer.convert_tokens_to_ids("<|im_start|>")
        for ids, own in zip(batch["input_ids"], labels, strict=True):  # trained is what follows the last turn's start
            own[: int((ids == turn).nonzero()[-1]) + 1] = -100
        return {**batch, "labels": labels}


def measure_peer(folder: Path, case: TrainCase, way: str, model: Path, steps: int, batch: int) -> dict[str, Any]:
    """Train with `transformers.Trainer` or Lightning in this process."""
    whole, processor = build_peer(case, model, torch.float32 if way.endswith("_float32") else torch.bfloat16)
    rows = json.loads((folder / "data" / f"{case.name}_train.json").read_text())
    collate = PaddedBatches(processor, folder / "data" / "images")
    marks: list[float] = []
    counts: list[int] = []
    began = time.time()

    def count(batch: dict[str, Any]) -> None:
        counts.append(int(batch["attention_mask"].sum()))

    if way.startswith("trainer"):
        _fit_trainer(whole, rows, collate, folder, steps, batch, marks, count)
    else:
        _fit_lightning(whole, rows, collate, folder, steps, batch, marks, count)
    times = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    tokens = sum(counts[WARM + 1 : len(times) + 1])
    return {
        "way": way,
        "batch": batch,
        "tokens_per_second": tokens / sum(times[WARM:]),
        "milliseconds": statistics.median(times[WARM:]) * 1e3,
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0,
        "first_step": marks[0] - began,
    }


def _fit_trainer(
    model: Any, rows: Any, collate: Any, folder: Path, steps: int, batch: int, marks: list[float], count: Any
) -> None:
    import transformers

    class Marking(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            count(inputs)
            return super().training_step(model, inputs, *more, **options)

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            marks.append(time.time())

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "runs" / "trainer"), per_device_train_batch_size=batch, max_steps=steps,
        learning_rate=1e-5, bf16=torch.cuda.is_available(), optim="adamw_torch_fused", dataloader_num_workers=8,
        remove_unused_columns=False, report_to=[], save_strategy="no", logging_steps=10, disable_tqdm=True,
    )  # fmt: skip
    Marking(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[Clock()]).train()


def _fit_lightning(
    model: Any, rows: Any, collate: Any, folder: Path, steps: int, batch: int, marks: list[float], count: Any
) -> None:
    import pytorch_lightning as lightning

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            count(batch)
            return self.model(**batch).loss

        def on_train_batch_end(self, *_: Any) -> None:
            torch.cuda.synchronize()
            marks.append(time.time())

        def configure_optimizers(self) -> Any:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return torch.optim.AdamW(trained, lr=1e-5, fused=True)

    loader = torch.utils.data.DataLoader(
        rows, batch_size=batch, shuffle=True, collate_fn=collate, num_workers=8, pin_memory=True
    )
    trainer = lightning.Trainer(
        max_steps=steps, precision="bf16-true", gradient_clip_val=None, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=str(folder), accelerator="gpu", devices=1,
    )  # fmt: skip
    model.train()
    trainer.fit(Plain(), loader)


def run_peer(folder: Path, case: TrainCase, way: str, steps: int, tiny: bool, batch: int) -> dict[str, Any]:
    """Measure a peer in its own process."""
    command = [sys.executable, __file__, "--folder", str(folder), "--case", case.name, "--way", way]
    command += ["--steps", str(steps), "--batch", str(batch), *(["--tiny"] if tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=case.seconds)
    except subprocess.TimeoutExpired:
        return {"way": way, "batch": batch, "error": f"took more than {case.seconds:.0f} s"}
    last = [line for line in done.stdout.splitlines() if line.startswith('{"way"')]
    return json.loads(last[-1]) if last else {"way": way, "batch": batch, "error": done.stderr.strip()[-600:]}


# ---------------------------------------------------------------------------------------------------- the table


def format_results(case: TrainCase, results: list[dict[str, Any]]) -> str:
    """Return a table in Markdown."""
    good = {one["way"]: one for one in results if "error" not in one}
    base = good.get("trainer", {}).get("tokens_per_second")
    per_token = next((one["flops_per_token"] for one in good.values() if one.get("flops_per_token")), None)
    ours = next((one for one in good.values() if one.get("mfu")), None)
    lines = [
        f"### {case.name}",
        "",
        "| way | real tokens/s | / Trainer | MFU | ms a step | waits for data, ms | peak GB | first step after s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        name = one["way"] + (f", batch {one['batch']}" if "batch" in one else "")
        if "error" in one:
            reason = one["error"].splitlines()[-1][:160] if one["error"] else "?"
            lines.append(f"| {name} | {reason} |")
            continue
        mfu = one.get("mfu")
        if mfu is None and per_token and ours:
            mfu = ours["mfu"] * one["tokens_per_second"] / ours["tokens_per_second"]
        ratio = f"{one['tokens_per_second'] / base:.2f}" if base else ""
        wait = f"{one['data_wait']:.1f}" if "data_wait" in one else ""
        lines.append(
            f"| {name} | {one['tokens_per_second']:,.0f} | {ratio} | {'' if mfu is None else f'{mfu:.1%}'} | "
            f"{one['milliseconds']:.0f} | {wait} | {one['gigabytes']:.1f} | {one['first_step']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the requested cases."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", default="composed")
    arguments.add_argument("--ways", default="trainer,trainer_float32,lightning,cornstarch,cornstarch_fp8")
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--peer-steps", type=int, default=30)
    arguments.add_argument("--folder", type=Path, default=Path("runs/h200_train"), help="for models, data and runs")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--tiny", action="store_true", help="small models, also on a CPU: to try the script")
    arguments.add_argument("--batch", type=int, help="samples per batch of the peers")
    arguments.add_argument("--options", default="", help="more options for all runs of Cornstarch: '--profile a.b=1'")
    arguments.add_argument("--case", help=argparse.SUPPRESS)
    arguments.add_argument("--way", help=argparse.SUPPRESS)
    given = on_gpu.parse(arguments)
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if given.way:
        case = CASES[given.case]
        model = write_inputs(folder, case, given.tiny)
        print(json.dumps(measure_peer(folder, case, given.way, model, given.steps, given.batch or case.batch)))
        return
    cases = on_gpu.listed(arguments, given.cases, CASES)
    ways = on_gpu.listed(arguments, given.ways, (*PEERS, *OURS))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}\n", flush=True)
    kept = {}
    for name in cases:
        case = CASES[name]
        model = write_inputs(folder, case, given.tiny)
        results = []
        for way in ways:
            if way in PEERS:
                results.append(run_peer(folder, case, way, given.peer_steps, given.tiny, given.batch or case.batch))
            else:
                results.append(run_cornstarch(folder, case, way, model, given.steps, given.options.split()))
            print(json.dumps({k: v for k, v in results[-1].items() if k not in ("log", "losses")}), flush=True)
        print(format_results(case, results), "\n", flush=True)
        kept[name] = results
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
