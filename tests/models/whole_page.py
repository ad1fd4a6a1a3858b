"""What the sweep over whole multimodal models found, as a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.versions import versions_of

EQUAL, REFUSED, NOT_ASKED, WRONG = "equal", "refused", "–", "wrong"
PACKED = "packed"
_WORST_LAST = [NOT_ASKED, EQUAL, REFUSED, WRONG]
_LONGEST = 260  # characters of a reason

PAGE = """# Whole multimodal models

`model.whole` trains a Hugging Face multimodal model as it is. The model's own processor and chat template convert a
conversation into model inputs. This page shows measured results. For each family, a tiny folder in the format of
`save_pretrained` (config, weights, tokenizer with the family's special tokens, processor, chat template) is loaded in
the same way as by `cornstarch train`. These comparisons are made with transformers:

- every tensor of the batch with that of `AutoProcessor` and `apply_chat_template`, bit by bit;
- the labels with the answers and their end tokens;
- the loss with that of the original model on the same batch (relative difference at most 1e-6, fp32);
- rows in LLaVA's JSON, with `<image>` and `<audio>` in the text, with the same samples as typed parts;
- every gradient with that of the original model; the loss and every gradient of packed rows with those of padded rows.

*equal*: all comparisons hold. *refused*: Cornstarch raises an error with the reason. *–*: not tested, because the
model's own processor refuses such a conversation, or for another reason below. Any other outcome is *wrong*, and the
tests fail.

Some processors need a package that neither Cornstarch nor transformers installs. Without it, the model is refused:

| package | models |
|---|---|
| `num2words` | SmolVLM |
| `transformers[mistral-common]`, `soundfile` | Voxtral; mistral-common needs numpy < 2.4 on Python 3.12 and older |
| `torchvision` | the models below that mention it, and videos |
| `torchaudio` | Granite Speech |

{versions}. Written by `{command}`.{others}

{counts}

{table}

## Refused

{refused}

## Not tested

{not_asked}

## Families without a test

{uncovered}
"""


@dataclass
class Verdict:
    """What came of one family: a word for each case, and the reasons of those that are not equal."""

    family: str
    model_class: str
    words: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def note(self, case: str, word: str, reason: str = "") -> None:
        """Keep the worst word of a case; families that read images and sounds have each case twice."""
        if _WORST_LAST.index(word) >= _WORST_LAST.index(self.words.get(case, NOT_ASKED)):
            self.words[case] = word
        if reason:
            self.reasons.setdefault(case, cell(reason))

    @property
    def status(self) -> str:
        """The family's one word: packing may be refused without making it another."""
        words = {word for case, word in self.words.items() if word == WRONG or case != PACKED}
        return next((word for word in (WRONG, REFUSED, EQUAL) if word in words), NOT_ASKED)

    def row(self, cases: Sequence[str]) -> str:
        """Write the family's row of the table."""
        return f"| {self.family} | `{self.model_class}` | {' | '.join(self.words.get(c, NOT_ASKED) for c in cases)} |"

    def reason_rows(self, word: str) -> list[str]:
        """Write a row for each reason of a word, with the cases that it is for."""
        cases: dict[str, list[str]] = {}
        for case, found in self.words.items():
            if found == word and case in self.reasons:
                cases.setdefault(self.reasons[case], []).append(case)
        every = len(self.words)
        return [
            f"| {self.family} | {'all' if len(names) == every else ', '.join(names)} | {reason} |"
            for reason, names in cases.items()
        ]


def cell(reason: str) -> str:
    """Write a reason so that it fits into a table: whole sentences, not too many."""
    text = re.sub(r"https?://\S+", "…", " ".join(reason.split())).replace("|", "\\|")
    kept = ""
    for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text):
        if kept and len(kept) + len(sentence) > _LONGEST:
            break
        kept = f"{kept} {sentence}".strip()
    return kept


def _reasons(verdicts: Sequence[Verdict], word: str) -> str:
    rows = [row for verdict in verdicts for row in verdict.reason_rows(word)]
    return "\n".join(["| family | conversations | reason |", "|---|---|---|", *rows]) if rows else "None."


def versions() -> str:
    """Return the versions of everything that decides what a processor makes, or whether it can be loaded."""
    deciding = ("torch", "transformers", "tokenizers", "pillow", "numpy", "torchvision")
    deciding += ("torchaudio", "num2words", "mistral-common", "timm")
    return versions_of(*deciding)


def write_page(
    verdicts: Sequence[Verdict],
    cases: Sequence[str],
    uncovered: Mapping[str, str],
    command: str,
    others: Mapping[Path, str] | None = None,
) -> str:
    """Return the page.

    Args:
        verdicts: One for each family.
        cases: The columns.
        uncovered: Models of the registry without a folder, with the reason.
        command: What writes the page.
        others: Pages of the same sweep with other libraries installed, and the libraries.
    """
    header = ["family", "model", *cases]
    table = [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(verdict.row(cases) for verdict in verdicts)]
    by_reason: dict[str, list[str]] = {}
    for model, reason in uncovered.items():
        by_reason.setdefault(reason, []).append(f"`{model}`")
    words = [verdict.status for verdict in verdicts]
    return PAGE.format(
        versions=versions(),
        command=command,
        others="".join(f" With {library}: `{other}`." for other, library in (others or {}).items()),
        counts=", ".join(f"{words.count(word)} {word}" for word in (EQUAL, REFUSED, WRONG) if word in words)
        + f" of {len(verdicts)} families.",
        table="\n".join(table),
        refused=_reasons(verdicts, REFUSED),
        not_asked=_reasons(verdicts, NOT_ASKED),
        uncovered="\n".join(f"- {reason}: {', '.join(models)}" for reason, models in by_reason.items()) or "None.",
    )
