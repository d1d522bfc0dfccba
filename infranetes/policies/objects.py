# SPDX-License-Identifier: Apache-2.0
"""The values that NetworkPolicies need from Kubernetes' objects, checked and with Kubernetes' defaults.

Source: the API reference of `v1` Pod and Namespace and of `networking.k8s.io/v1` NetworkPolicy. The parts of
a policy that can't be read allow nothing: a policy is never treated as if it did not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from sys import intern
from typing import TypeVar

import attrs
from twisted.logger import Logger

from infranetes.kubernetes.fields import Fields, Name
from infranetes.kubernetes.watch import Json
from infranetes.policies import addresses
from infranetes.policies.addresses import Range
from infranetes.policies.selectors import EVERYTHING, Selector, selector
from infranetes_common.errors import InvalidArgument
from infranetes_common.pod_firewall import Ports

T = TypeVar("T")
U = TypeVar("U")
Steps = Generator[None, None, T]

# kubelet knows a static pod by another UID than the API server; this annotation has kubelet's.
MIRROR = "kubernetes.io/config.mirror"
ENDED = ("Succeeded", "Failed")
DIRECTIONS = ("Ingress", "Egress")
FIRST_PORT, LAST_PORT = 1, 65535
MAX_PARTS = 10_000  # the most peers, excepted blocks and ports of a policy
MOST_SAID = 5  # lines of the log on one policy
STEP = 200  # peers read at a time

_log = Logger()


@attrs.frozen
class NamedPort:
    """A container's port that has a name. `protocol` is TCP, UDP or SCTP."""

    name: str
    protocol: str
    number: int


@attrs.frozen
class Pod:
    """A pod that has, or will have, its own network. :ivar addresses: its addresses, of both families."""

    name: Name
    uid: str
    labels: Mapping[str, str]
    addresses: tuple[int, ...] = ()
    ports: tuple[NamedPort, ...] = ()


@attrs.frozen(cache_hash=True)
class PodPeer:
    """A peer that selects pods. :ivar namespaces: selects their namespaces; None: only `namespace`."""

    namespace: str
    namespaces: Selector | None
    pods: Selector


@attrs.frozen(cache_hash=True)
class Block:
    """A peer that is a set of addresses: sorted ranges, with a gap between any two."""

    ranges: tuple[Range, ...]


@attrs.frozen
class PortName:
    """A port by name: that of a container's port in the pod at which a connection arrives."""

    name: str
    protocol: str

    def is_of(self, port: NamedPort) -> bool:
        """Return whether it is the name of this container's port."""
        return port.name == self.name and port.protocol == self.protocol


@attrs.frozen
class Rule:
    """One rule of a policy. :ivar peers: None: all peers. :ivar ports: None: all ports and protocols."""

    peers: tuple[PodPeer | Block, ...] | None
    ports: tuple[Ports | PortName, ...] | None


@attrs.frozen
class Policy:
    """A NetworkPolicy. :ivar ingress: :ivar egress: its rules; None: it does not apply to this direction."""

    name: Name
    pods: Selector
    ingress: tuple[Rule, ...] | None
    egress: tuple[Rule, ...] | None


def trimmed_pod(item: Json) -> Json:
    """Return the part of a Pod that `pod` reads: a Pod's JSON is large, and there may be thousands."""
    metadata = _part(item.get("metadata"), "namespace", "name", "uid", "labels")
    if isinstance(metadata, dict):
        metadata["annotations"] = _part(item["metadata"].get("annotations"), MIRROR)
    spec = _part(item.get("spec"), "hostNetwork", "containers", "initContainers")
    if isinstance(spec, dict):
        for key in ("containers", "initContainers"):
            if isinstance(its := spec.get(key), list):
                spec[key] = [_part(each, "ports", "restartPolicy") for each in its]
    return {
        "metadata": metadata,
        "spec": spec,
        "status": _part(item.get("status"), "phase", "podIP", "podIPs"),
    }


def _part(value: object, *keys: str) -> object:
    """Return an object with only these keys; any other value unchanged."""
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else value


def pod(item: object) -> Pod | None:
    """Read a Pod. Return None if no policy applies to it: it has ended, or its address is its node's.

    :raise InvalidArgument: it is not a valid Pod.
    """
    top = Fields(item, "Pod")
    name, about, spec, status = top.name(), top.fields("metadata"), top.fields("spec"), top.fields("status")
    if spec.flag("hostNetwork", False) or status.text("phase") in ENDED:
        return None
    texts = [each.text("ip") for each in status.items("podIPs")] or [status.text("podIP")]
    return Pod(
        name,
        about.fields("annotations").text(MIRROR) or about.text("uid"),
        labels(top),
        tuple(_parsed(status, addresses.address, text) for text in texts if text),
        tuple(_named_ports(spec)),
    )


def _named_ports(spec: Fields) -> Iterator[NamedPort]:
    """Yield the named ports of the containers that run as long as the pod, including sidecars."""
    sidecars = [each for each in spec.items("initContainers") if each.text("restartPolicy") == "Always"]
    for container in [*spec.items("containers"), *sidecars]:
        for each in container.items("ports"):
            if each.text("name"):
                yield NamedPort(intern(each.text("name")), each.protocol(), each.port("containerPort"))


def labels(top: Fields) -> Mapping[str, str]:
    """Return an object's labels, interned because thousands of objects share them."""
    return {intern(key): intern(value) for key, value in top.labels().items()}


def namespace(item: object) -> tuple[Name, Mapping[str, str]]:
    """Return a Namespace's name and labels. :raise InvalidArgument: it is not a valid Namespace."""
    top = Fields(item, "Namespace")
    return top.name(), labels(top)


def policy(item: object) -> Steps[Policy]:
    """Read a NetworkPolicy, in small steps. The parts of an invalid one that can't be read allow nothing.

    :raise InvalidArgument: the policy has no name."""
    top = Fields(item, "NetworkPolicy")
    name = top.name()
    return (yield from _Reader(name).policy(top))


class _Reader:
    """Reads one policy, up to MAX_PARTS of its parts."""

    def __init__(self, name: Name) -> None:
        self._name = name
        self._left = MAX_PARTS
        self._said = 0

    def policy(self, top: Fields) -> Steps[Policy]:
        spec = self._or(lambda: top.fields("spec"), None)
        if spec is None:
            return Policy(self._name, EVERYTHING, (), ())
        types = self._or(lambda: _directions(spec), DIRECTIONS)
        return Policy(
            self._name,
            self._or(lambda: selector(spec.fields("podSelector")), EVERYTHING),
            (yield from self._rules(spec, "ingress", "from")) if "Ingress" in types else None,
            (yield from self._rules(spec, "egress", "to")) if "Egress" in types else None,
        )

    def _or(self, read: Callable[[], T], closed: U) -> T | U:
        """Return the result of `read` or, if it raises, `closed`, which allows the least."""
        try:
            return read()
        except InvalidArgument as error:
            self._say(error)
            return closed

    def _say(self, error: InvalidArgument) -> None:
        self._said += 1
        if self._said < MOST_SAID:
            _log.warn(
                "a part of NetworkPolicy {name} can't be used and allows nothing: {error}",
                name=str(self._name),
                error=error,
            )
        elif self._said == MOST_SAID:
            _log.warn("further parts of NetworkPolicy {name} can't be used", name=str(self._name))

    def _rules(self, spec: Fields, direction: str, other_side: str) -> Steps[tuple[Rule, ...]]:
        given: Sequence[Fields] | None = self._or(lambda: spec.items(direction), None)
        rules = []
        for each in given or ():
            try:
                rules.append((yield from self._rule(each, other_side)))
            except InvalidArgument as error:
                self._say(error)
            yield
        return tuple(rules)

    def _rule(self, fields: Fields, other_side: str) -> Steps[Rule]:
        peers, ports = fields.items(other_side), fields.items("ports")
        self._count(len(peers) + len(ports))
        others = []
        for number, each in enumerate(peers, 1):
            others.append(self._peer(each))
            if number % STEP == 0:
                yield
        return Rule(tuple(others) if peers else None, tuple(map(_port, ports)) if ports else None)

    def _count(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise InvalidArgument(f"it has over {MAX_PARTS} peers, excepted blocks and ports")

    def _peer(self, fields: Fields) -> PodPeer | Block:
        by_pods, by_namespaces = fields.has("podSelector"), fields.has("namespaceSelector")
        if fields.has("ipBlock") == (by_pods or by_namespaces):
            raise InvalidArgument(f"{fields.what}: a peer has either an ipBlock or selectors")
        if fields.has("ipBlock"):
            return self._block(fields.fields("ipBlock"))
        return PodPeer(
            "" if by_namespaces else self._name.namespace,
            selector(fields.fields("namespaceSelector")) if by_namespaces else None,
            selector(fields.fields("podSelector")),
        )

    def _block(self, fields: Fields) -> Block:
        excepted = fields.texts("except")
        self._count(len(excepted))
        whole = _parsed(fields, addresses.block, fields.text("cidr"))
        without = [_parsed(fields, addresses.block, each) for each in excepted]
        return Block(tuple(addresses.without(whole, without)))


def _directions(spec: Fields) -> tuple[str, ...]:
    """Return a policy's directions. By default: ingress, and egress if it has rules for that."""
    given = spec.texts("policyTypes")
    if unknown := set(given).difference(DIRECTIONS):
        raise InvalidArgument(f"{spec.what}: policyTypes can't have {min(unknown)[:100]!r}")
    return tuple(given) or (DIRECTIONS if spec.items("egress") else DIRECTIONS[:1])


def _port(fields: Fields) -> Ports | PortName:
    protocol = fields.protocol()
    if isinstance(fields.value("port"), str):
        if fields.has("endPort"):
            raise InvalidArgument(f"{fields.what}: endPort goes with the number of a port, not with a name")
        return PortName(fields.text("port"), protocol)
    if not fields.has("port"):
        if fields.has("endPort"):
            raise InvalidArgument(f"{fields.what}: endPort goes with a port")
        return Ports(protocol, FIRST_PORT, LAST_PORT)
    first = fields.port()
    last = fields.port("endPort") if fields.has("endPort") else first
    if last < first:
        raise InvalidArgument(f"{fields.what}: endPort {last} is below port {first}")
    return Ports(protocol, first, last)


def _parsed(fields: Fields, read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise InvalidArgument(f"{fields.what}: {error}") from None
