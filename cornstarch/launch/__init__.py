"""Start the processes of a run and connect them. torch is imported inside functions only."""

from cornstarch.launch.launcher import Launcher, TorchrunLauncher, World, current_world, launch, register_launcher
from cornstarch.launch.local_launcher import LocalLauncher, process_count
from cornstarch.launch.process_group import agree, start_process_group

__all__ = [
    "Launcher", "World", "agree", "current_world", "launch", "process_count", "register_launcher",
    "start_process_group",
]  # fmt: skip

# A launcher for another scheduler is one file of this folder and one line here. The last one is asked first.
register_launcher("local", LocalLauncher())
register_launcher("torchrun", TorchrunLauncher())
