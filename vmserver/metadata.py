"""The identity of a machine in a cloud: from the metadata service, or from the hypervisor's guestinfo.

========  ===================================================================================
source    where the document is
========  ===================================================================================
aws       user-data, by IMDSv2: a session token first (source: Amazon EC2 user guide, "Use IMDSv2")
gcp       the instance's attribute `infranetes-identity` (source: Compute Engine, "About VM metadata")
vsphere   `guestinfo.infranetes.identity`, base64, read by open-vm-tools' vmtoolsd and erased then
cloud     whichever of them the machine's DMI names
========  ===================================================================================

User-data holds the machine's key and can't be erased, and pods share the machine's network. So once the
identity is read, the metadata service is closed to the whole machine, unless the pod's annotation
`infranetes.io/metadata-access` is `allow`. DNS and time, which GCP serves at the same address, stay open.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.protocol import ProcessProtocol, Protocol
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.web.client import Agent, ResponseDone
from twisted.web.http_headers import Headers

from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.identity import MAX_DOCUMENT_BYTES
from vmserver.intake import WAITING_SECONDS, Offer, answer

AWS, GCP, VSPHERE, DETECT = "aws", "gcp", "vsphere", "cloud"
SOURCES = (AWS, GCP, VSPHERE, DETECT)
ACCESS_ANNOTATION = "infranetes.io/metadata-access"
DMI = Path("/sys/class/dmi/id")

_ENDPOINT = "http://169.254.169.254"
_SECONDS = 5.0
_TOKEN_SECONDS = b"60"
_MAX_TOKEN = 4096
_VENDORS = {"Amazon EC2": AWS, "Google": GCP, "VMware, Inc.": VSPHERE}
_GUESTINFO = "guestinfo.infranetes.identity"
_TABLE = "infranetes_metadata"
_OPEN = f"table inet {_TABLE}\ndelete table inet {_TABLE}\n"
# 53 and 123: GCP's resolver and clock
_CLOSED = (
    _OPEN
    + f"""table inet {_TABLE} {{
  chain output {{
    type filter hook output priority 0; policy accept;
    ip daddr 169.254.169.254 tcp dport != 53 reject with tcp reset
    ip daddr 169.254.169.254 udp dport != {{ 53, 123 }} reject
    ip6 daddr {{ fd00:ec2::254, fd20:ce::254 }} tcp dport != 53 reject with tcp reset
  }}
  chain forward {{
    type filter hook forward priority 0; policy accept;
    ip daddr 169.254.169.254 tcp dport != 53 reject with tcp reset
    ip6 daddr {{ fd00:ec2::254, fd20:ce::254 }} tcp dport != 53 reject with tcp reset
  }}
}}
"""
)

Run = Callable[[list[str], bytes], Awaitable[bytes]]
"""`run(command, input)`: a program's output. :raise Unavailable: it failed."""

_log = Logger()


def detect(dmi: Path = DMI) -> str:
    """The cloud that this machine is in.

    :raise FailedPrecondition: DMI names none that is known."""
    try:
        vendor = (dmi / "sys_vendor").read_text().strip()
    except OSError:
        vendor = ""
    if vendor not in _VENDORS:
        raise FailedPrecondition(
            f"this machine's vendor is {vendor[:80]!r}, which is no cloud that is known; set identity.source"
        )
    return _VENDORS[vendor]


class _Body(Protocol):
    """An answer's body, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.whole: Deferred[bytes] = Deferred()
        self._limit = limit
        self._data = b""

    def dataReceived(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > self._limit and not self.whole.called:
            self.whole.errback(InvalidArgument(f"the metadata service sends over {self._limit} bytes"))
            transport: Any = self.transport
            transport.abortConnection()

    def connectionLost(self, reason: Any = None) -> None:
        if self.whole.called:
            return
        if reason is not None and reason.check(ResponseDone):
            self.whole.callback(self._data)
        else:
            self.whole.errback(Unavailable("the metadata service broke off"))


class Metadata:
    """What one cloud's metadata service has for this machine.

    :param endpoint: in place of the service's own address."""

    def __init__(self, reactor: Any, endpoint: str = "") -> None:
        self._agent = Agent(reactor, connectTimeout=_SECONDS)
        self._reactor = reactor
        self._endpoint = (endpoint or _ENDPOINT).rstrip("/")

    async def aws(self) -> bytes:
        """:raise InfranetesError: it can't be had now."""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_SECONDS}
        token = await self._ask(b"PUT", "/latest/api/token", headers, _MAX_TOKEN)
        session = {"X-aws-ec2-metadata-token": token}
        return await self._ask(b"GET", "/latest/user-data", session, MAX_DOCUMENT_BYTES)

    async def gcp(self) -> bytes:
        """:raise InfranetesError: it can't be had now."""
        path = "/computeMetadata/v1/instance/attributes/infranetes-identity"
        return await self._ask(b"GET", path, {"Metadata-Flavor": b"Google"}, MAX_DOCUMENT_BYTES)

    async def _ask(self, method: bytes, path: str, headers: Mapping[str, bytes], limit: int) -> bytes:
        asked = self._agent.request(
            method,
            (self._endpoint + path).encode(),
            Headers({name.encode(): [value] for name, value in headers.items()}),
        )
        try:
            response = await asked.addTimeout(_SECONDS, self._reactor)
            body = _Body(limit)
            response.deliverBody(body)
            data: bytes = await body.whole.addTimeout(_SECONDS, self._reactor)
        except (InfranetesError, TimeoutError):
            raise
        except Exception as error:
            raise Unavailable(f"the metadata service does not answer: {type(error).__name__}") from None
        if response.code != 200:
            raise Unavailable(f"the metadata service answers {response.code} to {path}")
        return data


async def guestinfo(run: Run, tools: str) -> bytes:
    """The document in vSphere's guestinfo. :raise InfranetesError: it can't be had now."""
    output = await run([tools, "--cmd", f"info-get {_GUESTINFO}"], b"")
    try:
        return base64.b64decode(output.strip(), validate=True)
    except binascii.Error:
        raise InvalidArgument(f"{_GUESTINFO} is not base64") from None


class CloudIdentity:
    """Asks the cloud for the identity until there is one.

    :param waiting: whether there is none yet. :param tools: open-vm-tools' program."""

    def __init__(
        self,
        reactor: Any,
        source: str,
        endpoint: str,
        offer: Offer,
        waiting: Callable[[], bool],
        run: Run | None = None,
        tools: str = "vmtoolsd",
    ) -> None:
        self._source = source
        self._tools = tools
        self._metadata = Metadata(reactor, endpoint)
        self._offer = offer
        self._waiting = waiting
        self._run = run or runner(reactor)
        self._said = ""
        self._loop = LoopingCall(self._look)
        self._loop.clock = reactor

    def start(self) -> None:
        """Ask now, and about once a second."""
        self._loop.start(WAITING_SECONDS)

    def stop(self) -> None:
        """Ask no more. Twice is once."""
        if self._loop.running:
            self._loop.stop()

    def _look(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._ask())

    async def _ask(self) -> None:
        if not self._waiting():
            self.stop()
            return
        try:
            source = detect() if self._source == DETECT else self._source
            document = await self._document(source)
            line = await answer(document.strip(), self._offer)
            _log.info("identity from {source}: {answer}", source=source, answer=line.decode().strip())
            if not self._waiting() and source == VSPHERE:
                await self._run([self._tools, "--cmd", f"info-set {_GUESTINFO} -"], b"")
        except (InfranetesError, TimeoutError) as error:
            words = str(error) or "the metadata service does not answer in time"
            if words != self._said:
                self._said = words
                _log.warn("no identity from the cloud yet: {words}", words=words)

    async def _document(self, source: str) -> bytes:
        if source == AWS:
            return await self._metadata.aws()
        return await (self._metadata.gcp() if source == GCP else guestinfo(self._run, self._tools))


class MetadataGate:
    """Whether the machine can reach the metadata service. Without a cloud there is nothing to do.

    :param guarded: whether there is such a service, and this machine is ours to program."""

    def __init__(self, reactor: Any, guarded: bool, run: Run | None = None) -> None:
        self._guarded = guarded
        self._run = run or runner(reactor)

    async def close(self) -> None:
        """From now on nothing reaches it. :raise Unavailable: the kernel refuses."""
        if self._guarded:
            await self._run(["nft", "-f", "-"], _CLOSED.encode())

    async def configure(self, annotations: Mapping[str, str]) -> None:
        """As the pod's annotation says.

        :raise InvalidArgument: it says nothing known. :raise Unavailable: the kernel refuses."""
        wanted = annotations.get(ACCESS_ANNOTATION, "deny")
        if wanted not in ("allow", "deny"):
            raise InvalidArgument(f"annotation {ACCESS_ANNOTATION}: {wanted[:80]!r}: expected allow or deny")
        if self._guarded:
            await self._run(["nft", "-f", "-"], (_OPEN if wanted == "allow" else _CLOSED).encode())


class _Process(ProcessProtocol):
    """One run of a program."""

    def __init__(self, stdin: bytes) -> None:
        self.ended: Deferred[Any] = Deferred()
        self.output, self.words = b"", b""
        self._stdin = stdin

    def connectionMade(self) -> None:
        transport: Any = self.transport
        transport.write(self._stdin)
        transport.closeStdin()

    def outReceived(self, data: bytes) -> None:
        self.output += data[: MAX_DOCUMENT_BYTES * 2 - len(self.output)]

    def errReceived(self, data: bytes) -> None:
        self.words += data[: 1000 - len(self.words)]

    def processEnded(self, reason: Any) -> None:
        self.ended.callback(reason.value)


def runner(reactor: Any) -> Run:
    """How programs are run."""

    async def run(command: list[str], stdin: bytes) -> bytes:
        process = _Process(stdin)
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
        transport = reactor.spawnProcess(process, command[0], command, env=environment)
        try:
            end = await process.ended.addTimeout(_SECONDS, reactor)
        except TimeoutError:
            transport.signalProcess("KILL")
            raise Unavailable(f"{command[0]} did not end within {_SECONDS:g} s") from None
        if end.exitCode:
            words = " ".join(process.words.decode(errors="replace").split())
            raise Unavailable(f"{command[0]} failed: {words or f'exit status {end.exitCode}'}")
        return process.output

    return run
