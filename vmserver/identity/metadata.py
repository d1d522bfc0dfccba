# SPDX-License-Identifier: Apache-2.0
"""The identity from a cloud: its metadata service, or the hypervisor's guestinfo.

==========  ===================================================================================
source      where the document is
==========  ===================================================================================
aws         user-data, by IMDSv2: a session token first (source: Amazon EC2 user guide, "Use IMDSv2")
azure       user-data, base64 (source: Azure, "Azure Instance Metadata Service")
gcp         the instance's attribute `infranetes-identity` (source: Compute Engine, "About VM metadata")
openstack   user-data, or the server's metadata, once the node has put it there (source: Nova user guide,
            "Metadata")
vsphere     `guestinfo.infranetes.identity`, base64, read by open-vm-tools' vmtoolsd and erased then
cloud-init  user-data of whatever cloud, in the file in which cloud-init keeps it
cloud       whichever of the first five the machine's DMI names
==========  ===================================================================================

User-data holds the machine's key and can't be erased, and containers share the machine's network. So once
the identity is read, the metadata service is closed to the whole machine but the agent, unless the pod's
annotation `infranetes.io/metadata-access` is `allow`. DNS and time, which GCP serves at the same address,
stay open.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IDelayedCall, ITCPTransport
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.client import Agent, ResponseDone
from twisted.web.http_headers import Headers

from infranetes_common.commands import Command, check
from infranetes_common.concurrency import backoff, cancellable, start
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from infranetes_common.identity import MAX_DOCUMENT_BYTES
from infranetes_common.reactors import IReactor
from vmserver.config import USER_DATA
from vmserver.identity.delivery import POLL_SECONDS, Accept, answer
from vmserver.network.marked_connections import MARK, MarkedEndpoints

AWS, AZURE, GCP = "aws", "azure", "gcp"
OPENSTACK, VSPHERE, CLOUD_INIT, DETECT = "openstack", "vsphere", "cloud-init", "cloud"
SOURCES = (AWS, AZURE, GCP, OPENSTACK, VSPHERE, CLOUD_INIT, DETECT)
ACCESS_ANNOTATION = "infranetes.io/metadata-access"
DMI = Path("/sys/class/dmi/id")

_ENDPOINT = "http://169.254.169.254"
FIRST_PAUSE = 0.05  # seconds between the first two attempts
_SECONDS = 5.0
_TOKEN_SECONDS = b"60"
_MAX_TOKEN = 4096
PARTS = "infranetes-identity"  # the key of how many parts there are in a server's metadata
_MAX_PARTS, _MAX_METADATA = 100, 256 * 1024
_VENDORS = {
    "Amazon EC2": AWS,
    "Google": GCP,
    "Microsoft Corporation": AZURE,
    "OpenStack Foundation": OPENSTACK,
    "VMware, Inc.": VSPHERE,
}
# Nova's product names: vendors of OpenStack put names of their own into sys_vendor.
_PRODUCTS = {"OpenStack Nova": OPENSTACK, "OpenStack Compute": OPENSTACK}
_GUESTINFO = "guestinfo.infranetes.identity"
_TABLE = "infranetes_metadata"
_OPEN = f"table inet {_TABLE}\ndelete table inet {_TABLE}\n"
# Ports 53 and 123 are GCP's resolver and clock. fe80::a9fe:a9fe is Neutron's metadata service. 168.63.129.16
# is Azure's resolver too, besides the service that Azure's own agents ask.
_CLOSED = (
    _OPEN
    + f"""table inet {_TABLE} {{
  chain output {{
    type filter hook output priority 0; policy accept;
    meta mark {MARK:#x} accept
    ip daddr 169.254.169.254 tcp dport != 53 reject with tcp reset
    ip daddr 169.254.169.254 udp dport != {{ 53, 123 }} reject
    ip daddr 168.63.129.16 tcp dport {{ 80, 32526 }} reject with tcp reset
    ip6 daddr {{ fd00:ec2::254, fd20:ce::254, fe80::a9fe:a9fe }} tcp dport != 53 reject with tcp reset
  }}
  chain forward {{
    type filter hook forward priority 0; policy accept;
    ip daddr 169.254.169.254 tcp dport != 53 reject with tcp reset
    ip daddr 168.63.129.16 tcp dport {{ 80, 32526 }} reject with tcp reset
    ip6 daddr {{ fd00:ec2::254, fd20:ce::254, fe80::a9fe:a9fe }} tcp dport != 53 reject with tcp reset
  }}
}}
"""
)

Run = Callable[[list[str], bytes], Awaitable[bytes]]
"""`run(command, input)`: run a program and return its output. :raise Unavailable: it failed."""

_log = Logger()


def detect(dmi: Path = DMI) -> str:
    """Return the cloud that this machine is in.

    :raise FailedPrecondition: DMI names none that is known.
    """
    vendor = _dmi_text(dmi / "sys_vendor")
    found = _VENDORS.get(vendor) or _PRODUCTS.get(_dmi_text(dmi / "product_name"))
    if found is None:
        raise FailedPrecondition(
            f"this machine's vendor is {vendor[:80]!r}, which is not a known cloud; set identity.source"
        )
    return found


def _dmi_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class _Body(Protocol):
    """A response's body, up to a limit.

    :ivar whole: fires with it.
    """

    transport: ITCPTransport

    def __init__(self, limit: int) -> None:
        self.whole: Deferred[bytes] = Deferred(lambda _: self.transport.loseConnection())
        self._limit = limit
        self._data = b""

    def dataReceived(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > self._limit and not self.whole.called:
            self.whole.errback(InvalidArgument(f"the metadata service sends over {self._limit} bytes"))
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.whole.called:
            return
        if reason.check(ResponseDone):
            self.whole.callback(self._data)
        else:
            self.whole.errback(Unavailable("the metadata service's answer was cut off"))


class MetadataService:
    """A client of the cloud's metadata service.

    :param endpoint: replaces the service's own address.
    :param marked: True to reach the service even while it is closed to everybody else.
    """

    def __init__(self, reactor: IReactor, endpoint: str = "", *, marked: bool = False) -> None:
        self._agent = (
            Agent.usingEndpointFactory(reactor, MarkedEndpoints(reactor))
            if marked
            else Agent(reactor, connectTimeout=_SECONDS)
        )
        self._reactor = reactor
        self._endpoint = (endpoint or _ENDPOINT).rstrip("/")

    async def aws(self) -> bytes:
        """Read the document from EC2's user-data. :raise InfranetesError: it can't be had now."""
        return await self.read_aws("user-data", MAX_DOCUMENT_BYTES)

    async def azure(self) -> bytes:
        """Read the document from Azure's user-data. :raise InfranetesError: it can't be had now."""
        path = "instance/compute/userData?api-version=2021-01-01&format=text"
        text = await self.read_azure(path, MAX_DOCUMENT_BYTES * 4 // 3 + 4)
        try:
            return base64.b64decode(text.strip(), validate=True)
        except binascii.Error:
            raise InvalidArgument("the metadata service's user-data is not base64") from None

    async def gcp(self) -> bytes:
        """Read the document from an instance's attribute. :raise InfranetesError: it can't be had now."""
        return await self.read_gcp("attributes/infranetes-identity", MAX_DOCUMENT_BYTES)

    async def read_aws(self, path: str, limit: int) -> bytes:
        """Read a path below EC2's `latest/`. :raise NotFound: it does not exist.

        :raise InfranetesError: the service doesn't answer now, or with more than `limit` bytes."""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_SECONDS}
        token = await self._request(b"PUT", "/latest/api/token", headers, _MAX_TOKEN)
        return await self._request(b"GET", f"/latest/{path}", {"X-aws-ec2-metadata-token": token}, limit)

    async def read_azure(self, path: str, limit: int) -> bytes:
        """Read a path below Azure's `metadata/`. Raises as `read_aws` does. :param path: with its query."""
        return await self._request(b"GET", f"/metadata/{path}", {"Metadata": b"true"}, limit)

    async def read_gcp(self, path: str, limit: int) -> bytes:
        """Read one of Compute Engine's values for the instance. Raises as `read_aws` does."""
        headers = {"Metadata-Flavor": b"Google"}
        return await self._request(b"GET", f"/computeMetadata/v1/instance/{path}", headers, limit)

    async def openstack(self) -> bytes:
        """Read the document from the server's metadata, in parts, since user-data can't be changed; if it has
        none, from Nova's user-data. :raise InfranetesError: it can't be had now."""
        with contextlib.suppress(NotFound):
            text = await self._request(b"GET", "/openstack/latest/meta_data.json", {}, _MAX_METADATA)
            document = _in_parts(text)
            if document is not None:
                return document
        return await self._request(b"GET", "/openstack/latest/user_data", {}, MAX_DOCUMENT_BYTES)

    async def _request(self, method: bytes, path: str, headers: Mapping[str, bytes], limit: int) -> bytes:
        requested = self._agent.request(
            method,
            (self._endpoint + path).encode(),
            Headers({name.encode(): [value] for name, value in headers.items()}),
        )
        try:
            response = await start(cancellable(requested)).addTimeout(_SECONDS, self._reactor)
            body = _Body(limit)
            response.deliverBody(body)
            data: bytes = await body.whole.addTimeout(_SECONDS, self._reactor)
        except (InfranetesError, CancelledError):
            raise
        except TimeoutError:
            raise Unavailable(f"the metadata service does not answer within {_SECONDS:g} s") from None
        except Exception as error:
            raise Unavailable(f"the metadata service does not answer: {type(error).__name__}") from None
        if response.code == 404:
            raise NotFound(f"the metadata service has no {path}")
        if response.code != 200:
            raise Unavailable(f"the metadata service answers {response.code} to {path}")
        return data


def _in_parts(text: bytes) -> bytes | None:
    """Return the document in a server's metadata; None: there is none.

    :raise Unavailable: the server waits for it. :raise InvalidArgument: a part of it is missing."""
    try:
        told = json.loads(text).get("meta") or {}
        if PARTS not in told:
            return None
        count = int(told[PARTS])
        parts = [str(told[f"{PARTS}-{number}"]) for number in range(1, min(count, _MAX_PARTS) + 1)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidArgument("the metadata service does not have all parts of the identity") from None
    if not parts:
        raise Unavailable("the server was stopped, and is given its identity when it is started")
    return "".join(parts).encode()


async def guestinfo(run: Run, tools: str) -> bytes:
    """Read the document from vSphere's guestinfo. :raise InfranetesError: it can't be had now."""
    output = await run([tools, "--cmd", f"info-get {_GUESTINFO}"], b"")
    try:
        return base64.b64decode(output.strip(), validate=True)
    except binascii.Error:
        raise InvalidArgument(f"{_GUESTINFO} is not base64") from None


def kept_user_data(path: Path) -> bytes:
    """Read the document from the file of cloud-init's. :raise Unavailable: it can't be had now."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise Unavailable(f"{path} of cloud-init can't be read: {error.strerror}") from None


class CloudIdentity:
    """An `IdentitySource`: polls the cloud until the machine has an identity.

    :param waiting: whether it has none yet. :param tools: the program of open-vm-tools, vmtoolsd.
    :param user_data: the file in which cloud-init keeps it.
    """

    def __init__(
        self,
        reactor: IReactor,
        source: str,
        endpoint: str,
        accept: Accept,
        waiting: Callable[[], bool],
        run: Run | None = None,
        tools: str = "vmtoolsd",
        user_data: Path = USER_DATA,
    ) -> None:
        self._source = source
        self._user_data = user_data
        self._tools = tools
        self._metadata = MetadataService(reactor, endpoint)
        self._accept = accept
        self._waiting = waiting
        self._run = run or runner(reactor)
        self._warned = ""
        self._reactor = reactor
        self._pauses = backoff(FIRST_PAUSE, POLL_SECONDS, factor=1.5)
        self._running = False
        self._timer: IDelayedCall | None = None

    def start(self) -> None:
        """Poll now and again soon, as the network of a machine that boots comes up; later once a second."""
        self._running = True
        self._poll()

    def stop(self) -> None:
        """Stop polling. Idempotent."""
        self._running = False
        if self._timer is not None and self._timer.active():
            self._timer.cancel()

    def _poll(self) -> None:
        if self._waiting():
            start(self._deliver()).addErrback(
                lambda failure: _log.failure("reading the identity failed unexpectedly", failure=failure)
            ).addCallback(self._poll_later)

    def _poll_later(self, _: None) -> None:
        if self._running and self._waiting():
            self._timer = self._reactor.callLater(next(self._pauses), self._poll)

    async def _deliver(self) -> None:
        try:
            source = detect() if self._source == DETECT else self._source
            document = await self._document(source)
            line = await answer(document.strip(), self._accept)
            _log.info("identity from {source}: {answer}", source=source, answer=line.decode().strip())
            if not self._waiting() and source == VSPHERE:
                await self._run([self._tools, "--cmd", f"info-set {_GUESTINFO} -"], b"")
        except InfranetesError as error:
            words = str(error)
            if words != self._warned:
                self._warned = words
                _log.warn("no identity from the cloud yet: {words}", words=words)

    async def _document(self, source: str) -> bytes:
        if source == VSPHERE:
            return await guestinfo(self._run, self._tools)
        if source == CLOUD_INIT:
            return kept_user_data(self._user_data)
        services = {
            AWS: self._metadata.aws,
            AZURE: self._metadata.azure,
            GCP: self._metadata.gcp,
            OPENSTACK: self._metadata.openstack,
        }
        return await services[source]()


class MetadataGate:
    """Closes and opens the metadata service to the machine. Without a cloud it does nothing.

    :param guarded: whether there is such a service, and the agent may program this machine.
    """

    def __init__(self, reactor: IReactor, guarded: bool, run: Run | None = None) -> None:
        self._guarded = guarded
        self._run = run or runner(reactor)

    async def close(self) -> None:
        """Let nothing reach the service from now on. :raise Unavailable: the kernel refuses."""
        if self._guarded:
            await self._run(["nft", "-f", "-"], _CLOSED.encode())

    async def configure(self, annotations: Mapping[str, str]) -> None:
        """Close or open the service, as the pod's annotation says.

        :raise InvalidArgument: the annotation is neither allow nor deny.
        :raise Unavailable: the kernel refuses.
        """
        wanted = annotations.get(ACCESS_ANNOTATION, "deny")
        if wanted not in ("allow", "deny"):
            raise InvalidArgument(f"annotation {ACCESS_ANNOTATION}: {wanted[:80]!r}: expected allow or deny")
        if self._guarded:
            await self._run(["nft", "-f", "-"], (_OPEN if wanted == "allow" else _CLOSED).encode())


def runner(reactor: IReactor) -> Run:
    """Return a `Run` that starts child processes."""

    async def run(command: list[str], stdin: bytes) -> bytes:
        try:
            return await check(reactor, Command(command, _SECONDS, stdin, most=MAX_DOCUMENT_BYTES * 2))
        except InfranetesError as error:
            raise Unavailable(str(error)) from None

    return run
