# SPDX-License-Identifier: Apache-2.0
"""The demo's output: a line per step with its time, or one JSON document."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import attrs

_WIDTH = 78


@attrs.define
class Step:
    """One step. :ivar facts: what it found out."""

    name: str
    seconds: float = 0.0
    ok: bool = False
    facts: dict[str, object] = attrs.field(factory=dict)


@attrs.define
class Report:
    """Writes steps to `out` as they happen; if `quiet`, only `json` has them."""

    out: TextIO
    quiet: bool = False
    steps: list[Step] = attrs.field(factory=list)
    error: str = ""

    @property
    def _live(self) -> bool:
        return not self.quiet and self.out.isatty()

    def say(self, text: str = "") -> None:
        """Write a line."""
        if not self.quiet:
            print(text, file=self.out, flush=True)

    def quote(self, text: str) -> None:
        """Write the output of a program, indented."""
        for line in text.rstrip("\n").splitlines():
            self.say(f"     | {line}")

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Time the block and write its outcome; `facts["shown"]` ends the line."""
        step = Step(name)
        self.steps.append(step)
        started = time.monotonic()
        if self._live:
            print(f"  ·  {name} ...", end="\r", file=self.out, flush=True)
        try:
            yield step
            step.ok = True
        finally:
            step.seconds = round(time.monotonic() - started, 3)
            self._end(step)

    def _end(self, step: Step) -> None:
        shown = step.facts.get("shown", "") if step.ok else ""
        mark = "ok" if step.ok else "!!"
        text = f"  {mark} {step.name}{': ' if shown else ''}{shown}"
        clear = "\r\x1b[K" if self._live else ""
        self.say(f"{clear}{text.ljust(_WIDTH - 9)} {step.seconds:7.2f} s")

    def progress(self, text: str) -> None:
        """Show what the step is doing; on a terminal, until it ends."""
        if self._live:
            print(f"\r\x1b[K  ·  {text[: _WIDTH - 8]} ...", end="\r", file=self.out, flush=True)
        else:
            self.say(f"     {text}")

    def json(self, **more: object) -> str:
        """Format the report as a JSON document, with `more` in it."""
        document = {
            "ok": not self.error,
            "error": self.error,
            "steps": [attrs.asdict(step) for step in self.steps],
            "seconds": round(sum(step.seconds for step in self.steps), 3),
            **more,
        }
        return json.dumps(document, indent=2)
