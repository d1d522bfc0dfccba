# SPDX-License-Identifier: Apache-2.0
"""A look at a kubeconfig, without a question to the API server that it names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from infranetes.kubernetes.api_server import check_certificates
from infranetes.kubernetes.kubeconfig import Access, thd_read
from infranetes_common.config_outside import Finding, program, tried, unseen
from infranetes_common.redaction import redacted


def look(path: Path, host: str) -> Iterator[Finding]:
    """Read a kubeconfig and what it names on this machine. Blocks. :param host: see `thd_read`."""
    found: list[Access] = []
    yield from tried(lambda: found.append(thd_read(path, host)))
    for access in found:
        yield from tried(partial(check_certificates, access))
        if access.plugin is not None:
            command = access.plugin.command[0]
            yield from program(command)
            yield unseen(f"the command {command}, which prints the credentials, was not run")
        yield unseen(f"the API server {redacted(access.server)} was not asked if it takes the credentials")
