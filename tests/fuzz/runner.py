"""Runs cases in a pool of worker processes and says of each: equal, refused, or how it failed."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.fuzz import boosted, compare, work
from tests.fuzz.case import Case, alone
from tests.fuzz.work import Outcome, Refusal
from tests.parity.pool import Failed, Pool

Kind = Literal["equal", "refused", "wrong", "crashed", "hung"]
FAILURES: tuple[Kind, ...] = ("wrong", "crashed", "hung")
SECONDS = 150.0
"""That a run of a case may take."""
APART = 25.0
"""Seconds that are waited for the other ranks once one has ended."""
_OUT_OF_STEP = ("no word from rank", "Timed out", "timed out", "Connection closed by peer", "Connection reset by peer")


@dataclass(frozen=True)
class Verdict:
    """What a case came to."""

    kind: Kind
    reason: str = ""
    """Why it was refused, or the first thing that is wrong."""
    deviation: float = 0.0
    """The farthest movement of a parameter, in units of its scale."""
    seconds: float = 0.0
    details: tuple[str, ...] = field(default=())
    """More that is wrong, or a traceback."""

    @property
    def is_failure(self) -> bool:
        """Whether something has to be mended."""
        return self.kind in FAILURES

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "details": list(self.details)}


class _Ended(Exception):
    """The verdict is known before the end of a case."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class Runner:
    """Runs cases one after the other; what one process comes to is remembered.

    Args:
        workers: The processes.
        folder: For runs and model folders; a run's folder goes when its case has ended.
        seconds: That one run of a case may take.
        apart: Seconds that may pass between the first rank that ends and the last.
    """

    def __init__(self, workers: Pool, folder: Path, seconds: float = SECONDS, apart: float = APART) -> None:
        self._workers, self._folder, self._seconds, self._apart = workers, folder, seconds, apart
        self._references: dict[str, Outcome | Refusal] = {}
        self._runs = 0

    def run(self, case: Case) -> Verdict:
        """Run a case and compare it with one process."""
        started = time.monotonic()
        self._runs += 1
        output = self._folder / f"case {self._runs}"
        try:
            verdict = self._judge(case, output)
        except _Ended as end:
            verdict = end.verdict
        finally:
            shutil.rmtree(output, ignore_errors=True)
        return Verdict(**{**vars(verdict), "seconds": round(time.monotonic() - started, 2)})

    def _look_again(self, case: Case, verdict: Verdict, output: Path) -> Verdict:
        """Compare in float64, where rounding is orders of magnitude smaller and an error is not."""
        try:
            exact = self._judge({**case, "in_double": True}, output / "in double")
        except _Ended:  # not every model runs in float64
            return verdict
        if exact.kind != "equal":
            return verdict
        reason = f"rounding: {verdict.deviation:.0e} in float32, {exact.deviation:.0e} in float64"
        return Verdict("equal", reason, exact.deviation)

    def _judge(self, case: Case, output: Path) -> Verdict:
        if case.get("booster"):
            return self._judge_boosted(case, output)
        reference = self._reference(alone(case))
        if isinstance(reference, Refusal):
            return Verdict("refused", f"one process: {reference.reason}")
        exact = None
        if case.get("precision", "fp32") != "fp32":
            exact = self._reference({**alone(case), "precision": "fp32"})
            assert isinstance(exact, Outcome)
        found = self._train(case, str(output / "run"))
        if "then" in case:
            found = self._resume({**case, **case["then"]}, output)
        verdict = _verdict_of(compare.compare(found, reference, exact, _tolerance(case)), found, reference)
        if case.get("in_double"):
            return verdict  # no run is stored in float64
        if verdict.kind == "wrong" and exact is None and compare.has_moved(reference):
            verdict = self._look_again(case, verdict, output)
        if verdict.kind == "wrong":
            return verdict
        differences = self._compare_loaded(found, work.load, str(output / "run"))
        return _verdict_of(differences, found, reference) if differences else verdict

    def _judge_boosted(self, case: Case, output: Path) -> Verdict:
        plain = {key: value for key, value in case.items() if key not in ("name", "world", "parallel", "accumulation")}
        plain |= {"accumulation": 1}
        reference = self._reference(plain, boosted.train_plainly)
        exact = None
        if isinstance(reference, Refusal):
            return Verdict("refused", f"one process: {reference.reason}")
        if "precision" in case:
            exact = self._reference({**plain, "precision": "fp32"}, boosted.train_plainly)
            assert isinstance(exact, Outcome)
        arguments = (case, self._folders, str(output))
        found = _outcomes("booster: ", self._ask("booster: ", case["world"], boosted.train_boosted, *arguments))
        differences = compare.compare(found, reference, exact, _tolerance(case)) or self._compare_loaded(
            found, boosted.load_boosted, *arguments
        )
        return _verdict_of(differences, found, reference)

    def _train(self, case: Case, output: str, resumes: bool = False) -> list[Outcome]:
        what = "resume: " if resumes else ""
        return _outcomes(what, self._ask(what, case["world"], work.train, case, self._folders, output, False, resumes))

    def _resume(self, case: Case, output: Path) -> list[Outcome]:
        """Go on from the checkpoint in another layout; only a layout that cannot be started anew may refuse it."""
        try:
            return self._train(case, str(output / "run"), resumes=True)
        except _Ended as end:
            if end.verdict.kind != "refused":
                raise
            self._train(case, str(output / "anew"))
            raise _Ended(Verdict("crashed", f"the checkpoint is not accepted: {end.verdict.reason}")) from end

    def _compare_loaded(self, found: list[Outcome], load: Any, *arguments: Any) -> list[compare.Difference]:
        """Read the checkpoint in one process, as `generate` and `export` would."""
        (loaded,) = self._ask("load: ", 1, load, *arguments)
        if isinstance(loaded, Refusal):
            raise _Ended(Verdict("crashed", f"the checkpoint cannot be used: {loaded.reason}"))
        return compare.compare_loaded(loaded, found)

    def _reference(self, case: Case, train: Any = None) -> Outcome | Refusal:
        key = json.dumps(case, sort_keys=True)
        if key not in self._references:
            output = self._folder / f"alone {self._runs} {len(self._references)}"
            if train is None:
                (found,) = self._ask("one process: ", 1, work.train, case, self._folders, str(output / "run"), True)
            else:
                (found,) = self._ask("one process: ", 1, train, case, self._folders)
            self._references[key] = found
            shutil.rmtree(output, ignore_errors=True)
        return self._references[key]

    @property
    def _folders(self) -> str:
        return str(self._folder / "models")

    def _ask(self, what: str, ranks: int, function: Any, *arguments: Any) -> list[Any]:
        """Return what each rank answers; whatever fails in a worker ends the case, not the machine."""
        self._workers.renew()
        try:
            return self._workers.run(ranks, function, *arguments, seconds=self._seconds, apart=self._apart)
        except Failed as error:
            raise _Ended(_verdict_of_failure(what, error)) from error


def _tolerance(case: Case) -> float:
    """Return how far a case may be off in fp32."""
    # A linear attention is computed by inverting triangular matrices, which enlarges what rows of other lengths round.
    is_loose = case["llm"] == "qwen3_next" and not case.get("in_double")
    return 10 * compare.TOLERANCE if is_loose else compare.TOLERANCE


def _outcomes(what: str, results: list[Any]) -> list[Outcome]:
    """Return the outcome of each rank; a refusal ends the case."""
    refusals = {rank: one for rank, one in enumerate(results) if isinstance(one, Refusal)}
    if not refusals:
        return results
    reason, steps = next((one.reason, one.steps) for one in refusals.values())
    if len(refusals) < len(results):
        raise _Ended(Verdict("crashed", f"{what}refused by ranks {sorted(refusals)} only: {reason}"))
    if steps:
        raise _Ended(Verdict("crashed", f"{what}refused after {steps} steps: {reason}"))
    raise _Ended(Verdict("refused", f"{what}{reason}"))


def _verdict_of(differences: list[compare.Difference], found: list[Outcome], reference: Outcome) -> Verdict:
    deviation = compare.worst(found, reference)
    if not compare.has_moved(reference):
        return Verdict("wrong", "nothing moved in one process: there is nothing to compare")
    if not differences:
        return Verdict("equal", deviation=deviation)
    texts = tuple(one.text for one in differences)
    return Verdict("wrong", texts[0], deviation, details=texts[1:12])


def _verdict_of_failure(what: str, error: Failed) -> Verdict:
    text = str(error)
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "rank ", "Traceback"))]
    errors = [line for line in lines if ("Error" in line or "Exception" in line) and not _is_out_of_step(line)]
    # Those that wait for a rank that failed are out of step, too: only where nobody failed, that is the mistake.
    kind: Kind = "crashed" if errors else "hung"
    reason = (errors or lines or [text])[0]
    refused = {rank: one.reason for rank, one in error.results.items() if isinstance(one, Refusal)}
    if refused:
        reason = f"refused by ranks {sorted(refused)} only: {next(iter(refused.values()))}"
    return Verdict(kind, f"{what}{reason}", details=(text[-4000:],))


def _is_out_of_step(line: str) -> bool:
    return any(sign in line for sign in _OUT_OF_STEP)
