# SPDX-License-Identifier: Apache-2.0
"""OpenSSH's server on a loopback port, with keys of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from infranetes.machines.agentless.ssh.keys import KeyPair, make_key
from infranetes_common.processes import family, kill_family
from tests.harness.needs import find_program

_START_SECONDS = 30


class Sshd:
    """An sshd process that lets in whoever has `user_key`.

    :ivar host_key: its own. :param options: lines of sshd_config(5). :param port: 0: one that is free.
    """

    def __init__(self, *options: str, address: str = "127.0.0.1", port: int = 0) -> None:
        self.user_key, self.host_key = make_key("user"), make_key("host")
        self.root = Path(tempfile.mkdtemp(prefix="sshd-"))
        self.port = port
        self._address = address
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has logged."""
        return (self.root / "log").read_text(errors="replace")

    def start(self) -> Sshd:
        """Start it, and wait until it listens; on the port that it had before."""
        Path("/run/sshd").mkdir(exist_ok=True)
        if not self.port:
            with socket.socket() as free:
                free.bind((self._address, 0))
                self.port = free.getsockname()[1]
        self._write("host", self.host_key.private)
        self._write("authorized", self.user_key.public + "\n")
        lines = (
            f"ListenAddress {self._address}",
            f"Port {self.port}",
            f"HostKey {self.root}/host",
            f"AuthorizedKeysFile {self.root}/authorized",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "PermitRootLogin yes",
            "PidFile none",
            f"SetEnv HOME={self.root}",  # bash reads a user's .bashrc here, which may do anything
            "Subsystem sftp internal-sftp",
            *self._options,
        )
        self._write("config", "\n".join(lines) + "\n")
        program = find_program("sshd")
        assert program is not None
        with open(self.root / "log", "ab") as log:
            self._process = subprocess.Popen(
                [program, "-D", "-e", "-f", str(self.root / "config")], stdin=subprocess.DEVNULL, stderr=log
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"sshd does not start: {self.log}")
            time.sleep(0.01)
        return self

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.write_text(text)
        path.chmod(0o600)

    def _listens(self) -> bool:
        with socket.socket() as trial:
            return trial.connect_ex((self._address, self.port)) == 0

    def cut(self) -> None:
        """End the processes of all connections; the server itself stays."""
        assert self._process is not None
        for pid in family(self._process.pid)[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def new_host_key(self) -> KeyPair:
        """Start again with another host key."""
        self.stop_process()
        self.host_key = make_key("another")
        self.start()
        return self.host_key

    def stop_process(self) -> None:
        """End the server and all its connections."""
        if self._process is not None:
            kill_family(self._process.pid)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the server, and remove its files. Idempotent."""
        self.stop_process()
        shutil.rmtree(self.root, ignore_errors=True)
