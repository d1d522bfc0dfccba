# SPDX-License-Identifier: Apache-2.0
"""What a support bundle gathers: all at once, in a time that has an end."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from twisted.trial.unittest import TestCase

from infranetes.ctl import bundle, bundle_daemon, host, host_programs
from infranetes.ctl.bundle import support_bundle
from infranetes.ctl.session import Session
from infranetes_common.commands import Output
from infranetes_common.concurrency import deferred, sleep
from infranetes_common.reactors import installed
from infranetes_common.wire import control
from txgrpc import Code, GrpcError

reactor = installed()


class FakeDaemon:
    """Answers at once, but for the calls in `hanging`, and counts those that wait at the same time."""

    def __init__(self, pods: int) -> None:
        self.pods = [control.Pod(id=f"{number:032x}", created_at=number) for number in range(pods)]
        self.hanging: set[str] = set()
        self.waiting = self.most = 0
        self.consoles: Callable[[str], str] = lambda id: "Linux"

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Message]]:
        def call(request: Any, timeout: float) -> Awaitable[Message]:  # Any: a message of any kind
            return self.answered(name, request, timeout)

        return call

    @deferred
    async def answered(self, name: str, request: Any, timeout: float) -> Message:
        if name in self.hanging:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            try:
                await sleep(reactor, timeout)
            finally:
                self.waiting -= 1
            raise GrpcError(Code.DEADLINE_EXCEEDED, f"{name} is late")
        if name == "ListPods":
            return control.ListPodsResponse(pods=self.pods)
        if name == "GetConsole":
            return control.GetConsoleResponse(text=self.consoles(request.sandbox))
        found: Message = getattr(control, f"{name}Response")()
        return found


async def _nothing(*_: object, **__: object) -> Output:
    return Output(1, b"", b"there is no such program")


async def _no_tables(*_: object) -> bytes:
    return b""


class BundleTests(TestCase):
    """Over a daemon of fakes."""

    def setUp(self) -> None:
        self.file = Path(self.mktemp()).absolute().with_name("bundle.tar.gz")
        self.patch(bundle, "SECONDS", 5.0)
        # Many programs at once; forking a process as large as a test runner takes long.
        for module in (host, host_programs):
            self.patch(module, "run", _nothing)
        self.patch(host_programs, "check", _no_tables)

    @deferred
    async def bundle(self, daemon: Any, *, json: bool = True) -> str:  # Any: in place of a stub
        """Make a bundle, and return what is printed."""
        options = Namespace(file=self.file, config=Path("/nonexistent"), json=json, socket=None)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(await support_bundle(Session(reactor, daemon, options)), 0)
        return out.getvalue()

    def parts(self) -> dict[str, str]:
        with tarfile.open(self.file) as archive:
            files = {each.name.partition("/")[2]: archive.extractfile(each) for each in archive}
            return {name: file.read().decode() for name, file in files.items() if file is not None}

    @deferred
    async def test_pods_that_are_not_answered_for_hold_it_up_for_so_long_together(self) -> None:
        daemon = FakeDaemon(pods=300)
        daemon.hanging = {"DescribePod", "GetConsole", "ListOrphans", "GetPool"}
        self.patch(bundle_daemon, "ASK_SECONDS", 0.3)
        self.patch(bundle_daemon, "PODS_SECONDS", 1.0)
        begun = reactor.seconds()
        missing = json.loads(await self.bundle(daemon))["missing"]
        self.assertLess(reactor.seconds() - begun, 30.0)  # 600 calls of 0.3 s would be 180 s
        self.assertGreaterEqual(daemon.most, bundle_daemon.AT_ONCE)
        newest = f"pods/{299:032x}"
        for name in ("pool.json", "orphans.json", f"{newest}/describe.json", f"{newest}/console.txt"):
            self.assertIn("is late", missing[name])
        self.assertRegex(missing["pods"], "^of 300 pods the newest [0-9]+ are here: ")
        self.assertEqual(len(json.loads(self.parts()["pods.json"])["pods"]), 300)

    @deferred
    async def test_what_takes_too_long_is_named_and_the_rest_is_there(self) -> None:
        self.patch(bundle, "SECONDS", 1.0)
        daemon = FakeDaemon(pods=1)
        daemon.hanging = {"ListOrphans"}
        missing = json.loads(await self.bundle(daemon))["missing"]
        self.assertIn("longer than 1 s", missing["orphans.json"])
        self.assertIn(f"pods/{0:032x}/console.txt", self.parts())

    @deferred
    async def test_every_console_that_is_missing_is_named_and_told_in_one_line(self) -> None:
        daemon = FakeDaemon(pods=3)

        def none(id: str) -> str:
            raise GrpcError(Code.NOT_FOUND, "there is no console" if id.endswith("0") else "it is gone")

        daemon.consoles = none
        words = await self.bundle(daemon, json=False)
        missing = json.loads(self.parts()["manifest.json"])["missing"]
        consoles = {name: why for name, why in missing.items() if name.endswith("/console.txt")}
        self.assertEqual(sorted(consoles.values()), ["it is gone", "it is gone", "there is no console"])
        (line,) = (line for line in words.splitlines() if line.endswith(": it is gone"))
        self.assertIn("and 1 more", line)

    @deferred
    async def test_a_fault_of_one_part_leaves_the_others(self) -> None:
        async def broken(session: Session) -> object:
            raise TypeError("not this again")

        self.patch(bundle_daemon, "pool", broken)
        missing = json.loads(await self.bundle(FakeDaemon(pods=0)))["missing"]
        self.assertEqual(missing["pool.json"], "not this again")
        self.assertIn("pods.json", self.parts())

    @deferred
    async def test_the_parts_of_a_failed_installation_are_there_or_named(self) -> None:
        self.patch(bundle, "SECONDS", 30.0)
        missing = json.loads(await self.bundle(FakeDaemon(pods=0)))["missing"]
        parts = self.parts()
        for name in (
            "journal.txt",
            "journal-guest-image.txt",
            "guest-image.json",
            "units.txt",
            "nftables.txt",
            "metrics.txt",
        ):
            self.assertIn(name, {**missing, **parts})
