"""From text to `RunConfig` and back."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cornstarch.config.json_schema import canonical_schema, describe, field_documents, leaves, locate, run_schema
from cornstarch.config.yaml_tree import scalar
from cornstarch.errors import ConfigError
from cornstarch.train import RunConfig, config_difference, dump_config, load_config

SMALL = """\
model:
  language_model: {path: llm}
data:
  train: a.json
"""


def load(tmp_path: Path, text: str | bytes, *overrides: str, base: dict[str, Any] | None = None) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, overrides, base)


def complaint(tmp_path: Path, text: str | bytes, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value).replace(f"{tmp_path}/", "")


# ------------------------------------------------------------------------------------------------ what is read


def test_a_file_is_what_python_would_build(tmp_path: Path) -> None:
    text = SMALL + "optimizer: {learning_rate: 1e-5, betas: [0.9, 0.95]}\noutput: runs/here\nloop: {steps: 1_000}\n"
    expected = RunConfig.model_validate(
        {
            "model": {"language_model": {"path": "llm"}},
            "data": {"train": [{"path": "a.json"}]},
            "optimizer": {"learning_rate": 1e-5, "betas": (0.9, 0.95)},
            "output": Path("runs/here"),
            "loop": {"steps": 1000},
        }
    )
    assert load(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1E5", 1e5), ("-1.5e+3", -1500.0), (".5", 0.5), ("5.", 5.0), ("+3", 3), ("1_000_000", 10**6),
        ("0x1F", 31), ("0o17", 15), ("0b11", 3), ("0", 0), ("-0", 0), ("", None), ("~", None), ("null", None),
        ("true", True), ("FALSE", False), (".inf", math.inf), ("-.Inf", -math.inf),
        ("y", "y"), ("n", "n"), ("inf", "inf"), ("nan", "nan"), ("1:30", "1:30"), ("2024-01-31", "2024-01-31"),
        ("1_0", "1_0"), ("1.2.3", "1.2.3"), ("e5", "e5"), (".", "."), ("0x", "0x"), ("1e", "1e"), ("=", "="),
        (str(2**63 - 1), 2**63 - 1), (str(-(2**63)), -(2**63)),
    ],
)  # fmt: skip
def test_scalars(text: str, value: Any) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_not_a_number_is_one_word() -> None:
    assert math.isnan(scalar(".nan"))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["yes", "No", "ON", "off", "010", "-007", "00", "1e999", str(2**63), "9" * 5000])
def test_scalars_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        scalar(text)


def test_keys_are_texts_and_quotes_make_texts(tmp_path: Path) -> None:
    text = SMALL.replace("{path: llm}", '{config: {id2label: {0: cat, on: dog}, note: "no"}}') + 'name: "2024"\n'
    config = load(tmp_path, text)
    assert config.model.language_model is not None
    assert config.model.language_model.config == {"id2label": {"0": "cat", "on": "dog"}, "note": "no"}
    assert config.name == "2024"


def test_an_alias_is_the_same_value_twice(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL.replace("a.json", "&here a.json") + "  evaluation: *here\n")
    assert config.data.evaluation == config.data.train


def test_a_file_goes_over_the_base_and_the_command_line_over_both(tmp_path: Path) -> None:
    base = {"optimizer": {"learning_rate": 1.0, "clip": 5.0}, "seed": 7, "data": {"evaluation": ["x", "y"]}}
    config = load(tmp_path, SMALL + "seed: 8\noptimizer: {clip: 6}\n", "optimizer.max_grad_norm=null", base=base)
    assert (config.seed, config.optimizer.learning_rate, config.optimizer.max_grad_norm) == (8, 1.0, None)
    assert [source.path for source in config.data.evaluation] == ["x", "y"]


def test_without_a_file_the_base_is_the_run() -> None:
    base = {"model": {"factory": {"function": "a:b"}}, "data": {"train": "x"}}
    assert load_config(None, ["name=here"], base).name == "here"


# ------------------------------------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
        ("optimizer.betas=[0.5, 0.6]", "optimizer.betas", (0.5, 0.6)),
        ("logging.to=[tensorboard]", "logging.to", ["tensorboard"]),
        ("data.train.0.path=b.json", "data.train.0.path", "b.json"),
        ("data.train.0.weight=2", "data.train.0.weight", 2.0),
        ("data.train.1=c.json", "data.train.1.path", "c.json"),
        ("data.evaluation.0.path=e.json", "data.evaluation.0.path", "e.json"),
        ("data.train=[x.json, {path: y.json}]", "data.train.1.path", "y.json"),
        ("data.system=Answer: yes or no # really", "data.system", "Answer: yes or no # really"),
        ("data.system='no'", "data.system", "no"),
        ("data.system=a=b", "data.system", "a=b"),
        ("data.chat_template='{{ x }}'", "data.chat_template", "{{ x }}"),
        ("data.chat_template={% if a %}b{% endif %}", "data.chat_template", "{% if a %}b{% endif %}"),
        ("data.system=", "data.system", None),
        ("model.encoders.vision.path=clip", "model.encoders.vision.path", "clip"),
        ("output=/some/where", "output", Path("/some/where")),
        (" seed = 5", "seed", 5),
    ],
)
def test_overrides(tmp_path: Path, override: str, key: str, value: Any) -> None:
    found: Any = load(tmp_path, SMALL, override)
    for step in key.split("."):
        found = found[int(step)] if step.isdigit() else found[step] if isinstance(found, dict) else getattr(found, step)
    assert found == value


EVALUATED = ["data.evaluation=e.json", "loop.evaluate_every=5"]


def test_a_section_that_is_not_there_is_made_by_an_override(tmp_path: Path) -> None:
    stopping = load(tmp_path, SMALL, *EVALUATED, "loop.early_stopping.patience=9").loop.early_stopping
    assert stopping is not None and stopping.patience == 9


@pytest.mark.parametrize(
    ("left_out", "said"), list(zip(EVALUATED, ("has no data", "there is one, at the end"), strict=True))
)
def test_early_stopping_needs_evaluations(tmp_path: Path, left_out: str, said: str) -> None:
    given = [one for one in EVALUATED if one != left_out]
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, SMALL, *given, "loop.early_stopping.patience=9")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "Expected `key.path=value`"),
        ("=5", "Expected `key.path=value`"),
        ("a..b=5", "Expected `key.path=value`"),
        ("sed=5", "Did you mean `seed`?"),
        ("seed.x=5", "seed\n  Expected a whole number of at least 0."),
        ("name.x=5", "`name` is the value run, which has no keys."),
        ("data.train.7=b", "`data.train` is a list of 1."),
        ("data.train.path=b", "`data.train.0` is the first"),
        ("optimizer.betas=[1", "It cannot be read as YAML"),
        ("data.packing=no", "Write false"),
        ("name=\ud800", "half a character"),
        ("n\ud800=1", "Expected `key.path=value`"),
        ("seed=1e5", "Write 100000."),
    ],
)
def test_mistakes_in_overrides(tmp_path: Path, override: str, expected: str) -> None:
    said = complaint(tmp_path, SMALL + "name: run\n", override)
    assert said.startswith("command line  ")
    assert expected in said


def test_a_conflict_of_options_is_placed_where_the_first_was_given(tmp_path: Path) -> None:
    assert complaint(tmp_path, SMALL, "loop.on_bad_loss=rewind").startswith("command line\n  `loop.on_bad_loss` = rew")
    lines = SMALL.count("\n")
    said = complaint(tmp_path, SMALL + "loop:\n  steps: 9\n  on_bad_loss: rewind\n")
    assert said.startswith(f"run.yaml:{lines + 3}\n  `loop.on_bad_loss` = rewind")


# ------------------------------------------------------------------------------------------------ mistakes

PLACED = [
    ("sed: 1", "run.yaml:5  sed = 1\n  There is no `sed` in a run's config.\n  Did you mean `seed`?"),
    ("per_device_train_batch_size: 1", "× gradient_accumulation_steps × the number of devices"),
    ("resume_from_checkpoint: true", "Here that is `output: FOLDER`"),
    ("dropout: 1", "Did you mean `model.language_model.lora.dropout`"),
    ("deepspeed: ds.json", "no `deepspeed` in a run's config.\n  Here that is `parallel.data.kind: zero1, zero2"),
    ("speedseeed: 1", "no `speedseeed` in a run's config.\n  Expected one of: "),
    ("optimizer: {name: adamw_8bit}", "torch.optim has no `adamw_8bit`. Did you mean `adamw`?"),
    ("optimizer: {name: torch.optim.Adafacter}", "Did you mean `Adafactor`?"),
    ("device: gpu", "run.yaml:5  device = gpu\n  A run cannot use such a device. Did you mean `cuda`?"),
    ("device: gpu:1", "Did you mean `cuda:1`?"),
    ("device: here", "A run cannot use such a device. Expected auto, cpu, cuda, cuda:<number>, mps or xpu."),
    ("optimizer: {lerning_rate: 1}", "Did you mean `learning_rate`?"),
    ("optimizer: {lr: 1, learning_rate: 2}", "run.yaml:5  optimizer.lr = 1\n  It is another name of `learning_rate`"),
    ("optimizer.max_grad_norm: 1", "In a file, nest it: one line for each of `optimizer:`, `max_grad_norm:`"),
    ("parallel: {tp: 1}", "Expected one of: modules, data, ranks, schedule, verify"),
    ("parallel: {data: {kind: ddp, offload: true}}", "only shards can wait in the CPU's memory"),
    ("loop: {zzz: 1}", "Expected one of: steps, epochs,"),
    ("seed: -1", "run.yaml:5  seed = -1\n  Expected a whole number of at least 0."),
    ("seed: true", "seed = true\n  Expected a whole number of at least 0."),
    ('seed: "5"', 'seed = "5"\n  Expected a whole number of at least 0.\n  Leave out the quotes.'),
    ("seed: 5.0", "Write 5."),
    ("seed:", "seed = \n  Expected a whole number"),
    ("name: 2024", 'Put a text in quotes: "2024".'),
    ("name: a b", "Expected a text that matches"),
    ("loop: {activation_budget: 20 gigabytes}", "or a text such as `20 GB`"),
    ("precision: fp8", "Expected fp32, bf16, fp16 or auto."),
    ("schedule: {name: cosin}", "Did you mean `cosine`?"),
    ("schedule:", "Expected a mapping with some of these keys: name, warmup, min_lr_ratio."),
    ("optimizer: {betas: [0.9]}", "optimizer.betas = [0.9]\n  Expected a list of 2 values, each a number from 0 to 1."),
    ("optimizer: {clip: 0}", "Expected a number above 0, or null."),
    ("optimizer: {learning_rate: .nan}", "Expected a number above 0."),
    ("loop: {ema: 1}", "Expected a number above 0 and below 1, or null."),
    ("loop: {batch_size: 10, accumulation: 3}", "run.yaml:5  loop\n  `batch_size` = 10 is no multiple"),
    ("loop:\n  steps: 1\n  epochs: 1", "run.yaml:5  loop\n  Give either `steps` or `epochs`."),
    ("logging: {to: [tensorbord]}", "logging.to.0 = tensorbord\n"),
    ("seed: 1\nseed: 2", "run.yaml:6  seed = 2\n  It is given twice, first in line 5."),
    ("loop: {activation_checkpointing: yes}", "Write true, or \"yes\" for the text."),
    ("seed: 010", "A leading zero"),
    ("seed: 99999999999999999999", "Whole numbers go from"),
    ("<<: {seed: 1}", "Merge keys"),
    ("? [a]\n: 1", "A key is a list or a mapping"),
    ("? \n: 1", "There is no name before the colon."),
    ('name: "\\ud800"', "half a character"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), PLACED)
def test_one_mistake_with_its_place(tmp_path: Path, line: str, expected: str) -> None:
    said = complaint(tmp_path, f"{SMALL}{line}\n")
    assert expected in said
    assert said.startswith("run.yaml:"), said


MODELS = [
    ("language_model: {}", "give either `path`"),
    ("language_model: {path: a, config: {}}", "give either `path`"),
    ("{}", "found none"),
    ("{whole: {path: a}, factory: {function: 'a:b'}}", "found whole, factory"),
    ("{whole: {path: a}, encoders: {v: {path: b}}}", "there is none"),
    ("{language_model: {path: a}, encoders: {a-b: {path: b}}}", "The name `a-b` cannot be used"),
    ("{language_model: {path: a}, encoders: {v: {path: 5}}}", "model.encoders.v.path = 5"),
    ("{language_model: {path: a, lora: {targets: 5}}}", "Expected all-linear, or a list, each item a text."),
    ("{factory: {function: nothing}}", "Expected a text that matches"),
    ("{language_model: {pth: a}}", "Did you mean `path`?"),
]


@pytest.mark.parametrize(("model", "expected"), MODELS)
def test_mistakes_of_the_model(tmp_path: Path, model: str, expected: str) -> None:
    said = complaint(tmp_path, f"model:\n  {model}\ndata: {{train: a.json}}\n")
    assert expected.lower() in said.lower()
    assert "mistakes:" not in said, said


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("[]", "data.train = []\n  Expected"),
        ("", "data.train = \n  Expected a text, or a mapping with some of these keys: path"),
        ("5", "data.train.0 = 5"),
        ("{format: llava}", "data.train.0.path\n  It is missing.\n  Expected a text."),
        ("[{path: a, wieght: 2}]", "data.train.0.wieght = 2\n"),
        ("[{path: a, weight: 0}]", "data.train.0.weight = 0\n  Expected a number above 0."),
    ],
)
def test_mistakes_of_sources(tmp_path: Path, train: str, expected: str) -> None:
    assert expected in complaint(tmp_path, f"model: {{whole: {{path: a}}}}\ndata:\n  train: {train}\n")


TEXTS: list[tuple[str | bytes, str]] = [
    ("", "It is empty."),
    ("# only a comment\n", "It is empty."),
    ("- a\n- b\n", "It holds a list"),
    ("just words", "It holds a single value"),
    ("a: [1, 2", "It cannot be read as YAML"),
    ("model:\n\tlanguage_model: a", "run.yaml:2\n  A tab cannot indent."),
    ("a: b: c", "run.yaml:1\n  A second `key: value` on one line."),
    ("a: 1\n---\nb: 2", "two documents"),
    ("a: *nowhere", "no such anchor"),
    ("seed: 1\nname: caf\xe9".encode("latin-1"), "run.yaml:2\n  Byte 0xe9 is not UTF-8."),
    ("\x00a: 1", "control character 0x00"),
    ("a: 1\nb: \x07", "run.yaml:2\n  It holds the control character 0x07"),
    ("a: !!python/object/apply:os.system [ls]", "tags are not read here"),
    ("a: !!str 5", "tags are not read here"),
    ("[" * 5000, "nested more than 32 levels deep"),
    ("{a: " * 5000, "nested more than 32 levels deep"),
    ("- " * 5000, "nested more than 32 levels deep"),
    ("\n".join(" " * depth + "a:" for depth in range(500)), "nested more than 32 levels deep"),
    ("a: &a [*a]", "nested more than 32 levels deep"),
    ("a: [" + "1, " * 20_000 + "]", "more than 10000 values"),
    ("x" * 300_000, "more than 262144 bytes"),
    ('a: "\\U00110000"', "It cannot be read as YAML"),
    ("%YAML 1." + "1" * 5000 + "\n---\na: 1", "It cannot be read as YAML"),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS, ids=range(len(TEXTS)))
@pytest.mark.timeout(100)
def test_texts_that_are_no_config(tmp_path: Path, text: str | bytes, expected: str) -> None:
    said = complaint(tmp_path, text)
    assert expected in said
    assert len(said) < 500


@pytest.mark.timeout(100)
def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20)]
    assert "once every alias is written out" in complaint(tmp_path, "\n".join(lines))


@pytest.mark.timeout(100)
def test_a_scalar_of_many_digits_takes_no_time(tmp_path: Path) -> None:
    assert "seed" in complaint(tmp_path, SMALL + "seed: " + "1" * 100_000 + "." + "1" * 100_000 + "x")


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode()).data.train[0].path == "a.json"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="It is a folder"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="There is no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="It cannot be read"):
        load_config("a\0b")
    with pytest.raises(ConfigError, match="It cannot be read"):
        load_config("x" * 5000)


def test_nothing_at_all_names_what_is_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None)
    assert "model\n  It is missing." in str(caught.value)
    assert "data\n  It is missing." in str(caught.value)


def test_all_mistakes_are_told_together_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "nme: x\nmodel:\n  language_model: {pth: a, train: frzen}\ndata:\n  train: a\n  packing: yes\n"
        "optimzer:\n  learning_rate: -1\nloop:\n  stps: 5\n  batch_size: 10\n  accumulation: 3\n"
    )
    said = complaint(tmp_path, text, "seed=x", "data.system")
    assert said.splitlines()[0] == "10 mistakes:"
    heads = [line for line in said.splitlines()[1:] if not line.startswith(" ")]
    assert heads == [
        "run.yaml:1  nme = x",
        "run.yaml:3  model.language_model.pth = a",
        "run.yaml:3  model.language_model.train = frzen",
        "run.yaml:6  data.packing = yes",
        "run.yaml:7  optimzer",
        "run.yaml:8  optimizer.learning_rate = -1",  # the misspelt section was looked into
        "run.yaml:9  loop",  # and so was what its keys have to do with each other
        "run.yaml:10  loop.stps = 5",
        "command line  data.system",
        "command line  seed = x",
    ]


def test_thousands_of_mistakes_are_not_all_told(tmp_path: Path) -> None:
    said = complaint(tmp_path, SMALL + "".join(f"key{i}: 1\n" for i in range(4000)))
    assert said.startswith("4000 mistakes:")
    assert said.endswith("… and 3950 more")


# ------------------------------------------------------------------------------------------------ writing


def test_the_written_config_is_the_same_config(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL + "output: x/y\n", "data.train.0.weight=0.25", "optimizer.eps=1e-12", 'name="1e-5"')
    assert load(tmp_path, dump_config(config)) == config


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["yes", "010", "1e-5", "<<", "=", "~", "null", " a", "a: b", "- x", "#", "1:30", "2024-01-01"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(
    arguments=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=4),
    system=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_whatever_can_be_said_can_be_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, arguments: dict[str, Any], system: str
) -> None:
    base = {"model": {"factory": {"function": "a:b", "arguments": arguments}}, "data": {"train": "x", "system": system}}
    config = RunConfig.model_validate(base)
    assert load(tmp_path_factory.getbasetemp(), dump_config(config)) == config


def test_other_readers_of_yaml_read_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL, "optimizer.arguments={a: 'no', b: '010', c: 1.5, d: null, e: true}")
    assert yaml.safe_load(dump_config(config))["optimizer"]["arguments"] == config.optimizer.arguments


def test_differences_are_named(tmp_path: Path) -> None:
    one = load(tmp_path, SMALL, "optimizer.arguments={a: 1, b: 2}")
    other = load(tmp_path, SMALL, "optimizer.arguments={a: 1.0, c: 2}", "loop.steps=5", "data.train.1=b", "output=x")
    assert config_difference(one, one) == []
    lines = config_difference(one, other)
    assert [line for line in lines if not line.startswith("data.train.1")] == [
        'output: null → "x"',
        "optimizer.arguments.a: 1 → 1.0",
        "optimizer.arguments.b: 2 → absent",
        "optimizer.arguments.c: absent → 2",
        "loop.steps: null → 5",
    ]
    assert any(line.startswith('data.train.1: absent → {"path": "b"') for line in lines)


# ------------------------------------------------------------------------------------------------ schema


def test_every_value_of_the_description_can_be_described() -> None:
    for path in leaves(canonical_schema()):
        schema = locate(path)
        assert schema is not None
        assert describe(schema)
    assert locate(("model", "encoders", "any", "lora", "rank")) is not None
    assert locate(("data", "train", 3, "path")) is not None
    assert locate(("data", "train", "no")) is None


def test_documentation_of_fields_is_found_also_where_it_is_inherited() -> None:
    assert field_documents()["PartConfig"]["path"] == "A local folder or a hub name."
    definitions = run_schema()["$defs"]
    assert definitions["EncoderConfig"]["properties"]["path"]["description"] == "A local folder or a hub name."


def test_reading_configs_does_not_import_torch() -> None:
    code = (
        "import sys, cornstarch.train as t; dir(t)\n"
        "try: t.load_config(None)\nexcept ValueError: pass\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_unknown_names_of_the_room_are_refused() -> None:
    import cornstarch.train

    with pytest.raises(AttributeError, match="no_such_name"):
        cornstarch.train.no_such_name  # noqa: B018


@pytest.mark.parametrize(("in_file", "override", "steps", "epochs"), [
    ("epochs: 2", "loop.steps=7", 7, None), ("steps: 7", "loop.epochs=2", None, 2.0), ("steps: 7", "seed=1", 7, None),
])  # fmt: skip
def test_a_length_on_the_command_line_stands_in_for_the_files(
    tmp_path: Path, in_file: str, override: str, steps: int | None, epochs: float | None
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{given: x}}\ndata: {{train: [a.json]}}\nloop: {{{in_file}}}\n")
    loop = load_config(path, [override]).loop
    assert (loop.steps, loop.epochs) == (steps, epochs)
