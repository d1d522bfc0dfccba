# SPDX-License-Identifier: Apache-2.0
"""libcloud's own dummy driver as a cloud: it lags, throttles, and fails before or after it acts.

Each of the provider's drivers is a client of the one world with the credentials that it has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

import requests
from libcloud.common.exceptions import BaseHTTPError, RateLimitReachedError
from libcloud.common.types import InvalidCredsError, LibcloudError
from libcloud.compute.base import Node, NodeImage, NodeLocation, NodeSize
from libcloud.compute.drivers.dummy import DummyNodeDriver
from libcloud.compute.types import NodeState
from twisted.internet.threads import blockingCallFromThread

from tests.support.clouds.faults import Fault, FaultKind
from tests.support.clouds.http_sites import Answer
from tests.support.clouds.nodes import IMAGE, NEW, PLACES, PLANS, RUNNING, SimulatedNodes, Vm

T = TypeVar("T")


class Driver(DummyNodeDriver):  # type: ignore[misc]
    """The dummy driver with what any other has: names, user-data, locations, and a cloud behind it."""

    worlds: ClassVar[dict[str, SimulatedDummy]] = {}

    def __init__(self, key: str) -> None:
        super().__init__(creds="0")
        self.nl: list[Any] = []  # without the two nodes that it begins with
        if key not in self.worlds:
            raise InvalidCredsError("no such key", self)
        self._world = self.worlds[key]

    def list_nodes(self) -> list[Any]:
        self.nl = self._call({"Action": "list"}, lambda: [self._node(vm) for vm in self._world.vms()])
        nodes: list[Any] = super().list_nodes()
        return nodes

    def list_sizes(self, location: Any = None) -> list[Any]:
        return self._call(
            {"Action": "sizes"},
            lambda: [
                NodeSize(each.name, each.name, each.gib << 10, 25, 0, each.dollars, self, {"cpus": each.cpus})
                for each in PLANS
            ],
        )

    def list_images(self, location: Any = None) -> list[Any]:
        return self._call({"Action": "images"}, lambda: [NodeImage(IMAGE, "an image", self)])

    def list_locations(self) -> list[Any]:
        return self._call(
            {"Action": "locations"}, lambda: [NodeLocation(each, each, "US", self) for each in PLACES]
        )

    def create_node(
        self, name: str, size: Any, image: Any, location: Any = None, ex_userdata: str = ""
    ) -> Any:
        place = location.id if location else ""
        asked = {"Action": "launch", "name": name, "size": size.id, "place": place}

        def create() -> Any:
            self._world.bodies.append(asked)
            return self._node(self._world.launch(name, size.id, place, image.id, ex_userdata))

        return self._call(asked, create)

    def destroy_node(self, node: Any) -> bool:
        def destroy() -> bool:
            if not self._world.destroy(node.id):
                raise BaseHTTPError(404, "no such node")
            return True

        return self._call({"Action": "destroy", "id": node.id}, destroy)

    def _call(self, parameters: dict[str, str], work: Callable[[], T]) -> T:
        def served() -> T:
            return self._world.called(parameters, work)

        # Its own type has no variable for the result.
        call: Callable[..., T] = blockingCallFromThread
        return call(self._world.reactor, served)

    def _node(self, vm: Vm) -> Any:
        made = DummyNodeDriver.create_node(self, vm.name, None, None)  # whatever else a node of its has
        self.nl.pop()
        state = {NEW: NodeState.PENDING, RUNNING: NodeState.RUNNING}.get(vm.state, NodeState.STOPPED)
        return Node(
            id=vm.id,
            name=vm.name,
            state=state,
            public_ips=[] if vm.state == NEW else made.public_ips,
            private_ips=[] if vm.state == NEW else [vm.address],
            driver=self,
            size=vm.plan.name,
            created_at=datetime.fromtimestamp(vm.created, UTC),
            extra=made.extra,
        )


class SimulatedDummy(SimulatedNodes):
    """One test's cloud."""

    driver = f"{__name__}:Driver"

    def start(self) -> None:
        super().start()
        self.reactor = self._reactor
        self._key = str(self._directory)
        Driver.worlds[self._key] = self
        self.write_credentials(key=self._key)

    async def stop(self) -> None:
        del Driver.worlds[self._key]
        await super().stop()

    def table(self) -> dict[str, Any]:
        return {**super().table(), "user_data": "ex_userdata"}

    def called(self, parameters: dict[str, str], work: Callable[[], T]) -> T:
        """Serve a call, with what befalls it."""
        self.requests.append(parameters)
        fault = self.faults.befalling(parameters)
        if fault is not None:
            _refuse(fault)
            if fault.kind is FaultKind.IGNORED:
                return True  # type: ignore[return-value]  # a deletion's
        answer = work()
        if fault is not None and fault.kind is FaultKind.STALE:
            stale: T = self._stale.get(parameters["Action"], [])
            return stale
        self._stale[parameters["Action"]] = copy.copy(answer)
        if fault is not None and fault.kind is FaultKind.ACTED:
            raise LibcloudError("Server Error. Status code: 500.")
        if fault is not None and fault.kind is FaultKind.LOST:
            raise requests.exceptions.ConnectionError("the connection was closed")
        return answer

    async def _answer(self, request: Any) -> Answer:
        raise NotImplementedError("the driver has no HTTP")


def _refuse(fault: Fault) -> None:
    """Raise the error of a call that had no effect, as one driver or another raises it."""
    match fault.kind:
        case FaultKind.THROTTLE:
            raise RateLimitReachedError(headers={"retry-after": f"{fault.retry_after:g}"})
        case FaultKind.ERROR:
            raise BaseHTTPError(503, "Service Unavailable")
        case FaultKind.QUOTA:
            raise Exception("The limit of devices is reached (code: 422)")
        case FaultKind.CAPACITY:
            raise Exception("The plan is not available in this location (code: 422)")
        case FaultKind.UNKNOWN:
            raise BaseHTTPError(404, "no such node")
        case FaultKind.REVOKED:
            raise InvalidCredsError("Unable to authenticate you.")
