# SPDX-License-Identifier: Apache-2.0
"""Copies of the repository in which mutants are tested, so that the checkout is never changed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import cattrs

from tests.harness import isolation
from tests.mutants.mutant import Mutant
from tests.mutants.run_tests import ROOT, End, Request, Result

LEFT_OUT = (".git", ".venv", "build", "dist", ".mypy_cache", ".ruff_cache", ".hypothesis", "_trial_temp*")
LINKED = (".venv", "build")
END_SECONDS = 30.0  # that a process has to end all that came of it


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
        self._running: dict[subprocess.Popen[bytes], socket.socket] = {}
        self._isolated = isolation.possible()
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
            running = dict(self._running)
        for process, ours in running.items():
            _end(process, ours)

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
        """Run tests below `isolation`'s process, which ends all of theirs when our socket is closed.

        As root, they have namespaces of their own, with which all ends that a mutant leaves in the kernel.
        """
        command = [sys.executable, "-m", "tests.mutants.run_tests"]
        ours, theirs = socket.socketpair()
        with self._lock, theirs, tree.path.with_suffix(".log").open("wb") as log:
            if self._ended:
                ours.close()
                return
            process = subprocess.Popen(
                isolation.first_process(self._isolated, command),
                cwd=tree.path,
                env={**os.environ, "PYTHONPATH": str(tree.path), "CI": "1"},  # hypothesis' same examples
                stdin=theirs.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running[process] = ours
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                ours.sendall(json.dumps(cattrs.unstructure(request)).encode() + b"\n")
                process.wait(seconds)
        finally:
            _end(process, ours)
            with self._lock:
                del self._running[process]


def _end(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    """End a process that was started with the other end of a socket. Idempotent."""
    ours.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
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
