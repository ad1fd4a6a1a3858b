"""From the description of a run to everything that its steps need, each thing made from those before it.

`Standing`: the run's plan, and which of its processes this is. `Start`: the device and the data. `ReadyModel`: what is
trained, spread over the processes. `RunSetup`: that, and what counts, learns, measures and feeds it.
"""

from cornstarch.train.setup.assembling import RunSetup, assemble
from cornstarch.train.setup.data import RunData
from cornstarch.train.setup.model import ReadyModel, check_given, described_task
from cornstarch.train.setup.standing import Standing
from cornstarch.train.setup.start import Start, begin

__all__ = [
    "ReadyModel", "RunData", "RunSetup", "Standing", "Start", "assemble", "begin", "check_given", "described_task",
]  # fmt: skip
