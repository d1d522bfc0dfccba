# SPDX-License-Identifier: Apache-2.0
"""Cut what the agent reports to what the node accepts of an agent.

Containers and engines choose some of these words and figures themselves: one that made them too long would
cut its pod off from the node.
"""

from __future__ import annotations

from infranetes_common.wire import vmserver as messages

MAX_MESSAGE = 4096  # characters
MAX_REASON = 256
MAX_GROUPS = 256
MAX_LINE = 16 * 1024  # bytes
MAX_DISKS = 64


def state(full: messages.ContainerState) -> messages.ContainerState:
    """Return `full` itself where it is within bounds, or else a copy that is."""
    groups = full.user.linux.supplemental_groups
    if len(full.message) <= MAX_MESSAGE and len(full.reason) <= MAX_REASON and len(groups) <= MAX_GROUPS:
        return full
    cut = messages.ContainerState()
    cut.CopyFrom(full)
    cut.message, cut.reason = full.message[:MAX_MESSAGE], full.reason[:MAX_REASON]
    if len(groups) > MAX_GROUPS:
        del cut.user.linux.supplemental_groups[MAX_GROUPS:]
    return cut


def record(record: messages.LogRecord) -> messages.LogRecord:
    """Cut a record's line in place: programs that write to the journal themselves may write longer ones."""
    if len(record.line) > MAX_LINE:
        record.line = record.line[:MAX_LINE]
    return record


def usage(usage: messages.Usage) -> messages.Usage:
    """Cut a usage's list of disks in place."""
    del usage.disks[MAX_DISKS:]
    return usage
