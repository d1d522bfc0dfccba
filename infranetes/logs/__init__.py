"""CRI log files on the node, written exactly once from what the agents read."""

from infranetes.logs.container import Checkpoint, ContainerLog, stop_all
from infranetes.logs.render import render

__all__ = ["Checkpoint", "ContainerLog", "render", "stop_all"]
