# SPDX-License-Identifier: Apache-2.0
"""Truncation of the agent's reports to the limits that the node enforces.

Containers and engines choose some of this text themselves: without limits, one that made it too long would
cut off its pod from the node.
"""

from __future__ import annotations

from infranetes_common.wire import vmserver as messages

MAX_MESSAGE = 4096  # characters
MAX_REASON = 256
MAX_GROUPS = 256
MAX_LINE = 16 * 1024  # bytes
MAX_DISKS = 64


def state(full: messages.ContainerState) -> messages.ContainerState:
    """Return `full` itself if it is within the limits, or else a truncated copy."""
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
    """Truncate a record's line in place: programs can write longer ones to the journal directly."""
    if len(record.line) > MAX_LINE:
        record.line = record.line[:MAX_LINE]
    return record


def usage(usage: messages.Usage) -> messages.Usage:
    """Truncate a usage's list of disks in place."""
    del usage.disks[MAX_DISKS:]
    return usage
