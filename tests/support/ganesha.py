# SPDX-License-Identifier: Apache-2.0
"""A real NFS server: Debian's nfs-ganesha, which does not need the kernel's. `tests/e2e/tools` fetches it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.harness.needs import TOOLS, Tier, tool

START_SECONDS = 30.0
GANESHA = tool("nfs-ganesha", Tier.ALL, "vm-tools")
_CONFIG = """\
NFS_CORE_PARAM {{
  Protocols = 4; NFS_Port = {port}; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;
  Plugins_Dir = "{plugins}";{more}
}}
NFSV4 {{
  Graceless = true; Only_Numeric_Owners = true; UseGetpwnam = true; DomainName = "localdomain";
  RecoveryRoot = "{state}";
}}
NFS_KRB5 {{ Active_krb5 = false; }}
"""
_EXPORT = """\
EXPORT {{
  Export_Id = {number}; Path = "{path}"; Pseudo = "{name}"; Access_Type = RW; Squash = No_Root_Squash;
  SecType = sys; Protocols = 4; FSAL {{ Name = VFS; }}
}}
"""


class NfsServer:
    """Serves directories by NFSv4, at all addresses of this machine, until `end`.

    :param exports: the directories, by the paths that clients see.
    :ivar port: the port that it listens on."""

    def __init__(self, exports: Mapping[str, Path]) -> None:
        self._top = Path(tempfile.mkdtemp(prefix="infranetes-nfs-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        try:
            self._start(exports)
        except BaseException:
            self.end()
            raise

    def _start(self, exports: Mapping[str, Path]) -> None:
        libraries = TOOLS / "nfs-ganesha/usr/lib"
        [plugins] = libraries.glob("*/ganesha")
        # From release 5 on it asks the kernel to treat it as an I/O flusher, which a test machine may refuse.
        late = any((libraries / "ganesha").glob("libganesha_nfsd.so.[5-9]*"))
        more = " Allow_Set_Io_Flusher_Fail = true;" if late else ""
        config = _CONFIG.format(port=self.port, plugins=plugins, state=self._top / "state", more=more)
        for number, (name, path) in enumerate(exports.items(), 1):
            config += _EXPORT.format(number=number, name=name, path=path)
        (self._top / "ganesha.conf").write_text(config)
        program = TOOLS / "nfs-ganesha/usr/bin/ganesha.nfsd"
        files = ["-f", str(self._top / "ganesha.conf"), "-p", str(self._top / "pid")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [program, "-F", *files, "-L", "STDERR", "-N", "NIV_EVENT"],
                stdout=log,
                stderr=log,
                env={**os.environ, "LD_LIBRARY_PATH": f"{plugins.parent}:{libraries / 'ganesha'}"},
            )
        until = time.monotonic() + START_SECONDS
        while "NFS SERVER INITIALIZED" not in self.log():
            if time.monotonic() > until or self._process.poll() is not None:
                raise AssertionError(f"nfs-ganesha does not serve:\n{self.log()[-3000:]}")
            time.sleep(0.1)

    @property
    def _log(self) -> Path:
        return self._top / "log"

    def log(self) -> str:
        """Its log so far."""
        return self._log.read_text(errors="replace")

    def hang(self) -> None:
        """Answer nothing from now on; the kernel still accepts connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Answer again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End the server, and remove its files. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._top, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
