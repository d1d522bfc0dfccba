# SPDX-License-Identifier: Apache-2.0
"""Debian's docker-registry on a free loopback port, filled without the code under test."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.certificates import make_certificate
from tests.support.oci import BuiltImage, BuiltIndex

_START_SECONDS = 60
_LISTENING = re.compile(rb"listening on (\S+?):(\d+)")


class Registry:
    """A registry process. `with Registry() as registry: registry.push("busybox", "1", built)`.

    :ivar host: `127.0.0.1:PORT`, as used in references.
    :ivar ca_file: with `tls`, the certificate that clients have to trust.
    :param user: with `password`, the only account that may read and write (htpasswd).
    :param tls: serve https, with a certificate of its own.
    :param root: the directory of the content; by default a temporary one, which `stop` removes.
    """

    def __init__(
        self,
        *,
        user: str = "",
        password: str = "",
        tls: bool = False,
        root: Path | None = None,
        port: int = 0,
    ) -> None:
        self._user, self._password, self._tls = user, password, tls
        self._own_root = root is None
        self.root = root or Path(tempfile.mkdtemp(prefix="registry-"))
        self.ca_file = self.root / "tls.pem"
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Registry:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """The registry's log so far, which has a line for each request among others."""
        return (self.root / "log").read_text(errors="replace")

    def start(self) -> Registry:
        """Start the process, and wait until it listens. It keeps its port and content over `stop_process`."""
        log_path = self.root / "log"
        start = log_path.stat().st_size if log_path.exists() else 0
        config = self.root / "config.json"
        config.write_text(json.dumps(self._config()))
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                ["docker-registry", "serve", str(config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.root,
                env={"PATH": os.environ.get("PATH", "/usr/bin"), "OTEL_TRACES_EXPORTER": "none"},
            )  # fmt: skip
        until = time.monotonic() + _START_SECONDS
        while (found := _LISTENING.search(log_path.read_bytes()[start:])) is None:
            if self._process.poll() is not None or time.monotonic() > until:
                said = log_path.read_text(errors="replace")
                self.stop()
                raise RuntimeError(f"docker-registry does not start: {said}")
            time.sleep(0.02)
        self.port = int(found[2])
        return self

    def stop_process(self) -> None:
        """End the process, but keep the content and the port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it and remove its temporary directory. Idempotent."""
        self.stop_process()
        if self._own_root:
            shutil.rmtree(self.root, ignore_errors=True)

    def reference(self, name: str, tag: str = "latest") -> str:
        return f"{self.host}/{name}:{tag}"

    def push(self, name: str, tag: str, built: BuiltImage | BuiltIndex) -> str:
        """Push an image, and return its reference by tag. Blobs that the registry has are not sent again."""
        for blob in built.blobs:
            self._push_blob(name, blob.digest, blob.data)
        for manifest in built.manifests:
            at = tag if manifest is built.top else manifest.digest
            self.request("PUT", f"/v2/{name}/manifests/{at}", manifest.data, manifest.media_type, expect=201)
        return self.reference(name, tag)

    def blob_path(self, digest: str) -> Path:
        """Return the path of a blob's file, for tests that damage it."""
        hexadecimal = digest.removeprefix("sha256:")
        return self.root / "data/docker/registry/v2/blobs/sha256" / hexadecimal[:2] / hexadecimal / "data"

    def request(
        self, method: str, path: str, body: bytes = b"", media_type: str = "", *, expect: int = 0
    ) -> tuple[int, dict[str, str], bytes]:
        """Send an HTTP request; return the response's status, headers (with lower-case names) and body."""
        connection: http.client.HTTPConnection
        if self._tls:
            context = ssl.create_default_context(cafile=str(self.ca_file))
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=context)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": media_type} if media_type else {}
        if self._user:
            token = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
            headers["Authorization"] = f"Basic {token}"
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if expect and response.status != expect:
            raise RuntimeError(f"{method} {path}: {response.status} {data!r}")
        return response.status, {name.lower(): value for name, value in response.getheaders()}, data

    def _push_blob(self, name: str, digest: str, data: bytes) -> None:
        if self.request("HEAD", f"/v2/{name}/blobs/{digest}")[0] == 200:
            return
        _, headers, _ = self.request("POST", f"/v2/{name}/blobs/uploads/", expect=202)
        location = re.sub(r"^https?://[^/]+", "", headers["location"])
        joint = "&" if "?" in location else "?"
        self.request("PUT", f"{location}{joint}digest={digest}", data, "application/octet-stream", expect=201)

    def _config(self) -> dict[str, Any]:
        http_: dict[str, Any] = {"addr": self.host}
        config: dict[str, Any] = {
            "version": "0.1",
            "log": {"level": "info", "accesslog": {"disabled": False}},
            "storage": {
                "filesystem": {"rootdirectory": str(self.root / "data")},
                "delete": {"enabled": True},
            },
            "http": http_,
        }
        if self._tls:
            if not self.ca_file.exists():
                self._make_certificate()
            http_["tls"] = {"certificate": str(self.ca_file), "key": str(self.root / "tls-key.pem")}
        if self._user:
            # Perl's crypt is libxcrypt's, which has bcrypt, and every Debian has perl-base.
            script = 'print crypt($ARGV[0], q($2y$05$) . "abcdefghijklmnopqrstuu")'
            hashed = subprocess.run(
                ["perl", "-e", script, self._password], capture_output=True, text=True, check=True
            ).stdout
            htpasswd = self.root / "htpasswd"
            htpasswd.write_text(f"{self._user}:{hashed}\n")
            config["auth"] = {"htpasswd": {"realm": "test", "path": str(htpasswd)}}
        return config

    def _make_certificate(self) -> None:
        certificate, key = make_certificate("test registry")
        self.ca_file.write_bytes(certificate)
        (self.root / "tls-key.pem").write_bytes(key)
