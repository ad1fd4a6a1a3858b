"""What is intended: plans and layouts, as plain data that is made before any process starts."""

from typing import TYPE_CHECKING

from cornstarch.lazily import names_of

if TYPE_CHECKING:
    from cornstarch.plan.exchange import Asynchronous, Compression, Gossip, Local
    from cornstarch.plan.layout import AXES, Axis, Layout, Place, unexecutable
    from cornstarch.plan.memory import Memory, ModelSize, memory_of
    from cornstarch.plan.plan import DataKind, DataPlan, ModulePlan, Plan, read_plan

__all__ = [
    "AXES", "Asynchronous", "Axis", "Compression", "DataKind", "DataPlan", "Gossip", "Layout", "Local", "Memory",
    "ModelSize", "ModulePlan", "Place", "Plan", "memory_of", "read_plan", "unexecutable",
]  # fmt: skip

# Looked up when first asked for (PEP 562): who only reads a plan must not wait for NumPy.
_MODULES = {
    "AXES": "cornstarch.plan.layout",
    "Asynchronous": "cornstarch.plan.exchange",
    "Axis": "cornstarch.plan.layout",
    "Compression": "cornstarch.plan.exchange",
    "DataKind": "cornstarch.plan.plan",
    "DataPlan": "cornstarch.plan.plan",
    "Gossip": "cornstarch.plan.exchange",
    "Layout": "cornstarch.plan.layout",
    "Local": "cornstarch.plan.exchange",
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
