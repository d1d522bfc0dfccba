"""What the demo tells: a line per step with its time, or all of it as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import attrs

_WIDTH = 78


@attrs.define
class Step:
    """One step; `facts` is what it showed. Seconds, wall clock."""

    name: str
    seconds: float = 0.0
    ok: bool = False
    facts: dict[str, Any] = attrs.field(factory=dict)


@attrs.define
class Report:
    """Steps told as they happen, to `out`; where `quiet`, told only by `json`."""

    out: TextIO
    quiet: bool = False
    steps: list[Step] = attrs.field(factory=list)
    error: str = ""

    @property
    def _live(self) -> bool:
        return not self.quiet and self.out.isatty()

    def say(self, text: str = "") -> None:
        """One line for people."""
        if not self.quiet:
            print(text, file=self.out, flush=True)

    def quote(self, text: str) -> None:
        """Someone else's words, indented."""
        for line in text.rstrip("\n").splitlines():
            self.say(f"     | {line}")

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Time what happens inside and tell its outcome: `facts["shown"]` ends the line."""
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
        """What the step under way is doing, gone with its end on a terminal."""
        if self._live:
            print(f"\r\x1b[K  ·  {text[: _WIDTH - 8]} ...", end="\r", file=self.out, flush=True)
        else:
            self.say(f"     {text}")

    def json(self, **more: Any) -> str:
        """The whole report as one JSON document."""
        document = {
            "ok": not self.error,
            "error": self.error,
            "steps": [attrs.asdict(step) for step in self.steps],
            "seconds": round(sum(step.seconds for step in self.steps), 3),
            **more,
        }
        return json.dumps(document, indent=2)
