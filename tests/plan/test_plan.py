"""Plans: every mistake is reported at once with its reason, and a valid plan survives serialization."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornstarch.errors import ConfigError
from cornstarch.plan import DataPlan, ModulePlan, Plan, data_options, read_plan
from cornstarch.plan import plan as plan_room
from cornstarch.schedule import POLICIES

ROOT = Path(__file__).resolve().parents[2]


def error_of(data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Plan.from_data(data)
    return str(caught.value)


def module(**options: Any) -> dict[str, Any]:
    return {"modules": {"model": options}}


# ------------------------------------------------------------------------------------------------ single mistakes

WRONG = [
    # data, the key that is named, what is said about it
    ("vision", "plan = vision", "Expected a mapping with some of these keys: modules, data, ranks, sch"),
    ([], "plan = []", "Expected a mapping"),
    ({"moduls": None}, "moduls", "Did you mean `modules`?"),
    ({"colour": 1}, "colour = 1", "Expected one of: modules, data, ranks, schedule."),
    ({"ranks": "colocate"}, "ranks = colocate", "Did you mean `colocated`?"),
    ({"ranks": ["own"]}, 'ranks = ["own"]', "Expected auto, shared, own, colocated or first_stage."),
    ({"schedule": "1f1"}, 'schedule = "1f1"', "Did you mean `1f1b`?"),
    ({"schedule": "zb"}, "schedule = zb", "Did you mean `zero_bubble`?"),
    ({"schedule": 1}, "schedule = 1", "Expected naive, gpipe, 1f1b, interleaved, zero_bubble or auto."),
    ({"schedule": "interleaved"}, "schedule = interleaved", "No module has virtual_stages of more than 1"),
    (module(virtual_stages=2), "modules.model.virtual_stages = 2", "Set stages, or leave it out."),
    (module(stages=2, vpp=2), "modules.model.vpp = 2", "Did you mean `virtual_stages`?"),
    ({"modules": ["vision"]}, 'modules = ["vision"]', "Expected a mapping of names to values."),
    ({"modules": {}}, "modules", "There is no module."),
    ({"modules": {"model": 2}}, "modules.model = 2", "Expected a mapping with some of these keys: tp, cp"),
    ({"modules": {"my model": {}}}, "modules.my model", "It cannot be the name of a module."),
    ({"modules": {"model": {}, "vision": {}}}, "modules.model", "beside it there is vision"),
    ({"modules": {"vision": {}, "audio": {}}}, "modules", "Encoders meet at `language_model`, which is not there."),
    ({"modules": {"vision": {}, "llm": {}}}, "modules", "Is `llm` meant to be it?"),
    ({"modules": {"vision": {}, "languge_model": {}}}, "modules", "Is `languge_model` meant to be it?"),
    (module(tp=0), "modules.model.tp = 0", "Expected a whole number of at least 1."),
    (module(cp=-2), "modules.model.cp = -2", "Expected a whole number of at least 1."),
    (module(stages=True), "modules.model.stages = true", "Expected a whole number of at least 1."),
    (module(tp=2.0), "modules.model.tp = 2.0", "Write 2."),
    (module(tp="2"), 'modules.model.tp = "2"', "Leave out the quotes."),
    (module(tp=None), "modules.model.tp = null", "Expected a whole number of at least 1."),
    (module(tp=10**5000), "modules.model.tp = a number of more than 64 bits", "Expected a whole number"),
    (module(pp=2), "modules.model.pp = 2", "Did you mean `stages`?"),
    (module(sp=2), "modules.model.sp = 2", "Did you mean `cp`?"),
    (module(zero=4), "modules.model.zero = 4", "Expected 0, 1, 2 or 3, or null."),
    (module(zero=True), "modules.model.zero = true", "Expected 0, 1, 2 or 3, or null."),
    (module(cp_mode="ulysses"), "modules.model.cp_mode = ulysses", "Did you mean `all_to_all`?"),
    (module(precision="bfloat16"), "modules.model.precision = bfloat16", "Did you mean `bf16`?"),
    (module(activation_checkpointing=1), "modules.model.activation_checkpointing = 1", "Expected true or false."),
    ({"data": "fsdp2"}, "data = fsdp2", "Expected a mapping with some of these keys: kind, replicate"),
    ({"data": {"kind": "fsdp"}}, "data.kind = fsdp", "Did you mean `fsdp2`?"),
    ({"data": {"bucket_cap_mb": 25}}, "data.bucket_cap_mb = 25", "Did you mean `bucket_mb`?"),
    ({"data": {"bucket_mb": 0}}, "data.bucket_mb = 0", "Expected auto, or a number of at least 0.001"),
    ({"data": {"bucket_mb": float("nan")}}, "data.bucket_mb = NaN", "or a number of at least 0.001"),
    ({"data": {"prefetch": -1}}, "data.prefetch = -1", "Expected a whole number of at least 0."),
    ({"data": {"kind": "fsdp2", "wrap": []}}, "data.wrap = []", "or a list with at least 1 item"),
    ({"data": {"kind": "fsdp2", "wrap": ["A", "A"]}}, 'data.wrap = ["A", "A"]', "a list with at least 1 item, all"),
    ({"data": {"kind": "fsdp2", "wrap": ["A", 1]}}, 'data.wrap = ["A", 1]', "a list with at least 1 item, all"),
    ({"data": {"kind": "fsdp2", "wrap": "LlamaDecoderLayer"}}, "data.wrap = L", "Write a list: [LlamaDecoderLayer]."),
    ({"data": {"kind": "fsdp2", "wrap_min_parameters": 0}}, "data.wrap_min_parameters = 0", "at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "named", "said"), WRONG)
def test_a_mistake_is_reported_with_its_path(data: Any, named: str, said: str) -> None:
    message = error_of(data)
    assert named in message and said in message
    assert "mistakes" not in message  # and nothing else is reported


# ------------------------------------------------------------------------------------------------ options together

TOGETHER = [
    # data options, the option that is refused, the reason
    ({"kind": "ddp", "replicate": 2}, "replicate", "Only hsdp keeps several copies of the model"),
    ({"kind": "fsdp2", "replicate": 2}, "replicate", "the kind is fsdp2"),
    ({"kind": "ddp", "offload": True}, "offload", "ddp keeps whole parameters on every rank's device"),
    ({"kind": "zero1", "offload": True}, "offload", "zero1 keeps whole parameters"),
    ({"kind": "fsdp1", "bucket_mb": 25}, "bucket_mb", "fsdp1 has no buckets"),
    ({"kind": "hsdp", "gradient_as_bucket_view": False}, "gradient_as_bucket_view", "hsdp has no buckets"),
    ({"kind": "fsdp2", "static_graph": True}, "static_graph", "fsdp2 does not record the graph"),
    ({"kind": "zero3", "find_unused": False}, "find_unused", "zero3 does not wait"),
    ({"kind": "ddp", "reshard_after_forward": False}, "reshard_after_forward", "nothing is gathered"),
    ({"kind": "zero1", "reshard_after_forward": 2}, "reshard_after_forward", "nothing is gathered"),
    ({"kind": "zero2", "reshard_after_forward": True}, "reshard_after_forward", "Use zero3 or fsdp2."),
    ({"kind": "zero2", "reshard_after_forward": 2}, "reshard_after_forward", "zero2 keeps gathered parameters"),
    ({"kind": "zero3", "reshard_after_forward": False}, "reshard_after_forward", "Use zero2, or fsdp2 to choose."),
    ({"kind": "fsdp1", "reshard_after_forward": 2}, "reshard_after_forward", "or the kind fsdp2"),
    ({"kind": "fsdp2", "reshard_after_forward": 1}, "reshard_after_forward", "at least 2"),
    ({"kind": "fsdp2", "reshard_after_forward": -4}, "reshard_after_forward", "at least 2"),
    ({"kind": "ddp", "param_dtype": "bf16"}, "param_dtype", "the run's precision (autocast)"),
    ({"kind": "zero1", "reduce_dtype": "fp32"}, "reduce_dtype", "sums gradients in their own type"),
    ({"kind": "fsdp2", "buffer_dtype": "fp32"}, "buffer_dtype", "Only fsdp1 casts buffers"),
    ({"kind": "ddp", "prefetch": 1}, "prefetch", "cannot be set"),
    ({"kind": "fsdp1", "prefetch": 1}, "prefetch", "fsdp1 decides by itself"),
    ({"kind": "ddp", "wrap": ["Block"]}, "wrap", "it wraps the model once, as a whole"),
    ({"kind": "ddp", "wrap": "none"}, "wrap", "it wraps the model once, as a whole"),
    ({"kind": "zero1", "wrap_min_parameters": 5}, "wrap_min_parameters", "it wraps the model once"),
    ({"kind": "fsdp2", "wrap": "none", "wrap_min_parameters": 5}, "wrap_min_parameters", "whatever its size"),
    ({"kind": "fsdp2", "wrap": "none", "prefetch": 1}, "prefetch", "there is no next one to fetch"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "refused", "reason"), TOGETHER)
def test_conflicting_options_are_refused(options: dict[str, Any], refused: str, reason: str) -> None:
    message = error_of({"data": options})
    assert message.startswith(f"data.{refused} = ") and reason in message
    assert "mistakes" not in message
    with pytest.raises(ConfigError, match=f"DataPlan.{refused} = "):  # the same in Python
        DataPlan(**options)


ALONE = [
    {"kind": "ddp", "bucket_mb": 25, "static_graph": True, "gradient_as_bucket_view": False, "find_unused": False},
    {"kind": "zero1", "bucket_mb": 0.5, "static_graph": True},
    {"kind": "fsdp1", "param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32", "offload": True},
    {"kind": "fsdp1", "reshard_after_forward": False, "wrap": ["Block"], "wrap_min_parameters": 100},
    {"kind": "fsdp2", "reshard_after_forward": 4, "prefetch": 2, "wrap": "auto", "wrap_min_parameters": 100},
    {"kind": "zero2", "reshard_after_forward": False, "prefetch": 1, "offload": True},
    {"kind": "zero3", "reshard_after_forward": True},
    {"kind": "hsdp", "replicate": 2, "reshard_after_forward": 2, "param_dtype": "fp16"},
    {"kind": "ddp", "offload": False, "replicate": None, "wrap": "auto", "prefetch": 0},  # the defaults, said
]


@pytest.mark.parametrize("options", ALONE)
def test_compatible_options_are_accepted(options: dict[str, Any]) -> None:
    assert Plan.from_data({"data": options}).data == DataPlan(**options)


def test_conflicts_between_modules_and_data_are_refused() -> None:
    modules = {"vision": {"precision": "fp32", "zero": 3}, "language_model": {"precision": "bf16"}}
    message = error_of({"modules": modules, "data": {"kind": "hsdp", "param_dtype": "bf16"}})
    assert "2 mistakes" in message
    assert "modules.vision.zero = 3\n  data.kind is hsdp" in message
    assert "modules.vision.precision = fp32\n  data.param_dtype = bf16 holds for every module." in message


def test_all_to_all_has_nothing_to_distribute() -> None:
    for distribution in ("zigzag", "makespan_min"):
        options = {"cp": 2, "cp_mode": "all_to_all", "cp_distribution": distribution}
        assert f"cp_distribution = {distribution}\n  With all_to_all every rank" in error_of(module(**options))
    ModulePlan(cp=2, cp_mode="all_to_all", cp_distribution="uniform")


def test_all_mistakes_are_reported_at_once() -> None:
    message = error_of(
        {
            "module": {"vision": {"tp": 0, "pp": "2"}, "language_model": {"cp": 2, "presicion": "bf17"}},
            "data": {"kind": "ddp", "offload": True, "replicate": 2, "bucket_mb": "many"},
            "ranks": "shared",
        }
    )
    keys = [line.split(" = ")[0] for line in message.splitlines()[1:] if not line.startswith("  ")]
    assert message.startswith("9 mistakes:\n")
    assert sorted(keys) == [
        "data.bucket_mb", "data.offload", "data.replicate", "module", "module.language_model.presicion",
        "module.language_model.presicion", "module.vision.pp", "module.vision.pp", "module.vision.tp",
    ]  # fmt: skip


def test_a_wrong_kind_blames_no_other_option() -> None:
    assert error_of({"data": {"kind": "ddpp", "offload": True, "replicate": 3}}).startswith("data.kind = ddpp")


def test_thousands_of_mistakes_are_cut_off() -> None:
    message = error_of({"modules": {f"m{i}": {"tp": 0} for i in range(500)} | {"language_model": {}}})
    assert message.startswith("500 mistakes:") and "… and 450 more" in message and len(message) < 10_000


# ------------------------------------------------------------------------------------------------ ranks


SHARING = [
    # sizes (stages, cp, tp) of an encoder and the language model, whether auto shares
    ((1, 1, 1), (1, 1, 1), True),
    ((1, 2, 4), (1, 2, 4), True),
    ((1, 1, 1), (1, 1, 2), False),
    ((1, 1, 1), (1, 2, 1), False),
    ((1, 2, 1), (1, 2, 4), False),
    ((1, 1, 2), (1, 1, 3), False),
    ((1, 1, 1), (2, 1, 1), False),
    ((2, 1, 1), (2, 1, 1), False),
]


@pytest.mark.parametrize(("vision", "llm", "together"), SHARING)
def test_modules_share_their_ranks_where_they_can(vision: Any, llm: Any, together: bool) -> None:
    modules = {
        name: ModulePlan(stages=sizes[0], cp=sizes[1], tp=sizes[2])
        for name, sizes in (("vision", vision), ("language_model", llm))
    }
    own = vision[0] * vision[1] * vision[2] + llm[0] * llm[1] * llm[2]
    plan = Plan(modules)
    assert plan.shared == together
    assert plan.replica == (llm[1] * llm[2] if together else own)
    apart = Plan(modules, ranks="own")
    assert not apart.shared and apart.replica == own
    largest = [max(sizes) for sizes in zip(vision, llm, strict=True)]
    fits = all(big % one == 0 for sizes in (vision, llm) for big, one in zip(largest, sizes, strict=True))
    if largest[0] == 1 and fits:
        assert Plan(modules, ranks="shared").shared
        assert Plan(modules, ranks="shared").replica == largest[1] * largest[2]
    else:
        with pytest.raises(ConfigError, match="Modules on the same ranks have one stage each"):
            Plan(modules, ranks="shared")


COLOCATED = [
    # sizes (stages, cp, tp) of two encoders and the language model, ranks of a replica; None: refused
    ((1, 1, 1), (1, 1, 1), (2, 1, 2), 5),
    ((2, 1, 1), (2, 1, 2), (3, 2, 2), 16),
    ((1, 2, 1), (1, 1, 2), (1, 1, 1), 5),
    ((1, 1, 1), (2, 1, 1), (1, 1, 1), None),
    ((1, 1, 2), (1, 1, 3), (1, 1, 1), None),
]
FIRST_STAGE = [
    ((1, 1, 1), (1, 1, 2), (3, 1, 2), 6),
    ((1, 1, 1), (1, 2, 1), (1, 2, 2), 4),
    ((2, 1, 1), (1, 1, 1), (2, 1, 1), None),
    ((1, 1, 2), (1, 1, 1), (2, 1, 1), None),
]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [*(("colocated", sizes) for sizes in COLOCATED), *(("first_stage", sizes) for sizes in FIRST_STAGE)],
)
def test_encoders_on_shared_ranks_need_fitting_sizes(ranks: Any, sizes: Any) -> None:
    *each, replica = sizes
    modules = {
        name: ModulePlan(stages=stages, cp=cp, tp=tp)
        for name, (stages, cp, tp) in zip(("vision", "audio", "language_model"), each, strict=True)
    }
    if replica is None:
        with pytest.raises(ConfigError, match=rf"ranks = {ranks}\n  Encoders .* have .*stage.*\n  Found vision: "):
            Plan(modules, ranks=ranks)
        return
    plan = Plan(modules, ranks=ranks, schedule="gpipe")
    assert plan.replica == replica and Plan.from_data(plan.as_data()) == plan
    if ranks == "colocated":
        assert plan.sharing == (("vision", "audio"), ("language_model",)) and not plan.shared and plan.is_pipeline
        assert plan.describe().startswith("3 modules, the encoders on the same ranks, ")
    else:
        assert plan.sharing == (("vision", "audio", "language_model"),)
        assert plan.shared == (not plan.is_pipeline) == (each[2][0] == 1)
    assert plan.describe().endswith("schedule: gpipe" if plan.is_pipeline else "data parallelism: ddp")


def test_virtual_stages_take_no_more_ranks() -> None:
    plan = Plan({"model": ModulePlan(stages=2, virtual_stages=3, tp=2)}, schedule="interleaved")
    assert plan.replica == 4 and "2 stages of 3 parts × tp 2" in plan.describe()
    assert Plan.from_data(plan.as_data()) == plan != dataclasses.replace(plan, schedule="1f1b")


@pytest.mark.parametrize("ranks", ["auto", "shared", "own", "colocated", "first_stage"])
def test_one_module_is_alone_under_every_placement(ranks: Any) -> None:
    for name in ("model", "language_model"):
        plan = Plan({name: ModulePlan(stages=3, tp=2)}, ranks=ranks)
        assert plan.shared and plan.is_pipeline and plan.replica == 6 and plan.sharing == ((name,),)


def test_the_plan_knows_every_schedule() -> None:
    assert get_args(get_type_hints(Plan)["schedule"]) == POLICIES


def test_one_module_may_have_stages_on_shared_ranks() -> None:
    plan = Plan({"model": ModulePlan(stages=4, tp=2)}, ranks="shared")
    assert plan.replica == 8
    assert Plan() == Plan({"model": ModulePlan()}, DataPlan(), "auto") == Plan.from_data({})


def test_the_language_model_is_put_last() -> None:
    plan = Plan.from_data({"modules": {"language_model": None, "vision": {"tp": 2}, "audio": {}}})
    assert list(plan.modules) == ["vision", "audio", "language_model"]


def test_a_zero_stage_overrides_the_kind_of_a_module() -> None:
    modules = {"a": ModulePlan(zero=0), "b": ModulePlan(zero=2), "language_model": ModulePlan()}
    plan = Plan(modules, DataPlan("fsdp2"))
    assert [plan.kind(name) for name in plan.modules] == ["ddp", "zero2", "fsdp2"]


# ------------------------------------------------------------------------------------------------ data and back

dtypes = st.sampled_from([None, "fp32", "bf16", "fp16"])
sizes = st.integers(1, 9)
module_plans = st.fixed_dictionaries(
    {},
    optional={
        "tp": sizes,
        "cp": sizes,
        "stages": sizes,
        "virtual_stages": st.integers(1, 3),
        "cp_mode": st.sampled_from(["ring_attn", "all_to_all", "gather"]),
        "cp_distribution": st.sampled_from(["uniform", "zigzag", "makespan_min", "auto"]),
        "zero": st.sampled_from([None, 0, 1, 2, 3]),
        "activation_checkpointing": st.booleans(),
        "precision": dtypes,
    },
)
data_plans = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "hsdp"]),
        "replicate": st.none() | sizes,
        "param_dtype": dtypes,
        "reduce_dtype": dtypes,
        "bucket_mb": st.none() | st.integers(1, 100) | st.floats(0.5, 100),
        "offload": st.booleans(),
        "reshard_after_forward": st.none() | st.booleans() | st.integers(2, 4),
        "prefetch": st.integers(0, 2),
        "wrap": st.sampled_from(["auto", "none", ["Block"], ["Block", "Layer"]]),
        "wrap_min_parameters": st.none() | st.integers(1, 10**12),
    },
)
plan_data = st.fixed_dictionaries(
    {},
    optional={
        "modules": st.dictionaries(st.sampled_from(["vision", "audio", "video"]), module_plans, max_size=3).map(
            lambda encoders: {**encoders, "language_model": {}}
        ),
        "data": data_plans,
        "ranks": st.sampled_from(["auto", "shared", "own", "colocated", "first_stage"]),
        "schedule": st.sampled_from(POLICIES),
    },
)


@given(plan_data)
def test_a_plan_survives_serialization(data: dict[str, Any]) -> None:
    given_data = copy.deepcopy(data)
    plan, mistakes = read_plan(data)
    assert data == given_data  # it is only read
    assert (plan is None) == bool(mistakes)
    if plan is None:
        return
    again = Plan.from_data(plan.as_data())
    assert again == plan and hash(again) == hash(plan) and list(again.modules) == list(plan.modules)
    assert again.as_data() == plan.as_data()
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == dataclasses.replace(plan) == plan
    assert eval(repr(plan), vars(plan_room)) == plan
    for name in plan.modules:
        assert name in plan.describe()


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
names = [field.name for kind in (ModulePlan, DataPlan) for field in dataclasses.fields(kind)]
near_junk = st.dictionaries(st.sampled_from(["modules", "data", "ranks", "schedule", "mdules"]), junk | st.dictionaries(
    st.sampled_from(["model", "language_model", *names]), junk | st.dictionaries(st.sampled_from(names), junk)
))  # fmt: skip


@given(junk | near_junk)
def test_no_data_breaks_the_reader(data: Any) -> None:
    plan, mistakes = read_plan(data)
    assert (plan is None) == bool(mistakes)
    assert all(str(mistake).isprintable() or "\n" in str(mistake) for mistake in mistakes)
    if plan is not None:
        assert Plan.from_data(plan.as_data()) == plan


def test_plans_of_another_order_are_not_equal() -> None:
    a = Plan({"vision": ModulePlan(), "audio": ModulePlan(), "language_model": ModulePlan()})
    b = Plan({"audio": ModulePlan(), "vision": ModulePlan(), "language_model": ModulePlan()})
    assert a != b and a != "a" and len({a, b}) == 2


def test_a_plan_cannot_be_changed() -> None:
    given_modules = {"model": ModulePlan()}
    plan = Plan(given_modules)
    given_modules["other"] = ModulePlan()
    assert list(plan.modules) == ["model"]
    with pytest.raises(TypeError):
        plan.modules["other"] = ModulePlan()  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.data.kind = "fsdp2"  # type: ignore[misc]
    assert DataPlan("fsdp2", wrap=["Block"]).wrap == ("Block",)  # type: ignore[arg-type]


def test_python_is_checked_as_data_is() -> None:
    with pytest.raises(ConfigError, match=r"ModulePlan.tp = 0\n  Expected a whole number of at least 1."):
        ModulePlan(tp=0)
    with pytest.raises(ConfigError, match="modules.model.tp = 0\n  Expected a whole number"):
        Plan({"model": {"tp": 0}})  # type: ignore[dict-item]
    assert Plan({"model": {"tp": 2}}) == Plan({"model": ModulePlan(tp=2)})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="data = ddp\n  Expected a mapping with some of these keys: kind, replicate"):
        Plan(data="ddp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ranks = mine"):
        Plan(ranks="mine")  # type: ignore[arg-type]


def test_a_plan_describes_itself() -> None:
    modules = {
        "vision": ModulePlan(tp=2, activation_checkpointing=True),
        "language_model": ModulePlan(4, 2, stages=3, precision="bf16", zero=1),
    }
    plan = Plan(modules, DataPlan("fsdp2", prefetch=1, wrap=("Block",)))
    assert plan.describe() == (
        "2 modules on ranks of their own, 26 ranks in a replica\n"
        "  vision          tp 2, activation checkpointing\n"
        "  language_model  3 stages × cp 2 (ring_attn, auto) × tp 4, ZeRO-1, bf16\n"
        'data parallelism: fsdp2, prefetch 1, wrap ["Block"]\n'
        "schedule: 1f1b"
    )
    assert Plan().describe() == "1 module, 1 rank in a replica\n  model  one rank\ndata parallelism: ddp"


def test_the_section_of_a_config_is_a_plan() -> None:
    from cornstarch.config import ParallelConfig

    given = {"modules": {"model": {"stages": 2, "virtual_stages": 2}}, "ranks": "own", "schedule": "interleaved"}
    config, plan = ParallelConfig(**given), Plan.from_data(given)
    assert isinstance(config, Plan) and config.as_data().items() >= plan.as_data().items()
    assert config.describe() == plan.describe() and config.replica == plan.replica
    assert {*config.as_data()} - {*plan.as_data()} == {"verify", "auto", "cluster", "costs"}
    assert dict(ParallelConfig().modules) == dict(ParallelConfig(modules={}).modules) == dict(Plan().modules)
    assert pickle.loads(pickle.dumps(config)) == config == dataclasses.replace(config) != ParallelConfig()
    assert hash(config) == hash(ParallelConfig(**given))
    with pytest.raises(ConfigError, match="`auto` chooses `modules` and `ranks` and `schedule` itself"):
        ParallelConfig(**given, auto=True)


KINDS = [
    # kind, replicated by DDP, sharded, by fully_shard, unsynchronized, optimizer states sharded
    ("ddp", True, False, False, False, False),
    ("zero1", True, False, False, False, True),
    ("fsdp1", False, True, False, False, True),
    ("hsdp", False, True, True, False, True),
    ("gossip", False, False, False, True, False),
]


@pytest.mark.parametrize(("kind", "replicated", "sharded", "fully", "unsynchronized", "optimizer"), KINDS)
def test_a_kind_says_what_is_sharded(
    kind: Any, replicated: bool, sharded: bool, fully: bool, unsynchronized: bool, optimizer: bool
) -> None:
    found = [kind in kinds for kinds in (data_options.REPLICATED, data_options.SHARDED, data_options.FULLY_SHARD)]
    assert found == [replicated, sharded, fully]
    assert DataPlan(kind).is_unsynchronized == (kind in data_options.UNSYNCHRONIZED) == unsynchronized
    assert (kind == "zero1" or kind in data_options.SHARDED) == optimizer


def test_plans_and_layouts_import_no_torch() -> None:
    code = (
        "import sys\nfrom cornstarch.plan.plan import Plan\nPlan.from_data({})\nassert 'numpy' not in sys.modules\n"
        "import cornstarch.plan.layout, cornstarch.plan.picture\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]", ran.stderr
