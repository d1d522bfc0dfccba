# SPDX-License-Identifier: Apache-2.0
"""Debian's containerd, with which the daemon is compared."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from twisted.internet.threads import deferToThread

from bench.client import Client
from bench.conformance import NEEDS
from bench.figures import Missing
from infranetes_common.reactors import IReactor
from tests.interop.critest_runtimes import Containerd, removed
from tests.support.registry import Registry


@asynccontextmanager
async def containerd(reactor: IReactor, registry: Registry) -> AsyncIterator[Client]:
    """Run containerd, with the sandbox image from the registry. Yields a client of it.

    :raise Missing: a program is not installed.
    """
    for program, how in NEEDS.items():
        if shutil.which(program) is None:
            raise Missing(f"{program} is missing: {how}")
    root = Path(tempfile.mkdtemp(prefix="bench-containerd-", dir="/var/tmp"))  # not on an overlay file system
    runtime = Containerd(root / "c")
    client = Client(reactor, runtime.socket)
    try:
        await deferToThread(runtime.start, registry)
        yield client
    finally:
        await client.close()
        await deferToThread(runtime.end)
        await deferToThread(removed, root)
