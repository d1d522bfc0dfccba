# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, controlled by its DevTools protocol, which shows how a browser renders a page.

Commands and events are JSON documents, each terminated by a NUL, on two pipes:
https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProcessTransport, IReactorProcess
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

COMMANDS_FD, ANSWERS_FD = 3, 4  # the descriptors that --remote-debugging-pipe uses
_FLAGS = (
    "--headless",
    "--no-sandbox",  # the sandbox does not work as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)

Document = Mapping[str, Any]  # Any: JSON


class ChromiumFailed(Exception):
    """Chromium refused a command, or ended."""


class Chromium(ProcessProtocol):
    """A browser process that runs until `end`.

    :ivar events: the events of all pages so far, in order.
    """

    def __init__(self) -> None:
        self.events: list[Document] = []
        self._numbers = count(1)
        self._answers: dict[int, Deferred[Document]] = {}
        self._listeners: list[tuple[str, Deferred[None]]] = []
        self._received = b""
        self._said = b""
        self._ended: Deferred[None] = Deferred()

    @classmethod
    def start(cls, reactor: IReactorProcess, profile: str) -> Chromium:
        """Start a browser. :param profile: a new directory, where it keeps its files."""
        program = shutil.which("chromium")
        assert program is not None, "Chromium is not installed: make test-page"
        self = cls()
        pipes = {0: "w", 1: "r", 2: "r", COMMANDS_FD: "w", ANSWERS_FD: "r"}
        command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        reactor.spawnProcess(self, program, command, env=None, path=None, childFDs=pipes)  # type: ignore[arg-type]
        return self

    async def call(self, method: str, session: str = "", **parameters: object) -> Document:
        """Call a method of the protocol and return its result. :raise ChromiumFailed: it is refused."""
        number = next(self._numbers)
        asked: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if session:
            asked["sessionId"] = session
        answer: Deferred[Document] = Deferred()
        self._answers[number] = answer
        self._process.writeToChild(COMMANDS_FD, json.dumps(asked).encode() + b"\0")
        given = await answer
        if "error" in given:
            raise ChromiumFailed(f"{method}: {given['error']}")
        result: Document = given["result"]
        return result

    async def page(self) -> Page:
        """Make a page, and enable the events of all domains that `Page` reads."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Network", "Log", "Runtime"):
            await page.call(f"{domain}.enable")
        return page

    async def wait_for(self, method: str) -> None:
        """Wait for the next event of this name."""
        waiting: Deferred[None] = Deferred()
        self._listeners.append((method, waiting))
        await waiting

    async def end(self) -> None:
        """Kill the browser, and wait until it has ended."""
        if not self._ended.called:
            self._process.signalProcess("KILL")
        await self._ended

    # ---- ProcessProtocol

    @property
    def _process(self) -> IProcessTransport:
        assert self.transport is not None
        return self.transport

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        """Dispatch what it sends as answers and events, and keep the end of its other output."""
        if childFD != ANSWERS_FD:
            self._said = (self._said + data)[-4000:]
            return
        *documents, self._received = (self._received + data).split(b"\0")
        for text in documents:
            document: Document = json.loads(text)
            if "id" in document:
                self._answers.pop(document["id"]).callback(document)
            else:
                self._event(document)

    def _event(self, event: Document) -> None:
        self.events.append(event)
        due = [each for each in self._listeners if each[0] == event["method"]]
        self._listeners = [each for each in self._listeners if each not in due]
        for _, waiting in due:
            waiting.callback(None)

    def processEnded(self, reason: Failure) -> None:
        """Fail every call and wait that is pending."""
        waiting: list[Deferred[Document] | Deferred[None]] = [
            *self._answers.values(),
            *(each for _, each in self._listeners),
        ]
        self._answers, self._listeners = {}, []
        said = self._said.decode(errors="replace")
        for each in waiting:
            each.errback(ChromiumFailed(f"Chromium ended: {reason.getErrorMessage()}; it said: {said}"))
        self._ended.callback(None)


class Page:
    """One page of a browser."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session

    async def call(self, method: str, **parameters: object) -> Document:
        """Call a method of the protocol for this page."""
        return await self._browser.call(method, self._session, **parameters)

    async def open(self, url: str) -> None:
        """Go to `url`, and wait until all of it is loaded."""
        loaded = Deferred.fromCoroutine(self._browser.wait_for("Page.loadEventFired"))
        await self.call("Page.navigate", url=url)
        await loaded

    async def be(self, width: int, height: int, *, phone: bool = False) -> None:
        """Emulate a window of this size in CSS pixels, or a phone with such a screen."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    async def evaluate(self, expression: str) -> Any:  # Any: JSON
        """Return the value of a JavaScript expression in the page, even if the page may not run scripts."""
        given = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in given:
            raise ChromiumFailed(f"{expression}: {given['exceptionDetails']}")
        return given["result"].get("value")

    async def screenshot(self) -> bytes:
        """Return what the page looks like, as a PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])

    def _told(self, method: str) -> Sequence[Document]:
        return [
            event["params"]
            for event in self._browser.events
            if event["method"] == method and event.get("sessionId") == self._session
        ]

    @property
    def requests(self) -> Sequence[str]:
        """The URLs that it has requested, or was about to."""
        return [each["request"]["url"] for each in self._told("Network.requestWillBeSent")]

    @property
    def complaints(self) -> Sequence[str]:
        """What a developer sees in the console: log entries, uncaught exceptions and console calls."""
        entries = [each["entry"] for each in self._told("Log.entryAdded")]
        return [
            *(f"{each['level']}: {each['text']}" for each in entries),
            *(str(each["exceptionDetails"]) for each in self._told("Runtime.exceptionThrown")),
            *(f"{each['type']}: {each['args']}" for each in self._told("Runtime.consoleAPICalled")),
        ]
