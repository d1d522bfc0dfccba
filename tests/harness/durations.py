# SPDX-License-Identifier: Apache-2.0
"""How long each test took when it last ran here: a file in build/, which the schedule reads.

``python -m tests.harness.durations`` fails if a test takes over `LIMIT` seconds each time and does not say
why.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import attrs

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "build" / "tests" / "durations.json"
KEPT = 5  # runs of each test
REMARKABLE = 2.0  # seconds after which a test is listed, with its reason
LIMIT = 5.0  # seconds that a test may take without a reason
UNKNOWN = 0.3  # seconds that a test is expected to take which has never run here


@attrs.frozen
class Slow:
    """What a test says of itself: about how many seconds it takes, and why it can't be quicker."""

    seconds: float
    reason: str


class _Marked(Protocol):
    __name__: str


T = TypeVar("T", bound=_Marked)


def slow(seconds: float, reason: str) -> Callable[[T], T]:
    """Return a decorator of a test, or of all tests of a class, that takes over two seconds for a reason.

    :param seconds: about how long it takes.
    :param reason: why it can't be quicker, as the end of the sentence "it takes long because …".
    """

    def decorate(thing: T) -> T:
        setattr(thing, "declared_slow", Slow(seconds, reason))  # noqa: B010 - a function or a class
        return thing

    return decorate


def slow_of(test: object) -> Slow | None:
    """Return what a test says of its duration, or its class does for all its tests."""
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    stated: Slow | None = getattr(method, "declared_slow", None) or getattr(test, "declared_slow", None)
    return stated


class Durations:
    """The seconds of the last runs of each test, by its dotted name.

    :param file: where they are kept; a file that can't be read counts as empty.
    """

    def __init__(self, file: Path = FILE) -> None:
        self._file = file
        self._seconds = self._read()

    def _read(self) -> dict[str, list[float]]:
        try:
            seconds = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return {str(name): list(map(float, runs)) for name, runs in seconds.items()}

    def expected(self, test: str, stated: Slow | None = None) -> float:
        """Return about how many seconds a test will take."""
        if runs := self._seconds.get(test):
            return statistics.median(runs)
        return UNKNOWN if stated is None else stated.seconds

    def least(self) -> Mapping[str, float]:
        """Return the seconds of each test's quickest run, which a busy machine makes no longer."""
        return {name: min(runs) for name, runs in self._seconds.items() if runs}

    def record(self, seconds: Mapping[str, float]) -> None:
        """Add the durations of a run's tests to the file, to which other runs may add at the same time."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._file.with_suffix(".lock")):
            self._seconds = self._read()
            for name, took in seconds.items():
                runs = [*self._seconds.get(name, ()), round(took, 3)]
                self._seconds[name] = runs[-KEPT:]
            new = self._file.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self._seconds, indent=0, sort_keys=True))
            new.replace(self._file)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Print the tests that take too long without a reason; return the exit code."""
    from twisted.trial.runner import TestLoader

    from tests.harness.schedule import tests_of

    least = {name: took for name, took in Durations().least().items() if took > LIMIT}
    if not least:
        return 0
    modules = sorted({name.rpartition(".")[0].rpartition(".")[0] for name in least})
    tests = {test.id(): test for test in tests_of(TestLoader().loadByNames(modules, recurse=True))}
    silent = {name: took for name, took in least.items() if name in tests and slow_of(tests[name]) is None}
    for name, took in sorted(silent.items(), key=lambda pair: -pair[1]):
        print(f"{name} takes {took:.1f} s: make it quicker, or say by @slow why it can't be")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
