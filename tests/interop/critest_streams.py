# SPDX-License-Identifier: Apache-2.0
"""Streams by crictl: how fast exec and port-forward carry bytes each way, and what that costs in memory."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import attrs

from tests.interop.critest_benchmark import NoFigures
from tests.interop.critest_images import BASE
from tests.interop.critest_runtimes import Runtime

SECONDS = 600.0  # for the streams of all runtimes; their starts have limits of their own
BLOCK = 2**16
MIB = 2**20
_READY, _GO, _END = b"ready\n", b"go\n", b"end\n"
_OUT_PORT, _IN_PORT = 5001, 5002
_FORWARDING = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) -> ")
# Until both of its listeners are there: a port-forward ends with its first connection that is refused.
_LISTENS = f"until [ $(netstat -ltn | grep -c ':{_OUT_PORT} \\|:{_IN_PORT} ') = 2 ]; do sleep 0.1; done"


def giving(size: int) -> str:
    """A shell's script that answers `_GO` with that many bytes, whole blocks, and ends."""
    return f"echo ready; read go; exec dd if=/dev/zero bs={BLOCK} count={size // BLOCK} 2>/dev/null"


def taking(size: int) -> str:
    """A shell's script that takes that many bytes, whole blocks, and gives back the line after them."""
    dd = f"dd of=/dev/null bs={BLOCK} count={size // BLOCK} iflag=fullblock 2>/dev/null"
    return f'echo ready; {dd}; read word; echo "$word"'


@attrs.frozen
class Stream:
    """Both ways of one to a script."""

    reader: IO[bytes]
    writer: IO[bytes]

    def begin(self) -> None:
        """Until the script runs: how long that takes is not the stream's matter."""
        if (said := self.reader.readline()) != _READY:
            raise NoFigures(f"no script answers: {said!r}")

    def send(self, data: bytes) -> None:
        self.writer.write(data)
        self.writer.flush()


def received(stream: Stream, size: int) -> float:
    """Seconds that the bytes of `giving` take.

    :raise NoFigures: there are fewer, or more."""
    stream.begin()
    begun = time.monotonic()
    stream.send(_GO)
    found = 0
    while piece := stream.reader.read1(MIB):  # type: ignore[attr-defined]
        found += len(piece)
    if found != size:
        raise NoFigures(f"{found:,} of {size:,} bytes came")
    return time.monotonic() - begun


def sent(stream: Stream, size: int) -> float:
    """Seconds until `taking` has had as many bytes.

    :raise NoFigures: it had others; the line after them is not what it was then."""
    stream.begin()
    begun = time.monotonic()
    block = b"x" * BLOCK
    for _ in range(size // BLOCK):
        stream.send(block)
    stream.send(_END)
    if (said := stream.reader.readline()) != _END:
        raise NoFigures(f"other than {size:,} bytes came: after them {said[:100]!r}")
    return time.monotonic() - begun


def mib(status: str, key: str) -> float:
    """A size in a /proc/PID/status."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, key
    return int(found[1]) / 1024


@attrs.frozen
class Figures:
    """What the streams of a runtime were: megabytes (10^6) per second by the name of the stream, and the
    resident memory of its process before them and at most during them."""

    rates: Mapping[str, float]
    before_mib: float
    peak_mib: float


def measure(runtime: Runtime, directory: Path, size: int, until: float) -> Figures:
    """One stream after the other, of `size` MiB each, in a pod of its own.

    :param until: what the time (`monotonic`) may be at the end.
    :raise NoFigures: a stream broke, lost bytes, or the time is up."""
    directory.mkdir(parents=True)
    pod = _Pod(runtime, directory, until)
    try:
        pod.start(size * MIB)
        streams = pod.streams(size * MIB)
        status, clear = (Path("/proc", str(runtime.pid), name) for name in ("status", "clear_refs"))
        before = mib(status.read_text(), "VmRSS")
        clear.write_text("5")  # VmHWM begins again at VmRSS: proc(5)
        rates = {name: size * MIB / 1e6 / take() for name, take in streams.items()}
        return Figures(rates, before, mib(status.read_text(), "VmHWM"))
    except (OSError, subprocess.TimeoutExpired, NoFigures) as error:
        late = ", the time was up" if time.monotonic() >= until else ""
        raise NoFigures(f"streams of {runtime.name}: {error}{late}; crictl said: {pod.said()}") from error


class _Pod:
    """A pod with one container, in which the scripts run and listen."""

    def __init__(self, runtime: Runtime, directory: Path, until: float) -> None:
        self._runtime = runtime
        self._directory = directory
        self._until = until
        self._log = directory / "crictl.log"
        self._pod = self._container = ""

    def said(self) -> str:
        """The end of what crictl had to complain of."""
        return self._log.read_text(errors="replace")[-1000:] if self._log.exists() else ""

    def start(self, size: int) -> None:
        """Until it listens."""
        pod, container = self._directory / "pod.json", self._directory / "container.json"
        metadata = {"name": "streams", "namespace": "bench", "uid": "streams", "attempt": 0}
        pod.write_text(json.dumps({"metadata": metadata, "log_directory": str(self._directory), "linux": {}}))
        listeners = (
            f"nc -ll -p {port} -e sh -c {shlex.quote(script)}"
            for port, script in ((_OUT_PORT, giving(size)), (_IN_PORT, taking(size)))
        )
        main = {
            "metadata": {"name": "main"},
            "image": {"image": BASE},
            "command": ["sh", "-c", " & exec ".join(listeners)],
            "log_path": "main.log",
            "linux": {},
        }
        container.write_text(json.dumps(main))
        self._done("pull", BASE)
        self._pod = self._done("runp", str(pod))
        self._container = self._done("create", self._pod, str(container), str(pod))
        self._done("start", self._container)
        self._done("exec", "-s", self._container, "sh", "-c", _LISTENS)

    def streams(self, size: int) -> dict[str, Callable[[], float]]:
        """What takes the seconds of each."""

        def execs(script: str, carry: Callable[[Stream, int], float]) -> float:
            with self._exec(script) as stream:
                return carry(stream, size)

        def forwards(port: int, carry: Callable[[Stream, int], float]) -> float:
            with self._forward(port) as stream:
                return carry(stream, size)

        return {
            "exec, output": lambda: execs(giving(size), received),
            "exec, input": lambda: execs(taking(size), sent),
            "port-forward, from the pod": lambda: forwards(_OUT_PORT, received),
            "port-forward, to the pod": lambda: forwards(_IN_PORT, sent),
        }

    @contextlib.contextmanager
    def _exec(self, script: str) -> Iterator[Stream]:
        with self._crictl("exec", "-i", self._container, "sh", "-c", script) as stream:
            yield stream

    @contextlib.contextmanager
    def _forward(self, port: int) -> Iterator[Stream]:
        with self._crictl("port-forward", self._pod, f"0:{port}") as crictl:
            line = crictl.reader.readline()
            if (found := _FORWARDING.match(line)) is None:
                raise NoFigures(f"port-forward said {line!r}")
            with (
                socket.create_connection(("127.0.0.1", int(found[1])), self._left()) as connection,
                connection.makefile("rb") as reader,
                connection.makefile("wb") as writer,
            ):
                yield Stream(reader, writer)

    @contextlib.contextmanager
    def _crictl(self, *words: str) -> Iterator[Stream]:
        """Beside this, until its stream is done with or the time is up."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._runtime.crictl_command(*words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        timer = threading.Timer(self._left(), process.kill)
        timer.start()
        try:
            with process:
                assert process.stdin is not None and process.stdout is not None
                try:
                    yield Stream(process.stdout, process.stdin)
                finally:
                    process.kill()
        finally:
            timer.cancel()

    def _done(self, *words: str) -> str:
        """What crictl says, which has to succeed."""
        done = self._runtime.crictl(*words, timeout=self._left())
        if done.returncode:
            raise NoFigures(f"crictl {words[0]}: {done.stderr[-1000:]}")
        return done.stdout.strip()

    def _left(self) -> float:
        return max(0.1, self._until - time.monotonic())
