# SPDX-License-Identifier: Apache-2.0
"""The log files that kubelet reads, in the CRI's format: each byte of a container's output exactly once."""

from infranetes.logs.container import ContainerLog, make_file, stop_all
from infranetes.logs.writer import Checkpoint
from infranetes_common.cri_log import render

__all__ = ["Checkpoint", "ContainerLog", "make_file", "render", "stop_all"]
