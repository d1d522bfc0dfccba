"""Which VMs are ours, and what is to be said of each.

A VM is cloned without power, then powered on. So one without power has either never run, because its launch
was broken off: it is powered on when it is seen; or it has run, and has ended.

power  has ever run              state
off    its clone is being made   PENDING
off    no: it is powered on now  PENDING
off    no: it can't be           ENDED, with vCenter's reason
on     -                         PENDING, and RUNNING once it has an address
off    yes                       ENDED
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence, Set
from ipaddress import ip_address, ip_network
from typing import Any

import attrs
from libcloud.compute.base import Node
from libcloud.compute.types import NodeState
from pyVmomi import vmodl

from infranetes.providers.cloud.interface import CLUSTER, NODE, SANDBOX, TOKEN, Found, Trouble
from infranetes.providers.cloud.vsphere import specs
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.launches import Launch, Launches
from infranetes.providers.interface import InstanceState, ProviderContext

_NAME = re.compile(r"infranetes-([0-9a-f]{12})-([0-9a-f]{32})-[0-9]{1,4}")


@attrs.frozen
class Marks:
    """What a VM's extraConfig says of it. It never changes."""

    name: str
    cluster: str
    node: str
    sandbox_id: str
    token: str
    created_at: float


class Vms:
    """The VMs of one cluster and node in one folder. Methods are called in threads.

    :param addresses: the network that pods' addresses are of; "": any."""

    def __init__(self, context: ProviderContext, launches: Launches, addresses: str) -> None:
        self._cluster, self._node = context.cluster, context.node
        owner = hashlib.sha256(f"{context.cluster}\0{context.node}".encode()).hexdigest()[:12]
        self._prefix = f"infranetes-{owner}-"
        self._launches = launches
        self._range = ip_network(addresses) if addresses else None
        self._lock = threading.Lock()
        self._marks: dict[str, Marks] = {}  # by the VM's id at vCenter
        self._ran: set[str] = set()  # names of VMs that are known to have run
        self.ending: set[str] = set()  # names of VMs that are being destroyed

    def name(self, token: str, number: int) -> str:
        """A VM's name: whose it is, and its idempotency key, for there are no two of a name in a folder."""
        return f"{self._prefix}{token}-{number}"

    def is_name(self, text: str) -> bool:
        """Whether a VM of ours may be called that."""
        return _NAME.fullmatch(text) is not None and text.startswith(self._prefix)

    # ---- Finding

    def _thd_list(self, driver: Driver, folder: Any) -> list[Found]:
        """All that are ours, and those that are being made."""
        self._launches._thd_look(driver)
        before = self.have_run()
        nodes = self._thd_ours(driver, folder)
        founds = [self.found(driver, name, node, before) for name, node in nodes.items()]
        with self._lock:
            self._ran &= set(nodes)
        missing = [launch for launch in self._launches.all() if launch.name not in nodes]
        return founds + [under_way(launch) for launch in missing]

    def _thd_get(self, driver: Driver, folder: Any, name: str) -> Node | None:
        """A VM of ours by its name, also if it was renamed."""
        node = driver.ex_get_node(folder, name)
        if node is not None:
            self._thd_read_marks(driver, [node])
            if self._name_of(node) == name:
                return node
        return self._thd_ours(driver, folder).get(name)

    def _thd_ours(self, driver: Driver, folder: Any) -> dict[str, Node]:
        """Those in the folder, by the names that they were made with."""
        nodes = driver.list_nodes(folder)
        self._thd_read_marks(driver, nodes)
        ids = {node.id for node in nodes}
        with self._lock:
            self._marks = {id: marks for id, marks in self._marks.items() if id in ids}
        ours: dict[str, Node] = {}
        # Somebody's clone of a VM of ours has its tags too: the one with the name goes first.
        for node in sorted(nodes, key=lambda node: node.name != self._name_of(node)):
            name = self._name_of(node)
            if name:
                ours.setdefault(name, node)
        return ours

    def _name_of(self, node: Node) -> str:
        """The name that a VM of ours was made with; "": it is not ours."""
        marks = self._marks.get(node.id)
        if marks is None:  # it is being made, and has nothing but its name
            return node.name if self.is_name(node.name) else ""
        ours = (marks.cluster, marks.node) == (self._cluster, self._node)
        return marks.name if ours and self.is_name(marks.name) else ""

    def _thd_read_marks(self, driver: Driver, nodes: Sequence[Node]) -> None:
        """Read the tags of VMs that were not seen before. They have the identity beside them until the agent
        has erased it: reading them with every list would carry that about."""
        with self._lock:
            new = [node for node in nodes if node.id not in self._marks]
        if not new:
            return
        try:
            read = dict(driver.ex_extra_config(node.extra["vm"] for node in new))
        except vmodl.fault.ManagedObjectNotFound:
            if len(new) > 1:
                for node in new:  # one of them has gone meanwhile
                    self._thd_read_marks(driver, [node])
            return
        for node in new:
            marks = _marks(read[node.id]) if node.id in read else None
            # A clone may show its template's before it has its own.
            if marks is not None and (marks.name or not self.is_name(node.name)):
                with self._lock:
                    self._marks[node.id] = marks

    # ---- States

    def have_run(self) -> Set[str]:
        """The VMs that are known to have run, by now."""
        with self._lock:
            return frozenset(self._ran)

    def found(self, driver: Driver, name: str, node: Node, before: Set[str]) -> Found:
        """A VM of ours. One that was never powered on is.

        :param before: `have_run` as it was before the VM was looked at: other threads power VMs on."""
        marks = self._marks.get(node.id)
        state, detail = self._thd_state(driver, name, node, before)
        address = self._address(node) if node.state is NodeState.RUNNING else ""
        parts = _NAME.fullmatch(name)
        assert parts is not None
        return Found(
            id=name,
            token=parts[2],
            sandbox_id=marks.sandbox_id if marks is not None else "",
            state=InstanceState.RUNNING if address else state,
            private_address=address,
            created_at=marks.created_at if marks is not None else 0.0,
            size=_size(node),
            detail=detail,
        )

    def _thd_state(
        self, driver: Driver, name: str, node: Node, before: Set[str]
    ) -> tuple[InstanceState, str]:
        if node.state is NodeState.RUNNING:
            self._has_run(name)
            self._launches.forget(name)
            return InstanceState.PENDING, ""
        launch = self._launches.get(name)
        if name in before or node.state is NodeState.SUSPENDED:
            return (
                InstanceState.ENDED,
                "it is suspended" if node.state is NodeState.SUSPENDED else "it is off",
            )
        if launch is not None and launch.running:
            return InstanceState.PENDING, ""
        if launch is None and node.id in self._marks and name not in self.ending:
            if self._thd_has_run(driver, name, node):
                if driver.ex_is_on(node):  # since a moment ago
                    return InstanceState.PENDING, ""
                return InstanceState.ENDED, "it is off"
            launch = self._thd_power_on(driver, name, node)
        if launch is not None and launch.fault is not None:
            return InstanceState.ENDED, f"it can't be powered on: {launch.fault}"
        return InstanceState.PENDING, ""

    def _thd_has_run(self, driver: Driver, name: str, node: Node) -> bool:
        if name not in self._ran and driver.ex_has_run(node):
            self._has_run(name)
        return name in self._ran

    def _thd_power_on(self, driver: Driver, name: str, node: Node) -> Launch:
        """Power a VM on for the first time."""
        marks = self._marks[node.id]
        launch = Launch(name, "", marks.sandbox_id, marks.created_at, _size(node))
        fault = self._launches._thd_begin(driver, launch, lambda: driver.start_node(node))
        if fault is None:
            if not launch.running:
                self._has_run(name)
        elif fault.trouble is not Trouble.PASSING:  # else it is being made, or on: the next look will show
            launch.fault = fault
            self._launches.put(launch)
        return launch

    def _has_run(self, name: str) -> None:
        with self._lock:
            self._ran.add(name)

    def gone(self, name: str) -> None:
        """There is no such VM any more, and will be none."""
        self._launches.forget(name)
        with self._lock:
            self.ending.discard(name)
            self._ran.discard(name)

    def _address(self, node: Node) -> str:
        """The pod's address as VMware Tools tell it: of a card of the VM, and not of a bridge in it."""
        cards = node.extra["cards"]
        told = [text for card in cards if (card.deviceConfigId or 0) > 0 for text in card.ipAddress or []]
        for text in sorted(told if cards else node.private_ips, key=lambda text: ":" in text):  # IPv4 first
            try:
                address = ip_address(text)
            except ValueError:
                continue
            if address.is_link_local or address.is_unspecified or address.is_multicast:
                continue
            if self._range is None or address in self._range:
                return str(address)
        return ""


def under_way(launch: Launch) -> Found:
    """A VM that the inventory does not show yet, or never will."""
    parts = _NAME.fullmatch(launch.name)
    assert parts is not None
    return Found(
        id=launch.name,
        token=parts[2],
        sandbox_id=launch.sandbox_id,
        state=InstanceState.PENDING if launch.fault is None else InstanceState.ENDED,
        created_at=launch.created_at,
        size=launch.size,
        detail=str(launch.fault or ""),
    )


def _marks(extra: dict[str, str]) -> Marks:
    try:
        created = float(extra.get(specs.CREATED, "0"))
    except ValueError:
        created = 0.0
    return Marks(
        name=extra.get(specs.NAME, ""),
        cluster=extra.get(CLUSTER, ""),
        node=extra.get(NODE, ""),
        sandbox_id=extra.get(SANDBOX, ""),
        token=extra.get(TOKEN, ""),
        created_at=created,
    )


def _size(node: Node) -> str:
    return f"{node.extra['cpus']}cpu-{node.extra['memory_mib']}mib"
