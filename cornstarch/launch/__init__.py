"""Starting the processes of a run, and how each of them finds the others. torch is imported late."""

from cornstarch.launch.agreement import agree
from cornstarch.launch.local import launch, process_count
from cornstarch.launch.world import World, current_world, start_process_group

__all__ = ["World", "agree", "current_world", "launch", "process_count", "start_process_group"]
