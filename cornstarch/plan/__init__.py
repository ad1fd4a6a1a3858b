"""Plans, layouts, cost model and search: plain data and pure functions, without a process group."""

from typing import TYPE_CHECKING

from cornstarch.lazily import names_of

if TYPE_CHECKING:
    from cornstarch.plan.compression import Asynchronous, Compression, Gossip, Local
    from cornstarch.plan.layout import AXES, Axis, Layout, Place, unexecutable
    from cornstarch.plan.memory import Memory, ModelSize, memory_of
    from cornstarch.plan.plan import DataKind, DataPlan, ModulePlan, Plan, read_plan

__all__ = [
    "AXES", "Asynchronous", "Axis", "Compression", "DataKind", "DataPlan", "Gossip", "Layout", "Local", "Memory",
    "ModelSize", "ModulePlan", "Place", "Plan", "memory_of", "read_plan", "unexecutable",
]  # fmt: skip

# Imported on first use (PEP 562): reading a plan must not import NumPy.
_MODULES = {
    "AXES": "cornstarch.plan.layout",
    "Asynchronous": "cornstarch.plan.compression",
    "Axis": "cornstarch.plan.layout",
    "Compression": "cornstarch.plan.compression",
    "DataKind": "cornstarch.plan.plan",
    "DataPlan": "cornstarch.plan.plan",
    "Gossip": "cornstarch.plan.compression",
    "Layout": "cornstarch.plan.layout",
    "Local": "cornstarch.plan.compression",
    "Memory": "cornstarch.plan.memory",
    "ModelSize": "cornstarch.plan.memory",
    "ModulePlan": "cornstarch.plan.plan",
    "Place": "cornstarch.plan.layout",
    "Plan": "cornstarch.plan.plan",
    "memory_of": "cornstarch.plan.memory",
    "read_plan": "cornstarch.plan.plan",
    "unexecutable": "cornstarch.plan.layout",
}

__getattr__, __dir__ = names_of(__name__, _MODULES)
