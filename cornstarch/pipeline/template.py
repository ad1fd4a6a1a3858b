"""Which modules of a model each pipeline stage has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.pipeline.anatomy import Frame, frame_of, full_name
from cornstarch.pipeline.balance import Cost, best_starts
from cornstarch.pipeline.findings import Survey
from cornstarch.pipeline.survey import check_entry
from cornstarch.pipeline.survey import survey as find_out


class PipelineTemplate:
    """The modules of each stage of a model, by name.

        modules = PipelineTemplate.get_modules(model)
        PipelineTemplate(PipelineTemplate.get_model_name(model), [modules[:17], modules[17:]])

    Args:
        model_name: The class of the model that it is for, as `get_model_name` gives it.
        modules_per_stage: For each stage, the names of its modules; together they are those of `get_modules`, in order.
    """

    def __init__(self, model_name: str, modules_per_stage: Sequence[Sequence[str]]) -> None:
        if not modules_per_stage or isinstance(modules_per_stage, str):
            raise ConfigError("A pipeline template has no stages: give the names of the modules of each.")
        for number, names in enumerate(modules_per_stage):
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ConfigError(f"modules_per_stage[{number}] = {names!r}: expected a list of names of modules.")
            if not names:
                raise ConfigError(f"modules_per_stage[{number}] is empty: every stage needs a module.")
        self.model_name = model_name
        self.modules_per_stage = [list(names) for names in modules_per_stage]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.modules_per_stage)

    @property
    def num_layers(self) -> int:
        """How many modules there are in all."""
        return sum(map(len, self.modules_per_stage))

    def __repr__(self) -> str:
        """Name the model and the number of stages."""
        return f"PipelineTemplate({self.model_name}, {self.num_stages} stages)"

    def __eq__(self, other: object) -> bool:
        """Two templates that say the same of the same class are equal."""
        if not isinstance(other, PipelineTemplate):
            return NotImplemented
        return (self.model_name, self.modules_per_stage) == (other.model_name, other.modules_per_stage)

    def __hash__(self) -> int:
        """Equal templates have equal hashes."""
        return hash((self.model_name, tuple(map(tuple, self.modules_per_stage))))

    # ------------------------------------------------------------------ asking about a model

    @staticmethod
    def get_model_name(model: nn.Module) -> str:
        """Return the class of a model, with its module; of a `ModalEncoderModule`, that of its encoder."""
        return full_name(frame_of(model).inner)

    @staticmethod
    def get_modules(model: nn.Module, survey: Survey | None = None) -> list[str]:
        """Return the names of a model's modules that have parameters, in the order of its forward pass.

        Those of a `ModalEncoderModule` begin with `module.`, and its projector comes last. What PEFT adds to names is
        left out, so that a template is the same with adapters and without.

        Args:
            model: The model.
            survey: How it is made, if that is known already: for a module of your own.
        """
        return _listed(survey or find_out(model), frame_of(model))

    @staticmethod
    def find_pipeline_template(
        pipeline_templates: Sequence[PipelineTemplate], num_stages: int
    ) -> PipelineTemplate | None:
        """Return the first template with a number of stages, or None."""
        return next((template for template in pipeline_templates if template.num_stages == num_stages), None)

    # ------------------------------------------------------------------ making one

    @classmethod
    def split(
        cls,
        model: nn.Module,
        num_stages: int,
        by: str = "parameters",
        *,
        inputs: Mapping[str, Any] | None = None,
        trained_upstream: bool = False,
        survey: Survey | None = None,
    ) -> PipelineTemplate:
        """Cut a model into stages whose costs differ as little as possible.

        What is frozen costs a forward pass, and a backward pass through it if something before it is trained; what is
        trained costs three times its forward pass. Freeze the model first.

        Args:
            model: The model.
            num_stages: How many stages.
            by: "parameters": by the number of parameters; "flops": by the multiplications for one token; "time": by the
                time that a forward pass of `inputs` takes; "uniform": by the number of layers.
            inputs: What the forward pass is timed on.
            trained_upstream: Whether something is trained whose results go into this model: a projector, say.
            survey: How the model is made, if that is known already.
        """
        known = survey or find_out(model)
        cost = Cost(model, known, by, inputs, trained_upstream)
        starts = best_starts(cost.segments(), known.boundaries, num_stages, type(frame_of(model).inner).__name__)
        return cls._beginning(model, known, starts)

    @classmethod
    def of_layers(cls, model: nn.Module, layers: Sequence[int]) -> PipelineTemplate:
        """Cut a model into stages of so many layers each.

        What comes before the first layer belongs to it. What comes behind the last one, the head of a language model or
        a projector, counts as a layer if a stage may begin with it; layers between which a model cannot be cut count as
        one.

        Args:
            model: The model.
            layers: By stage, how many.
        """
        known, name = find_out(model), type(frame_of(model).inner).__name__
        places = [0, *known.boundaries]
        if sum(layers) != len(places) or min(layers) < 1:
            raise ConfigError(
                f"layers = {', '.join(map(str, layers))}: they add up to {sum(layers)}; {name} has {len(places)}, what "
                "follows the last one included. Every stage has one at least."
            )
        firsts = [sum(layers[:stage]) for stage in range(len(layers))]
        return cls._beginning(model, known, [places[first] for first in firsts])

    @classmethod
    def _beginning(cls, model: nn.Module, known: Survey, starts: Sequence[int]) -> PipelineTemplate:
        """Return a template whose stages begin with some segments."""
        listed = _listed(known, frame_of(model))
        segments = [known.segment_of(name) for name in known.modules]
        ends = [*starts[1:], len(known.layers) + 1]
        stages = [
            [name for name, segment in zip(listed, segments, strict=True) if start <= segment < end]
            for start, end in zip(starts, ends, strict=True)
        ]
        return cls(cls.get_model_name(model), stages)

    # ------------------------------------------------------------------ checking it

    def check(self, model: nn.Module) -> None:
        """Raise `ConfigError` unless this template is one of this model, and it can be cut so."""
        self.starts(model, find_out(model))

    def starts(self, model: nn.Module, known: Survey) -> list[int]:
        """Return the segment with which each stage begins; see `findings`."""
        frame = frame_of(model)
        name = full_name(frame.inner)
        if self.model_name != name:
            raise ConfigError(f"{self!r} is not for {name}. Make one of its modules: PipelineTemplate.get_modules.")
        expected = _listed(known, frame)
        stages = self._without_weightless(known, frame)
        self._check_names(stages, expected)
        return self._starts(stages, known, frame)

    def _without_weightless(self, known: Survey, frame: Frame) -> list[list[str]]:
        """Leave out modules without parameters (dropout, rotary embeddings): every stage has them."""
        free = {_shown(name, frame) for name, unit in known.units.items() if not unit.weighs}
        return [[name for name in names if name not in free] for names in self.modules_per_stage]

    def _check_names(self, stages: Sequence[Sequence[str]], expected: Sequence[str]) -> None:
        places = [(name, stage) for stage, names in enumerate(stages) for name in names]
        seen: dict[str, int] = {}
        for name, stage in places:
            if name not in expected:
                raise ConfigError(
                    f"{self!r}: stage {stage} has {name}, which is none of the model's modules ({_few(expected)})."
                )
            if name in seen:
                raise ConfigError(f"{self!r}: {name} is there twice, in stage {seen[name]} and in stage {stage}.")
            seen[name] = stage
        missing = [name for name in expected if name not in seen]
        if missing:
            before = expected[: expected.index(missing[0])]
            where = f"behind {before[-1]} in stage {seen[before[-1]]}" if before else "at the beginning of stage 0"
            raise ConfigError(f"{self!r}: {_few(missing)} missing; {missing[0]} belongs {where}.")
        for (name, stage), right in zip(places, expected, strict=True):
            if name != right:
                raise ConfigError(
                    f"{self!r}: stage {stage} has {name} where {right} belongs; modules stand in the order of the "
                    "forward pass, as PipelineTemplate.get_modules lists them."
                )

    def _starts(self, stages: Sequence[Sequence[str]], known: Survey, frame: Frame) -> list[int]:
        segments = {_shown(name, frame): known.segment_of(name) for name in known.modules}
        starts = [0]
        for number, names in enumerate(stages):
            if not names:
                raise ConfigError(f"{self!r}: stage {number} has no module with parameters.")
            if number == 0:
                continue
            last, first = stages[number - 1][-1], names[0]
            place = segments[first]
            if number == 1 and first == _shown(known.layers[0], frame):
                check_entry(frame.inner)  # the first stage has embeddings alone
                starts.append(0)
                continue
            if segments[last] == place or last not in {_shown(name, frame) for name in known.layers}:
                raise ConfigError(
                    f"{self!r}: stage {number} begins with {first}, but stages end behind a layer, and {last} is none. "
                    f"Let it begin behind {_shown(known.layers[min(place, len(known.layers) - 1)], frame)}, say."
                )
            if place in known.barred:
                raise ConfigError(f"{self!r}: cannot be cut before {first}: {known.barred[place]}.")
            starts.append(place)
        return starts


def _listed(known: Survey, frame: Frame) -> list[str]:
    return [_shown(name, frame) for name in known.modules]


def _shown(name: str, frame: Frame) -> str:
    """Return how a template calls a module."""
    return frame.shown + name.removeprefix(frame.path) if name.startswith(frame.path) else name


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


__all__ = ["PipelineTemplate"]
