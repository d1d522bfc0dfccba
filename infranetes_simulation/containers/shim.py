# SPDX-License-Identifier: Apache-2.0
"""Run one container's command and outlive the agent: keep its output, its times and its exit code.

    python -I -S shim.py DIRECTORY ID

Needs nothing but the standard library, so that it starts fast. Reads ID.json, written by the agent: argv,
env, cwd, stdin, oom_score_adj. Writes, each whole or not at all: ID.run once the command runs, ID.exit
once it has ended or could not be run; ID.log, ID.log.1, ... as Docker's json-file. Descriptor 3 is closed
when it is known whether the command runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import time

PART_BYTES = 16 * 1024
LOG_BYTES = 16 * 1024 * 1024
LOG_FILES = 4
DRAIN_SECONDS = 2.0
READY_FD = 3


def main(directory: str, id: str) -> None:
    os.chdir(directory)
    with open(id + ".json") as file:
        record = json.load(file)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The command is run once, however often the agent was killed while starting it: a second shim waits here
    # until the first one's start has succeeded or failed, and ends.
    begun = os.open(id + ".begun", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(begun, fcntl.LOCK_EX)
    if os.fstat(begun).st_size:
        return
    os.write(begun, b"begun\n")
    stdin = _stdin(id, record.get("stdin", ""))
    try:
        child = subprocess.Popen(  # noqa: S603  running it is what this is for
            record["argv"],
            env=record["env"],
            cwd=record["cwd"] or "/",
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: _as_container(record.get("oom_score_adj", 0)),
        )
    except OSError as error:
        code = 126 if isinstance(error, PermissionError) else 127
        now = time.time_ns()
        _write(id + ".exit", {"exit_code": code, "started_at": now, "finished_at": now, "error": str(error)})
        return
    if stdin >= 0:
        os.close(stdin)  # so that a writer learns when the command no longer reads
    started = {"pid": child.pid, "shim": os.getpid(), "ticks": _ticks(), "started_at": time.time_ns()}
    _write(id + ".run", started)
    os.close(begun)
    os.close(READY_FD)
    _copy(child, _Log(id + ".log"))
    code = child.wait()
    ended = {"exit_code": 128 - code if code < 0 else code, "finished_at": time.time_ns(), "error": ""}
    _write(id + ".exit", {**ended, "started_at": started["started_at"]})


def _stdin(id: str, kind: str) -> int:
    """Return the reading end of ID.stdin; hold the writing end to the end, or if "once" until SIGUSR1."""
    if not kind:
        return subprocess.DEVNULL
    os.mkfifo(id + ".stdin", 0o600)
    reading = os.open(id + ".stdin", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(reading, True)
    writing = os.open(id + ".stdin", os.O_WRONLY | os.O_CLOEXEC)
    if kind == "once":
        held = [writing]
        signal.signal(signal.SIGUSR1, lambda *_: os.close(held.pop()) if held else None)
    else:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return reading


def _as_container(oom_score_adj: int) -> None:
    with contextlib.suppress(PermissionError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(oom_score_adj))
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _ticks() -> int:
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def _write(name: str, value: object) -> None:
    with open(name + ".new", "w") as file:
        json.dump(value, file)
    os.rename(name + ".new", name)


def _copy(child: subprocess.Popen[bytes], log: _Log) -> None:
    """Copy output to the log until the command has ended and everything is written."""
    selector = selectors.DefaultSelector()
    lines = {}
    for pipe, stream in ((child.stdout, "stdout"), (child.stderr, "stderr")):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ, stream)
        lines[stream] = b""
    end = os.pidfd_open(child.pid)
    selector.register(end, selectors.EVENT_READ, None)
    deadline = None
    while selector.get_map() and (deadline is None or time.monotonic() < deadline):
        for key, _ in selector.select(None if deadline is None else 0.1):
            if key.data is None:
                # As in a container, all processes end when the first one ends.
                selector.unregister(end)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                deadline = time.monotonic() + DRAIN_SECONDS
                continue
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            if not data:
                selector.unregister(key.fileobj)
            lines[key.data] = _log_lines(log, key.data, lines[key.data] + data, not data)
        log.flush()
    for stream, rest in lines.items():
        _log_lines(log, stream, rest, True)
    log.flush()


def _log_lines(log: _Log, stream: str, data: bytes, last: bool) -> bytes:
    """Write the lines that are complete; return the rest."""
    while data:
        end = data.find(b"\n", 0, PART_BYTES)
        if end >= 0:
            log.add(stream, data[: end + 1])
            data = data[end + 1 :]
        elif len(data) > PART_BYTES:
            log.add(stream, data[:PART_BYTES])
            data = data[PART_BYTES:]
        elif last:
            log.add(stream, data)
            data = b""
        else:
            break
    return data


class _Log:
    """Docker's json-file, rotated."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file = open(name, "ab")  # noqa: SIM115

    def add(self, stream: str, line: bytes) -> None:
        nanos = time.time_ns()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(nanos // 10**9)) + f".{nanos % 10**9:09d}Z"
        entry = {"log": line.decode(errors="replace"), "stream": stream, "time": at}
        self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        if self._file.tell() > LOG_BYTES:
            self._rotate()

    def flush(self) -> None:
        with contextlib.suppress(OSError):  # a full disk loses lines, not the container
            self._file.flush()

    def _rotate(self) -> None:
        self._file.close()
        for number in range(LOG_FILES - 1, 0, -1):
            older = self._name if number == 1 else f"{self._name}.{number - 1}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(older, f"{self._name}.{number}")
        self._file = open(self._name, "ab")  # noqa: SIM115


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
