"""Random cases: models × parts trained × plans × worlds × batches × options, the same for the same seed and number.

Plans are drawn within what is documented as possible (docs/layout.md, docs/pipelines.md), so that most of them run;
what is odd about a case are its combinations. Nothing here asks the library whether a case is possible: the cases of a
seed stay the same when the library changes.
"""

from __future__ import annotations

import json
import random
from math import lcm
from typing import Any

from tests.fuzz.models import LANGUAGE_MODELS

Random = random.Random

WORDS = (1, 2, 4, 7, 12, 20)
# AdamW divides a gradient by its own size. With its usual eps, rounding in a gradient that is zero in truth would be a
# step like any other; with a large one a wrong factor in a gradient shows as well.
_EPS = 0.02
_WHOLE = ("ddp", "zero1")
_MOE = ("qwen3_moe", "qwen3_next", "mixtral", "mixtral_aux")
_SHARED = _MOE[:-1]  # a router's loss of all tokens is refused with several replicas
# What transformers cannot cut along tokens, or in documents: linear attention has a state, not a mask.
_RECURRENT = ("qwen3_next",)


def generate(seed: int, index: int) -> dict[str, Any]:
    """Return one case."""
    drawn = Random(f"{seed} {index}")
    case: dict[str, Any] = {"name": f"{seed}-{index}", "seed": drawn.randrange(1000), **_draw_model(drawn)}
    case["world"] = drawn.choices((2, 3, 4, 5, 6), (40, 12, 33, 3, 12))[0]
    if drawn.random() < 0.08:
        return _boost(case, drawn)
    case |= _draw_layout(case, case["world"], drawn)
    then = None
    if drawn.random() < 0.2:
        world = drawn.choices((1, 2, 3, 4, 6), (25, 30, 10, 25, 10))[0]
        then = {"world": world, **_draw_layout(case, world, drawn)}
    plans = [case["parallel"], *([then["parallel"]] if then else [])]
    case |= _draw_data(case, plans, then, drawn)
    case |= _draw_options(case, plans, then, drawn)
    case["steps"] = 2 if then else 3
    if then:
        then["steps"] = 4
        case["then"] = {key: then[key] for key in ("world", "parallel", "steps")}
    del case["replicas"]
    return case


def dumps(case: dict[str, Any]) -> str:
    """Return a case on one line."""
    return json.dumps(case, separators=(",", ":"))


# ------------------------------------------------------------------------------------------------ the model


def _draw_model(drawn: Random) -> dict[str, Any]:
    names = list(LANGUAGE_MODELS)
    weights = [6 if name.startswith("llama") else 1 if name in ("mixtral_aux", "qwen3_next") else 2 for name in names]
    model: dict[str, Any] = {"llm": drawn.choices(names, weights)[0], "layers": drawn.choice((2, 3, 4, 4))}
    if model["llm"] in _RECURRENT:
        model["layers"] = 4  # the fourth is the first that attends
    if drawn.random() < 0.4:
        model["vocabulary"] = drawn.choice((67, 70, 96))
    modalities = drawn.choices(((), ("vision",), ("audio",), ("vision", "audio")), (32, 42, 8, 18))[0]
    encoders = {}
    for name in modalities:
        kind = "whisper" if name == "audio" else drawn.choices(("clip", "siglip", "vit", "qwen2_vl"), (4, 3, 2, 2))[0]
        encoders[name] = {
            "kind": kind,
            "train": drawn.choices(("projector", "full", "frozen", "lora"), (35, 40, 10, 15))[0],
            "attention": drawn.choice(("causal", "causal", "item", "modality")),
            "projector": drawn.choice(("mlp", "linear")),
        }
        if drawn.random() < 0.1:
            encoders[name]["learning_rate"] = 0.003
    if model["llm"] in _RECURRENT:
        for said in encoders.values():
            said["attention"] = "causal"
    is_trained = any(said["train"] != "frozen" for said in encoders.values())
    kinds = ("full", "lora", "frozen") if is_trained else ("full", "lora")
    model["llm_train"] = drawn.choices(kinds, (60, 20, 20)[: len(kinds)])[0]
    return {**model, "encoders": encoders}


# ------------------------------------------------------------------------------------------------ the plan


def _draw_layout(case: dict[str, Any], world: int, drawn: Random) -> dict[str, Any]:
    """Return a plan for so many ranks, and how many replicas that makes."""
    if world == 1:
        return {"parallel": {}, "replicas": 1}
    for _ in range(200):
        style = drawn.choices(("dp", "tp", "cp", "tp_cp", "pipeline", "own"), (30, 16, 14, 4, 26, 10))[0]
        found = _draw_spans(case, style, drawn)
        if found is None or world % found["size"]:
            continue
        replicas = world // found["size"]
        plan = found["plan"]
        plan["data"] = _draw_data_kind(case, style, plan["modules"], replicas, drawn)
        if plan["schedule"] == "zero_bubble" and plan["data"]["kind"] not in _WHOLE:
            plan["schedule"] = "1f1b"
        # With numbers of its own: all that is drawn of other models stays as it was.
        _share_experts(case, plan, replicas, Random(f"{case['name']} {world} experts"))
        return {"parallel": plan, "replicas": replicas}
    return {"parallel": {"data": {"kind": "ddp"}}, "replicas": world}


def _draw_spans(case: dict[str, Any], style: str, drawn: Random) -> dict[str, Any] | None:
    """Return the modules of a plan, and the ranks of one replica; None if the style does not fit the model."""
    encoders, layers = list(case["encoders"]), case["layers"]
    plan: dict[str, Any] = {"modules": {}, "ranks": "auto", "schedule": "1f1b"}
    if style == "dp":
        return {"plan": plan, "size": 1}
    if style == "own" and not encoders:
        return None
    tp = 2 if style in ("tp", "tp_cp") or (style in ("pipeline", "own") and drawn.random() < 0.25) else 1
    cp = 1
    if case["llm"] not in _RECURRENT:
        if style in ("cp", "tp_cp"):
            cp = drawn.choice((2, 2, 3)) if style == "cp" else 2
        elif style in ("pipeline", "own") and drawn.random() < 0.2:
            cp = 2
    elif style in ("cp", "tp_cp"):
        return None
    llm: dict[str, Any] = {"tp": tp, "cp": cp}
    if cp > 1:
        llm |= _draw_cp(tp, cp, drawn)
    if tp > 1:
        llm |= _draw_tp(case, drawn)
    if style == "pipeline":
        llm["stages"] = drawn.choice((2, 2, 3)) if layers > 2 else 2
        _draw_schedule(plan, llm, layers, drawn)
    if drawn.random() < 0.15 and plan["schedule"] != "zero_bubble":
        llm["activation_checkpointing"] = True
    modules: dict[str, Any] = {}
    if style in ("tp", "cp", "tp_cp"):
        whole = drawn.random() < 0.75
        for name in encoders:
            modules[name] = {"tp": tp, "cp": cp} if whole else {"tp": 1, "cp": 1}
        plan["ranks"] = "auto" if whole else "shared"
        size = tp * cp
    elif not encoders:
        size = llm["stages"] * tp * cp
    else:
        plan["ranks"] = drawn.choice(("own", "own", "colocated", "first_stage") if style == "pipeline" else
                                     ("own", "colocated"))  # fmt: skip
        size = llm.get("stages", 1) * tp * cp + _draw_encoders(plan["ranks"], modules, encoders, llm, drawn)
    plan["modules"] = {**modules, "language_model": llm}
    if plan["schedule"] == "interleaved" and llm.get("virtual_stages", 1) == 1:
        plan["schedule"] = "1f1b"
    # Encoders that no test has cut would be tried in processes of their own first, for seconds.
    rare = [name for name in encoders if case["encoders"][name]["kind"] in ("whisper", "qwen2_vl", "vit")]
    # But without trials, a router's loss per replica is accepted, which no single process computes.
    is_cut = any(modules.get(name, {}).get(axis, 1) > 1 for name in rare for axis in ("tp", "cp"))
    if is_cut and case["llm"] != "mixtral_aux":
        plan["verify"] = "never"
    return {"plan": plan, "size": size}


def _draw_cp(tp: int, cp: int, drawn: Random) -> dict[str, Any]:
    modes = ["ring_attn", "gather"] + (["all_to_all"] if tp == 1 and cp == 2 else [])
    mode = drawn.choice(modes)
    distributions = (
        ("auto", "uniform") if mode == "all_to_all" else ("auto", "auto", "uniform", "zigzag", "makespan_min")
    )
    return {"cp_mode": mode, "cp_distribution": drawn.choice(distributions)}


def _draw_tp(case: dict[str, Any], drawn: Random) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if drawn.random() < 0.3:
        more["tp_vocabulary"] = True
    if drawn.random() < 0.2 and case["llm_train"] != "lora" and case["llm"] not in (*_MOE, "opt", "gpt2"):
        more["tp_sequence"] = True
    return more


def _draw_schedule(plan: dict[str, Any], llm: dict[str, Any], layers: int, drawn: Random) -> None:
    plan["schedule"] = drawn.choice(("1f1b", "1f1b", "gpipe", "naive", "zero_bubble", "interleaved", "auto"))
    if plan["schedule"] == "interleaved" and llm["stages"] * 2 <= layers:
        llm["virtual_stages"] = 2
    if plan["schedule"] == "auto":
        plan["schedule"] = "1f1b" if drawn.random() < 0.5 else "zero_bubble"


def _draw_encoders(ranks: str, modules: dict[str, Any], encoders: list[str], llm: dict[str, Any], drawn: Random) -> int:
    """Put encoders in a plan; return how many ranks of their own they take."""
    if ranks == "first_stage":
        modules |= {name: {"tp": llm["tp"], "cp": llm["cp"]} for name in encoders}
        return 0
    sizes = [drawn.choices(((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)), (60, 14, 14, 12))[0] for _ in encoders]
    if ranks == "colocated":
        sizes = sizes[:1] * len(encoders)
    for name, (tp, cp, stages) in zip(encoders, sizes, strict=True):
        modules[name] = {"tp": tp, "cp": cp, **({"stages": stages} if stages > 1 else {})}
    counts = [tp * cp * stages for tp, cp, stages in sizes]
    return counts[0] if ranks == "colocated" else sum(counts)


def _draw_data_kind(
    case: dict[str, Any], style: str, modules: dict[str, Any], replicas: int, drawn: Random
) -> dict[str, Any]:
    kinds = ["ddp", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
    has_tp = any(module.get("tp", 1) > 1 for module in modules.values())
    if not has_tp and style in ("dp", "cp"):
        kinds.append("fsdp1")
    if style == "dp" and replicas in (4, 6):
        kinds.append("hsdp")
    kind = drawn.choice(kinds)
    data: dict[str, Any] = {"kind": kind}
    if kind == "hsdp":
        data["replicate"] = 2
    if kind in _WHOLE and drawn.random() < 0.1:
        data["bucket_mb"] = 0.01
    if kind in ("fsdp2", "hsdp", "fsdp1") and drawn.random() < 0.15:
        data["reshard_after_forward"] = False
    if kind in ("fsdp2", "zero2", "zero3") and drawn.random() < 0.1:
        data["wrap"] = "none"
    return data


def _share_experts(case: dict[str, Any], plan: dict[str, Any], replicas: int, drawn: Random) -> None:
    """Share the experts of a model that has some out over ranks with other tokens, mostly; docs/experts.md."""
    llm, data = plan["modules"].get("language_model", {}), plan["data"]
    is_adapted = case["llm_train"] == "lora"  # on stacked experts, too
    if case["llm"] not in _SHARED or is_adapted or plan["schedule"] == "zero_bubble" or data["kind"] == "fsdp1":
        return
    ranks = replicas * llm.get("cp", 1) // data.get("replicate", 1)
    sizes = [size for size in (2, 4) if ranks % size == 0]  # of four experts
    if not sizes or drawn.random() < 0.2:
        return
    llm.pop("tp_sequence", None)
    plan["modules"] = {**{name: {} for name in case["encoders"]}, **plan["modules"]}
    plan["modules"]["language_model"] = {**llm, "ep": drawn.choice(sizes)}


# ------------------------------------------------------------------------------------------------ data and options


def _draw_data(
    case: dict[str, Any], plans: list[dict[str, Any]], then: dict[str, Any] | None, drawn: Random
) -> dict[str, Any]:
    is_pipeline = any(_is_pipeline(plan) for plan in plans)
    accumulation = drawn.choice((2, 4) if is_pipeline else (1, 1, 2, 3))
    if any(plan.get("schedule") == "interleaved" for plan in plans):
        accumulation = lcm(accumulation, *(plan["modules"]["language_model"].get("stages", 1) for plan in plans
                                           if plan.get("schedule") == "interleaved"))  # fmt: skip
    replicas = lcm(case["replicas"], then["replicas"] if then else 1)
    batch = accumulation * replicas * drawn.choice((1, 1, 2, 3) if accumulation * replicas < 8 else (1,))
    steps = 4 if then else 3
    count = batch * steps
    fate = drawn.random()
    if fate < 0.1:  # several epochs, with a short batch at the end of each
        count = max(1, batch + drawn.randrange(-2, 3))
    elif fate < 0.15:  # fewer samples than replicas
        count = max(1, replicas - 1)
    elif fate < 0.3:
        count -= drawn.randrange(0, batch)
    kinds = [_draw_kind(case["encoders"], drawn) for _ in range(max(count, 1))]
    if drawn.random() < 0.2 and len(kinds) > batch:  # a step in which nobody has an item
        kinds[batch : 2 * batch] = [[0, 0, words, answer] for _, _, words, answer in kinds[batch : 2 * batch]]
    _give_all(kinds, case["encoders"])
    packing = drawn.random() < 0.35 and case["llm"] not in _RECURRENT
    data: dict[str, Any] = {"packing": packing, "shuffle": drawn.random() < 0.4, "max_length": 96}
    if drawn.random() < 0.25:
        data["train_on"] = "everything"
    if drawn.random() < 0.2 and not any(said["kind"] == "qwen2_vl" for said in case["encoders"].values()):
        data["balance"] = "cost"
    if drawn.random() < 0.2:
        data["pad_to"] = 8
    return {
        "batch_size": batch,
        "accumulation": accumulation,
        "steps": steps,
        "kinds": kinds,
        "odd_sizes": drawn.random() < 0.4,
        "data": data,
    }


def _give_all(kinds: list[list[Any]], encoders: dict[str, Any]) -> None:
    """Let some sample have an item of every kind: a projector that never sees one would not move."""
    for place, name in enumerate(("vision", "audio")):
        if name in encoders and not any(kind[place] and kind[3] for kind in kinds):
            kinds[0][place] = 1
            kinds[0][3] = True
    if not any(kind[3] for kind in kinds):
        kinds[0][3] = True


def _draw_kind(encoders: dict[str, Any], drawn: Random) -> list[Any]:
    images = drawn.choices((0, 1, 2, 3), (40, 35, 15, 10))[0] if "vision" in encoders else 0
    sounds = drawn.choices((0, 1, 2), (50, 35, 15))[0] if "audio" in encoders else 0
    return [images, sounds, drawn.choice(WORDS), drawn.random() < 0.93]


def _draw_options(
    case: dict[str, Any], plans: list[dict[str, Any]], then: dict[str, Any] | None, drawn: Random
) -> dict[str, Any]:
    modules = [module for plan in plans for module in plan.get("modules", {}).values()]
    is_plain = all(not plan.get("modules") for plan in plans)
    takes_apart = any(plan.get("schedule") == "zero_bubble" for plan in plans)
    data, loop, more = dict(case["data"]), {}, {}
    encoders = case["encoders"].values()
    if drawn.random() < 0.2:
        loop["ema"] = 0.5
    if drawn.random() < 0.15 and not takes_apart and not any("activation_checkpointing" in one for one in modules):
        loop["activation_checkpointing"] = True
    elif drawn.random() < 0.08 and is_plain:
        loop["activation_budget"] = drawn.choice(("2 MB", "20 MB"))
    if encoders and is_plain and drawn.random() < 0.2:
        data["balance_encoders"] = True
    elif encoders and is_plain and drawn.random() < 0.3 and not any(e["train"] in ("full", "lora") for e in encoders):
        more["features"] = {"cache": True}
    elif drawn.random() < 0.1:
        more["features"] = {"ahead": False}
    precision = drawn.choices(("fp32", "bf16", "fp16"), (82, 12, 6))[0]
    if case["llm"] in _MOE:
        precision = "fp32"  # rounding sends tokens to other experts, and what follows is no rounding
    is_flat = any(plan.get("data", {}).get("kind") == "fsdp1" for plan in plans)
    if is_flat and not all(said["train"] == "full" for said in (*encoders, {"train": case["llm_train"]})):
        precision = "fp32"  # it flattens parameters of one type, and what is frozen is kept in what is computed in
    if precision != "fp32":
        more["precision"] = precision
    if drawn.random() < 0.3:
        more["evaluated"] = True
        count = drawn.choice((1, 2, 5, 8))
        more["evaluation_kinds"] = [_draw_kind(case["encoders"], drawn) for _ in range(count)]
        more["evaluation_kinds"][0][3] = True
        if drawn.random() < 0.5:
            loop["evaluate_every"] = drawn.choice((1, 2))
    if drawn.random() < 0.1:
        more["checkpoint"] = drawn.choice(({"form": "full"}, {"background": True}))
    if not then and drawn.random() < 0.3:
        more["schedule"] = {"name": drawn.choice(("cosine", "linear")), "warmup": drawn.choice((0, 1))}
    if is_plain and case["world"] == 2 and not then and drawn.random() < 0.01:  # compiling takes a minute
        more["compile"] = "layers"
    return {"data": data, "optimizer": _draw_optimizer(case, plans, drawn), "loop": loop, **more}


def _draw_optimizer(case: dict[str, Any], plans: list[dict[str, Any]], drawn: Random) -> dict[str, Any]:
    clip = drawn.choice((None, 0.05, 1.0, 100.0))
    decay = drawn.choice((0.0, 0.1))
    is_whole = all(plan.get("data", {}).get("kind", "ddp") == "ddp" for plan in plans)
    has_tp = any(module.get("tp", 1) > 1 for plan in plans for module in plan.get("modules", {}).values())
    # It has no eps to speak of, so models with biases of keys, whose gradients are rounding alone, are left out.
    is_plain = not case["encoders"] and case["llm"].startswith(("llama", "mistral", "qwen3"))
    if is_whole and is_plain and not has_tp and drawn.random() < 0.15:
        return {"name": "torch.optim.Adafactor", "learning_rate": 0.001, "clip": clip}
    if drawn.random() < 0.5:
        return {"name": "sgd", "learning_rate": 0.02, "momentum": 0.9, "weight_decay": decay, "clip": clip}
    return {"name": "adamw", "learning_rate": 0.005, "eps": _EPS, "weight_decay": decay, "clip": clip}


def _is_pipeline(plan: dict[str, Any]) -> bool:
    modules = plan.get("modules", {})
    stages = any(module.get("stages", 1) > 1 for module in modules.values())
    return stages or plan.get("ranks") in ("own", "colocated", "first_stage")


# ------------------------------------------------------------------------------------------------ the Booster


def _boost(case: dict[str, Any], drawn: Random) -> dict[str, Any]:
    """Return a case that goes through the Booster: what a plugin can say, and a loop of its own."""
    if case["llm"] == "mixtral_aux":
        case["llm"] = "mixtral"
    found = _draw_layout(case, case["world"], drawn)
    plan = found["parallel"]
    plan["data"] = {"kind": plan["data"]["kind"] if plan["data"]["kind"] not in ("hsdp", "fsdp1", "fsdp2") else "ddp"}
    plan.pop("verify", None)
    modules = plan.get("modules") or {name: {} for name in (*case["encoders"], "language_model")}
    for module in modules.values():
        for option in ("tp_vocabulary", "tp_sequence", "ep"):
            module.pop(option, None)
    if not plan.get("modules"):
        plan["ranks"] = "shared"
    plan["modules"] = modules
    accumulation = drawn.choice((2, 4))
    if plan.get("schedule") == "interleaved":
        accumulation = lcm(accumulation, modules["language_model"]["stages"])
    batch = accumulation * found["replicas"] * drawn.choice((1, 2))
    kinds = [_draw_kind(case["encoders"], drawn) for _ in range(3 * batch)]
    for kind in kinds:
        kind[3] = True  # a loop of one's own leaves out what has no label itself
    _give_all(kinds, case["encoders"])
    optimizer: dict[str, Any] = {"name": "adamw", "learning_rate": 0.005, "eps": _EPS, "weight_decay": 0.1}
    if drawn.random() < 0.5:
        optimizer = {"name": "sgd", "learning_rate": 0.02, "momentum": 0.9}
    optimizer["clip"] = drawn.choice((None, 0.05, 1.0))
    more = {"precision": "bf16"} if drawn.random() < 0.1 else {}
    return {
        **case,
        "booster": True,
        "parallel": plan,
        "batch_size": batch,
        "accumulation": accumulation,
        "steps": 3,
        "kinds": kinds,
        "data": {"packing": False, "shuffle": False, "max_length": 96},
        "optimizer": optimizer,
        **more,
    }
