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
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import attrs
import cattrs

from tests.harness import isolation
from tests.mutants.mutant import Mutant
from tests.mutants.run_tests import DONE, NOT_HERE, ROOT, End, Order, Request, Result

LEFT_OUT = (".git", ".venv", "build", "dist", ".mypy_cache", ".ruff_cache", ".hypothesis", "_trial_temp*")
LINKED = (".venv", "build")
END_SECONDS = 30.0  # that a process has to end all that came of it


class NoResults(Exception):
    """Tests could not be run without any mutant."""


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
        self.forks: socket.socket | None = None  # of a process of `forks` that is running
        shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        for name in LINKED:
            if (ROOT / name).exists():
                (path / name).symlink_to(ROOT / name)

    @contextlib.contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[str]:
        """Have a mutant in the place of its module, whose text is returned, while the block runs."""
        file = self.path / mutant.module
        original = file.read_text()
        self._write(file, mutant.text)
        try:
            yield original
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
        self._running: dict[socket.socket, subprocess.Popen[bytes]] = {}
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
            running = list(self._running)
        for ours in running:
            self._end(ours)

    def run(self, request: Request, seconds: float) -> Run:
        """Run tests in a free tree, and return what they reported.

        :param seconds: the time after which the process is ended.
        """
        with self._one() as (tree, results):
            self._run(tree, attrs.evolve(request, results=str(results)), seconds)
            return _read(results)

    def run_loaded(self, request: Request, seconds: float, loaded: Sequence[str]) -> Run:
        """Run tests as `run_mutant` does, but without a mutant."""
        with self._one() as (tree, results):
            order = Order(attrs.evolve(request, results=str(results)), "", "", "", seconds)
            _ask(self._forks(tree, loaded), cattrs.unstructure(order))
            return _read(results)

    def run_mutant(self, mutant: Mutant, request: Request, seconds: float, loaded: Sequence[str]) -> Run:
        """Run tests in a free tree, of which one module is a mutant, and return what they reported.

        :param seconds: the time after which the process is ended.
        :param loaded: the modules of tests from which all mutants' tests are: they are loaded only once.
        """
        with self._one() as (tree, results):
            forks = self._forks(tree, loaded)
            request = attrs.evolve(request, results=str(results))
            with tree.with_bug(mutant) as original:
                order = Order(request, mutant.module, original, mutant.text, seconds)
                if _ask(forks, cattrs.unstructure(order)) == NOT_HERE:
                    self._run(tree, request, seconds)
            return _read(results)

    def _forks(self, tree: Tree, loaded: Sequence[str]) -> socket.socket:
        if tree.forks is None:
            tree.forks = self._start(tree, "tests.mutants.forks", isolated=False)
            _ask(tree.forks, list(loaded))  # before there is any bug in the tree
        return tree.forks

    @contextlib.contextmanager
    def _one(self) -> Iterator[tuple[Tree, Path]]:
        """Have a free tree, and an empty file for results, while the block runs."""
        tree = self._free.get()
        results = tree.path.with_suffix(".results")
        results.write_text("")
        try:
            yield tree, results
        finally:
            shutil.rmtree(tree.path / "_trial_temp", ignore_errors=True)
            self._free.put(tree)

    def _run(self, tree: Tree, request: Request, seconds: float) -> None:
        """Run tests, as root in namespaces of their own, with which all ends that a mutant leaves there."""
        ours = self._start(tree, "tests.mutants.run_tests", self._isolated)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                _say(ours, cattrs.unstructure(request))
                self._running[ours].wait(seconds)
        finally:
            self._end(ours)

    def _start(self, tree: Tree, program: str, isolated: bool) -> socket.socket:
        """Start a program below `isolation`'s process, which ends all of it when our socket is closed."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs, tree.path.with_suffix(".log").open("ab") as log:
            if self._ended:
                ours.close()
                raise CancelledError
            self._running[ours] = subprocess.Popen(
                isolation.first_process(isolated, [sys.executable, "-m", program]),
                cwd=tree.path,
                env={**os.environ, "PYTHONPATH": str(tree.path), "CI": "1"},  # hypothesis' same examples
                stdin=theirs.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return ours

    def _end(self, ours: socket.socket) -> None:
        """End the process that was started with the other end of a socket. Idempotent."""
        ours.close()
        with self._lock:
            process = self._running.pop(ours, None)
        if process is None:
            return
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(link: socket.socket, value: object) -> str:
    """Say something, and return the answer. :raise NoResults: the process has ended."""
    try:
        _say(link, value)
        answer = link.recv(len(NOT_HERE)).decode()
    except OSError:
        answer = ""
    if answer not in (DONE, NOT_HERE):
        raise NoResults("the process that had loaded the tests has ended")
    return answer


def _say(link: socket.socket, value: object) -> None:
    link.sendall(json.dumps(value).encode() + b"\n")


def _read(results: Path) -> Run:
    found, end = list[Result](), None
    for line in results.read_text().splitlines():
        value = json.loads(line)
        if "failed" in value:
            end = cattrs.structure(value, End)
        else:
            found.append(cattrs.structure(value, Result))
    return Run(found, end)
