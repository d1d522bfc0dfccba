# SPDX-License-Identifier: Apache-2.0
"""EC2's calls about instance types: moto has the types of today and the zones that offer them, but answers
with one page and with types that the region does not have."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from tests.support.clouds.ec2errors import error

Forward = Callable[[dict[str, str]], Awaitable[tuple[int, bytes]]]

_SIZES = ("nano", "micro", "small", "medium", "large", "xlarge", "2xlarge")
# The types that exist unless a test asks for all.
FEW = (
    *(f"{family}.{size}" for family in ("t3", "t3a", "t4g") for size in _SIZES),
    *(f"{family}.{size}" for family in ("m5", "c5", "r5") for size in _SIZES[4:]),
    "m6a.large",
    "g4dn.xlarge",
    "x1e.xlarge",
)
_SEV_SNP = ("m6a", "c6a", "r6a")
_CALLS = {
    "DescribeInstanceTypes": (b"instanceTypeSet", 100),
    "DescribeInstanceTypeOfferings": (b"instanceTypeOfferingSet", 1000),
}
_TYPE = re.compile(rb"<item><instanceType>([a-z0-9.-]+)</instanceType>")
_ZONE = re.compile(rb"<location>([a-z0-9-]+)</location>")
_items: dict[tuple[str, bool], list[bytes]] = {}  # of moto, which takes seconds for all


class Ec2Types:
    """The calls. :ivar every: whether all of moto's types exist. :ivar gaps: types that zones do not offer.
    :ivar page: the most that an answer has; 0: as many as EC2 gives."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.every = False
        self.gaps: set[tuple[str, str]] = set()
        self.page = 0

    def serves(self, action: str) -> bool:
        """Whether a call is about types."""
        return action in _CALLS

    async def answer(self, parameters: dict[str, str]) -> tuple[int, bytes]:
        """Return one page of what is asked for."""
        action = parameters["Action"]
        container, most = _CALLS[action]
        wanted = int(parameters.get("MaxResults", most))
        if not 5 <= wanted <= most:
            return 400, error("InvalidParameterValue", f"MaxResults has to be 5 to {most}")
        found = [each for each in await self._all(action) if not self._is_gap(each)]
        first = int(parameters.get("NextToken", "0"))
        end = first + min(wanted, self.page or wanted)
        token = b"<nextToken>%d</nextToken>" % end if end < len(found) else b""
        name, items = action.encode(), b"".join(found[first:end])
        return 200, (
            b'<%sResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>'
            b"<%s>%s</%s>%s</%sResponse>" % (name, container, items, container, token, name)
        )

    def _is_gap(self, item: bytes) -> bool:
        zone, name = _ZONE.search(item), _TYPE.match(item)
        assert name is not None
        return zone is not None and (name[1].decode(), zone[1].decode()) in self.gaps

    async def _all(self, action: str) -> list[bytes]:
        key = (action, self.every)
        if key not in _items:
            asked = {"Action": action, "Version": "2016-11-15", "LocationType": "availability-zone"}
            if action == "DescribeInstanceTypes":
                del asked["LocationType"]
                asked |= {} if self.every else {f"InstanceType.{n}": name for n, name in enumerate(FEW, 1)}
            status, body = await self._forward(asked)
            assert status == 200, body
            starts = [match.start() for match in _TYPE.finditer(body)]
            ends = [*starts[1:], body.rindex(b"</", 0, body.rindex(b"Set>"))]
            items = [body[start:end] for start, end in zip(starts, ends, strict=True)]
            few = {name.encode() for name in FEW}
            _items[key] = [each for each in items if self.every or _name(each) in few]
        return _items[key]


def refusal(parameters: dict[str, str]) -> tuple[int, bytes] | None:
    """Return EC2's answer to a launch whose type has not what it asks for; None: the type has it."""
    kind = parameters.get("InstanceType", "")
    if parameters.get("CpuOptions.AmdSevSnp") != "enabled" or kind.partition(".")[0] in _SEV_SNP:
        return None
    return 400, error("InvalidParameterCombination", f"The instance type {kind} does not support AMD SEV-SNP")


def _name(item: bytes) -> bytes:
    match = _TYPE.match(item)
    assert match is not None
    return match[1]
