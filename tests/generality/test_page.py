"""The tested table and the page that is written from it."""

from __future__ import annotations

from collections import Counter

import pytest
import transformers

from cornstarch.parallel import tested
from cornstarch.parallel.tested import Sweep, Verdict
from tests.generality import results
from tests.generality.page import AXES, PAGE, page


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(tested.read_table()), "run: python -m tests.generality.page"


@pytest.mark.parametrize(("axis", "least"), [("tp", 93), ("cp", 79)])
def test_the_table_is_whole_and_nothing_is_wrong(axis: str, least: int) -> None:
    sweep = tested.read_table()[axis]
    assert sweep.versions["transformers"] == transformers.__version__, "run the sweeps again"
    assert sweep.verdicts.keys() == set(results.all_names(results.LANGUAGE_MODELS, results.ENCODERS))
    counts = Counter(verdict.status for verdict in sweep.groups[results.LANGUAGE_MODELS].values())
    assert counts[tested.PASSED] >= least
    assert all(verdict.status != tested.WRONG for verdict in sweep.verdicts.values())
    assert all(verdict.reason for verdict in sweep.verdicts.values() if verdict.status == tested.REFUSED)


def test_experts_of_most_mixtures_were_shared_out() -> None:
    found = tested.read_table()["ep"].verdicts
    assert sum(verdict.status == tested.PASSED for verdict in found.values()) >= 46
    assert not any(verdict.status == tested.WRONG for verdict in found.values())


def test_another_way_to_cut_is_another_column() -> None:
    versions = {"transformers": "5.22.2", "torch": "2.13.0"}
    one = {"AForCausalLM": Verdict("passed", whole=("B: why",)), "C": Verdict("refused", "C is | odd. Use 1.")}
    table = {axis: Sweep(versions, {"language models": one}) for axis in AXES}
    text = page(table)
    assert "| model | tp 2 | cp 2 | pp 2 | ep 2 |" in text
    assert f"| `AForCausalLM` |{' passed, in part |' * 4}" in text
    assert "| `C` |" + " refused: is \\| odd |" * 4 in text
    assert "| Language models | pp 2 | 1 | 1 | 1 | 0 |" in text
    assert "transformers 5.22.2, torch 2.13.0" in text


def test_a_few_models_join_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tested.read_table()
    kept: list[dict[str, Sweep]] = []
    monkeypatch.setattr(results, "write_table", lambda table: kept.append(dict(table)))
    results.keep("tp", {"LlamaForCausalLM": results.entry("refused", "a\n  reason")}, whole_sweep=False)
    verdicts = kept[0]["tp"].verdicts
    assert verdicts["LlamaForCausalLM"] == Verdict("refused", "a reason")
    assert verdicts.keys() == stored["tp"].verdicts.keys() and kept[0]["cp"] == stored["cp"]
