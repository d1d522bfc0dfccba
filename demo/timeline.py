# SPDX-License-Identifier: Apache-2.0
"""The timeline of a pod's launch, as `infranetes-ctl describe` tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

_SECONDS = 30.0
_BAR = 30  # of letters, for all of the launch
_WORDS = 46
_SEEN = 0.005  # seconds: shorter steps are left out


@attrs.frozen
class TimelineStep:
    """A step of a pod's launch. :ivar began: in seconds since the first one."""

    what: str
    began: float
    seconds: float


def told(config: Path, pod: str) -> Sequence[TimelineStep]:
    """Have `infranetes-ctl` describe a pod; return the steps until it was ready. Blocks.

    :raise RuntimeError: it can't, and the message says why."""
    command = [sys.executable, "-m", "infranetes.ctl.cli", "--config", str(config), "describe", "--json", pod]
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return launch(done.stdout)


def launch(document: str) -> Sequence[TimelineStep]:
    """Return the steps of the pod itself that have ended, from what `describe --json` printed."""
    rows = [each for each in json.loads(document)["steps"] if not each["container"] and not each["under_way"]]
    first = min((each["began_at"] for each in rows), default=0.0)
    return [TimelineStep(each["what"], each["began_at"] - first, each["seconds"]) for each in rows]


def drawn(steps: Sequence[TimelineStep]) -> str:
    """Return a line for each step that one can see: its bar, its seconds, its name."""
    whole = max((each.began + each.seconds for each in steps), default=0.0) or 1.0
    lines = []
    for each in steps:
        if each.seconds >= _SEEN:
            begin = int(_BAR * each.began / whole)
            width = max(round(_BAR * each.seconds / whole), 1)
            bar = (" " * min(begin, _BAR - 1) + "━" * width)[:_BAR]
            lines.append(f"{bar:{_BAR}} {each.seconds:6.3f} s  {each.what[:_WORDS]}")
    return "\n".join(lines)
