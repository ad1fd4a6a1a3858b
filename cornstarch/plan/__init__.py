"""Plans, layouts, cost model and search: plain data and pure functions, without a process group."""

from typing import TYPE_CHECKING

from cornstarch.lazily import lazy_attributes

if TYPE_CHECKING:
    from cornstarch.plan.data_options import Asynchronous, Compression, Gossip, Local
    from cornstarch.plan.layout import AXES, Axis, Layout, Place, unexecutable
    from cornstarch.plan.memory import Memory, ModelSize, memory_of
    from cornstarch.plan.plan import DataKind, DataPlan, ModulePlan, Plan, read_plan

__all__ = [
    "AXES", "Asynchronous", "Axis", "Compression", "DataKind", "DataPlan", "Gossip", "Layout", "Local", "Memory",
    "ModelSize", "ModulePlan", "Place", "Plan", "memory_of", "read_plan", "unexecutable",
]  # fmt: skip

# Imported on first use (PEP 562): reading a plan must not import NumPy.
_NAMES = {
    "data_options": "Asynchronous Compression Gossip Local",
    "layout": "AXES Axis Layout Place unexecutable",
    "memory": "Memory ModelSize memory_of",
    "plan": "DataKind DataPlan ModulePlan Plan read_plan",
}
_MODULES = {name: f"cornstarch.plan.{module}" for module, names in _NAMES.items() for name in names.split()}

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
