# SPDX-License-Identifier: Apache-2.0
"""Copies of the repository in which mutants are tested, so that the checkout is never changed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import cattrs

from tests.mutants.mutant import Mutant
from tests.mutants.run_tests import ROOT, End, Request, Result

LEFT_OUT = (".git", ".venv", "build", "dist", ".mypy_cache", ".ruff_cache", ".hypothesis", "_trial_temp*")
LINKED = (".venv", "build")
# Whatever a mutant leaves behind in the kernel, or running, ends with its namespaces.
NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
LOOPBACK = ("sh", "-c", 'ip link set lo up; "$@"; exit $?', "sh")


@attrs.frozen
class Run:
    """What a process that ran tests has reported.

    :ivar end: None: the process ended, or was ended, before it had run all tests.
    """

    results: list[Result]
    end: End | None


class Tree:
    """One copy of the repository."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._times = 0
        shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        for name in LINKED:
            if (ROOT / name).exists():
                (path / name).symlink_to(ROOT / name)

    @contextlib.contextmanager
    def with_bug(self, mutant: Mutant | None) -> Iterator[None]:
        """Have a mutant in the place of its module while the block runs."""
        if mutant is None:
            yield
            return
        file = self.path / mutant.module
        original = file.read_text()
        self._write(file, mutant.text)
        try:
            yield
        finally:
            self._write(file, original)

    def _write(self, file: Path, text: str) -> None:
        # Python takes a compiled module for current if the time, in seconds, and the size are the same.
        self._times += 1
        changed = file.stat().st_mtime + self._times
        file.write_text(text)
        os.utime(file, (changed, changed))


class Trees:
    """Some trees, each of which runs one process of tests at a time. Use it in a `with` block."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free: queue.Queue[Tree] = queue.Queue()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False
        self._place = Path()

    def __enter__(self) -> Trees:
        self._place = Path(tempfile.mkdtemp(prefix="mutants-"))
        try:
            self._place.chmod(0o755)  # some tests run programs as other users
            for number in range(self._number):
                self._free.put(Tree(self._place / str(number)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._place, ignore_errors=True)

    def stop(self) -> None:
        """End what runs, and run nothing more."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            _end(process)

    def run(self, request: Request, seconds: float, mutant: Mutant | None = None) -> Run:
        """Run tests in a free tree, of which one module may be a mutant, and return what they reported.

        :param seconds: the time after which the process is ended.
        """
        tree = self._free.get()
        results = tree.path.with_suffix(".results")
        results.write_text("")
        try:
            with tree.with_bug(mutant):
                self._run(tree, attrs.evolve(request, results=str(results)), seconds)
            return _read(results)
        finally:
            shutil.rmtree(tree.path / "_trial_temp", ignore_errors=True)
            self._free.put(tree)

    def _run(self, tree: Tree, request: Request, seconds: float) -> None:
        with self._lock, tree.path.with_suffix(".log").open("wb") as log:
            if self._ended:
                return
            process = subprocess.Popen(
                [*_wrapper(), sys.executable, "-m", "tests.mutants.run_tests"],
                cwd=tree.path,
                env={**os.environ, "PYTHONPATH": str(tree.path), "CI": "1"},  # hypothesis' same examples
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(json.dumps(cattrs.unstructure(request)).encode(), timeout=seconds)
        finally:
            _end(process)
            with self._lock:
                self._running.discard(process)


@functools.cache
def _wrapper() -> tuple[str, ...]:
    """Return the command that runs another one, which ends with this process, in namespaces if it may."""
    die_together = ("setpriv", "--pdeathsig", "KILL")
    if os.geteuid() == 0:
        command = (*die_together, *NAMESPACES, *LOOPBACK)
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return die_together


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its session, whether it still runs or not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(results: Path) -> Run:
    found, end = list[Result](), None
    for line in results.read_text().splitlines():
        value = json.loads(line)
        if "failed" in value:
            end = cattrs.structure(value, End)
        else:
            found.append(cattrs.structure(value, Result))
    return Run(found, end)
