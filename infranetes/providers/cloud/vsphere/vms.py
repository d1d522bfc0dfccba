# SPDX-License-Identifier: Apache-2.0
"""Which VMs in the folder are ours, and their states.

A VM is cloned, and powered on by vCenter. So a VM that is off either has never run, because vCenter could not
power it on or was interrupted, and is powered on when it is seen; or it has run and ended.

power  ever powered on            state
off    it is still being cloned   PENDING
off    no: it is powered on now   PENDING
off    no, and vCenter refuses    ENDED, with vCenter's reason
on     yes                        PENDING, and RUNNING once it has an address
off    yes, a moment ago          PENDING, as its state may follow vCenter's event
off    yes                        ENDED
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Mapping, Sequence, Set
from ipaddress import IPv4Address, ip_address, ip_network

import attrs
from libcloud.compute.types import NodeState
from pyVmomi import vmodl

from infranetes.providers.cloud.interface import CLUSTER, NODE, SANDBOX, TOKEN, CloudVM, ErrorKind
from infranetes.providers.cloud.vsphere import specs
from infranetes.providers.cloud.vsphere.addresses import Leases
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.ends import Ends
from infranetes.providers.cloud.vsphere.launches import Launches, VmLaunch
from infranetes.providers.cloud.vsphere.pyvmomi_types import Entity, Node
from infranetes.providers.interface import InstanceState, ProviderContext

_NAME = re.compile(r"infranetes-([0-9a-f]{12})-([0-9a-f]{32})-[0-9]{1,4}")


@attrs.frozen
class Tags:
    """Our tags in a VM's extraConfig, which never change."""

    name: str
    cluster: str
    node: str
    sandbox_id: str
    token: str
    created_at: float
    address: str = ""  # the address that the node has given it
    console: bool = False  # whether a file has its console


class VMs:
    """The VMs of one cluster and node in one folder. Methods are called in threads.

    :param addresses: the network of pods' addresses; "": any.
    :param leases: of addresses that the node gives; None: DHCP gives all."""

    def __init__(
        self, context: ProviderContext, launches: Launches, addresses: str, leases: Leases | None = None
    ) -> None:
        self._leases = leases
        self._cluster, self._node = context.cluster, context.owner
        owner = hashlib.sha256(f"{context.cluster}\0{context.owner}".encode()).hexdigest()[:12]
        self.prefix = f"infranetes-{owner}-"
        self._launches = launches
        self._range = ip_network(addresses) if addresses else None
        self._lock = threading.Lock()
        self._tags: dict[str, Tags] = {}  # by the VM's id at vCenter
        self._ids: dict[str, str] = {}  # by the VM's name: its id at vCenter
        self._ran: set[str] = set()  # names of VMs that were powered on
        self.ends = Ends()

    def name(self, token: str, number: int) -> str:
        """Return a VM's name. Names are unique in a folder, so it is the idempotency key, too."""
        return f"{self.prefix}{token}-{number}"

    def is_name(self, text: str) -> bool:
        """Whether this may be the name of a VM of ours."""
        return _NAME.fullmatch(text) is not None and text.startswith(self.prefix)

    # ---- Finding

    def _thd_list(self, driver: Driver, folder: Entity) -> list[CloudVM]:
        """Return all VMs of ours, including those that are being cloned."""
        before, cloned, taken = self.have_run(), self._launches.cloned(), self.ends.taken()
        running, now = self._launches.running(), time.monotonic()
        listed, tasks = driver.ex_list_with_tasks(folder, [each.task for each in running])
        self._launches.record({id: each for id, each in tasks.items() if each[1] is not None}, now)
        nodes = self._thd_ours_among(driver, listed)
        for name in taken - nodes.keys():
            self._thd_forget(name)
        for name in cloned - nodes.keys():  # the VM is gone again
            self._launches.forget(name)
        self._thd_record_addresses(nodes)
        vms = [self._thd_vm(driver, name, node, before) for name, node in nodes.items()]
        with self._lock:
            self._ran &= set(nodes)
        # A launch that has ended well may have done so after its VM was read: the next list tells the VM's
        # state.
        self._launches.record(tasks, now)
        missing = [launch for launch in self._launches.all() if launch.name not in nodes]
        return vms + [launching_vm(launch) for launch in missing]

    def _thd_record_addresses(self, nodes: Mapping[str, Node]) -> None:
        """Record the addresses that VMs were given, and those that they report, which DHCP may have given."""
        if self._leases is None:
            return
        have, taken = {}, self.ends.taken()
        for name, node in nodes.items():
            if name in taken:
                continue  # the VM is off for good, and has given its address back
            texts = [self._given(node), self._address(node)]
            have[name] = {IPv4Address(each) for each in texts if each and ":" not in each}
        self._leases._thd_record_list(have, {launch.name for launch in self._launches.all()})

    def _given(self, node: Node) -> str:
        tags = self._tags.get(node.id)
        return tags.address if tags is not None else ""

    def _thd_get(self, driver: Driver, folder: Entity, name: str) -> Node | None:
        """Return a VM of ours by its original name, even if it was renamed."""
        node = driver.ex_get_node(folder, name)
        if node is not None:
            self._thd_read_tags(driver, [node])
            if self._name_of(node) == name:
                with self._lock:
                    self._ids[name] = node.id
                return node
        return self._thd_ours(driver, folder).get(name)

    def _thd_ours(self, driver: Driver, folder: Entity) -> dict[str, Node]:
        """Return our VMs in the folder by their original names."""
        return self._thd_ours_among(driver, driver.list_nodes(folder))

    def _thd_ours_among(self, driver: Driver, nodes: Sequence[Node]) -> dict[str, Node]:
        """Return our VMs by their original names. :param nodes: all VMs in the folder."""
        self._thd_read_tags(driver, nodes)
        ids = {node.id for node in nodes}
        with self._lock:
            self._tags = {id: tags for id, tags in self._tags.items() if id in ids}
        ours: dict[str, Node] = {}
        # A clone that a person made of our VM has its tags too, so the VM whose name is the original one
        # comes first.
        for node in sorted(nodes, key=lambda node: node.name != self._name_of(node)):
            name = self._name_of(node)
            if name:
                ours.setdefault(name, node)
        with self._lock:
            self._ids = {name: node.id for name, node in ours.items()}
        return ours

    def id_of(self, name: str) -> str:
        """Return the id at vCenter of a VM that was seen; "": it was not."""
        with self._lock:
            return self._ids.get(name, "")

    def given_to(self, name: str) -> str:
        """Return the address that the node has given a VM that was seen; "": none."""
        with self._lock:
            tags = self._tags.get(self._ids.get(name, ""))
        return tags.address if tags is not None else ""

    def has_console(self, name: str) -> bool:
        """Return whether a VM that was seen has a file with its console."""
        with self._lock:
            tags = self._tags.get(self._ids.get(name, ""))
        return tags is not None and tags.console

    def is_there(self, name: str) -> bool:
        """Return whether there is a VM, as far as is known, or may soon be one."""
        return bool(self.id_of(name)) or self._launches.get(name) is not None

    def forget_id(self, name: str) -> None:
        """Forget the id of a VM, as vCenter has none of that id."""
        with self._lock:
            self._ids.pop(name, None)

    def _name_of(self, node: Node) -> str:
        """Return the original name of a VM of ours; "": it is not ours."""
        tags = self._tags.get(node.id)
        if tags is None:  # the VM is being cloned, and has nothing but its name
            return node.name if self.is_name(node.name) else ""
        is_ours = (tags.cluster, tags.node) == (self._cluster, self._node)
        return tags.name if is_ours and self.is_name(tags.name) else ""

    def _thd_read_tags(self, driver: Driver, nodes: Sequence[Node]) -> None:
        """Read the tags of VMs that were not seen before, unless they were just launched. Until the agent
        erases the identity, it is beside the tags, so they are not read with every list."""
        with self._lock:
            for node in nodes:
                launch = self._launches.get(node.name)
                if launch is not None and launch.request is not None and node.id not in self._tags:
                    self._tags[node.id] = self._tags_of(launch)
            new = [node for node in nodes if node.id not in self._tags]
        if not new:
            return
        try:
            read = dict(driver.ex_extra_config(node.extra["vm"] for node in new))
        except vmodl.fault.ManagedObjectNotFound:
            if len(new) > 1:
                for node in new:  # one of them is gone, so each is read by itself
                    self._thd_read_tags(driver, [node])
            return
        for node in new:
            tags = _tags_in(read[node.id]) if node.id in read else None
            # A new clone may still show its template's extraConfig.
            if tags is not None and (tags.name or not self.is_name(node.name)):
                with self._lock:
                    self._tags[node.id] = tags
                    if read[node.id].get(specs.WAITS) == "true":
                        self._ran.add(tags.name)

    def _tags_of(self, launch: VmLaunch) -> Tags:
        """Return the tags with which a VM is cloned."""
        return Tags(
            name=launch.name,
            cluster=self._cluster,
            node=self._node,
            sandbox_id=launch.sandbox_id,
            token=token_of(launch.name),
            created_at=launch.created_at,
            address=launch.address,
            console=launch.console,
        )

    # ---- States

    def have_run(self) -> Set[str]:
        """Return the names of VMs that are known to have been powered on."""
        with self._lock:
            return frozenset(self._ran)

    def _thd_vm(self, driver: Driver, name: str, node: Node, before: Set[str]) -> CloudVM:
        """Return a VM of ours, and power it on if it never was.

        :param before: `have_run` from before `node` was read, as other threads power VMs on."""
        tags = self._tags.get(node.id)
        state, detail = self._thd_state(driver, name, node, before)
        launch = self._launches.get(name)
        is_off = state is InstanceState.ENDED and node.state is NodeState.STOPPED and launch is None
        address = self._address(node) if node.state is NodeState.RUNNING else ""
        return CloudVM(
            id=name,
            token=token_of(name),
            sandbox_id=tags.sandbox_id if tags is not None else "",
            state=InstanceState.RUNNING if address else state,
            private_address=address,
            created_at=tags.created_at if tags is not None else 0.0,
            size=_size(node),
            detail=detail,
            halted=is_off and name not in self.ends,
            failed=node.state is NodeState.SUSPENDED or (launch is not None and launch.has_failed),
        )

    def _thd_state(
        self, driver: Driver, name: str, node: Node, before: Set[str]
    ) -> tuple[InstanceState, str]:
        if node.state is NodeState.RUNNING:
            self._record_run(name)
            self._launches.forget(name)
            return InstanceState.PENDING, ""
        launch = self._launches.get(name)
        if name in before or node.state is NodeState.SUSPENDED:
            suspended = node.state is NodeState.SUSPENDED
            return InstanceState.ENDED, "the VM is suspended" if suspended else "the VM is off"
        if launch is None or (not launch.running and _may_be_powered_on(launch)):
            if node.id not in self._tags or name in self.ends:
                return InstanceState.PENDING, ""
            if self._thd_has_run(driver, name, node):
                self._launches.forget(name)
                if driver.ex_is_on(node) or not driver.ex_has_ended(node):
                    return InstanceState.PENDING, ""  # it was, or is being, powered on; the next look decides
                return InstanceState.ENDED, "the VM is off"
            launch = self._thd_power_on(driver, name, node)
        if not launch.running and launch.has_failed:
            return InstanceState.ENDED, f"the VM can't be powered on: {launch.fault}"
        return InstanceState.PENDING, ""

    def _thd_has_run(self, driver: Driver, name: str, node: Node) -> bool:
        if name not in self._ran and driver.ex_has_run(node):
            self._record_run(name)
        return name in self._ran

    def _thd_power_on(self, driver: Driver, name: str, node: Node) -> VmLaunch:
        """Power a VM on for the first time."""
        tags = self._tags[node.id]
        launch = VmLaunch(name, tags.sandbox_id, tags.created_at, _size(node), address=tags.address)
        fault = self._launches._thd_begin(launch, lambda: driver.start_node(node))
        if fault is not None and fault.kind is not ErrorKind.TRANSIENT:
            # A transient fault means that the VM is still being cloned, or already on.
            launch.fault = fault
            self._launches.put(launch)
        return launch

    def _record_run(self, name: str) -> None:
        with self._lock:
            self._ran.add(name)

    def _thd_free(self, name: str) -> None:
        """Free the address of a VM that is off and whose deletion vCenter has taken."""
        if self._leases is not None:
            self._leases._thd_give_back(name)
        self._launches.forget(name)

    def _thd_forget(self, name: str) -> None:
        """Forget a VM that is gone for good, and free its address."""
        self._thd_free(name)
        self.ends.forget(name)
        with self._lock:
            self._ids.pop(name, None)
            self._ran.discard(name)

    def _address(self, node: Node) -> str:
        """Return the pod's address by VMware Tools: that of a network card, not of a bridge in the guest."""
        nics, given = node.extra["cards"], self._given(node)
        of_cards = [text for nic in nics if (nic.deviceConfigId or 0) > 0 for text in nic.ipAddress or []]
        reported = of_cards if nics else node.private_ips
        for text in sorted(reported, key=lambda text: ":" in text):  # IPv4 first
            try:
                address = ip_address(text)
            except ValueError:
                continue
            if address.is_link_local or address.is_unspecified or address.is_multicast:
                continue
            if str(address) == given or (not given and (self._range is None or address in self._range)):
                return str(address)
        return ""


def _may_be_powered_on(launch: VmLaunch) -> bool:
    """Whether a VM whose launch has ended may run once it is powered on."""
    return launch.fault is None or (launch.request is not None and launch.fault.kind is ErrorKind.TRANSIENT)


def launching_vm(launch: VmLaunch) -> CloudVM:
    """Return a VM that the inventory does not show yet, or never will."""
    return CloudVM(
        id=launch.name,
        token=token_of(launch.name),
        sandbox_id=launch.sandbox_id,
        state=InstanceState.ENDED if launch.has_failed else InstanceState.PENDING,
        created_at=launch.created_at,
        size=launch.size,
        detail=str(launch.fault or ""),
        failed=launch.has_failed,
    )


def _tags_in(extra: dict[str, str]) -> Tags:
    try:
        created = float(extra.get(specs.CREATED, "0"))
    except ValueError:
        created = 0.0
    return Tags(
        name=extra.get(specs.NAME, ""),
        cluster=extra.get(CLUSTER, ""),
        node=extra.get(NODE, ""),
        sandbox_id=extra.get(SANDBOX, ""),
        token=extra.get(TOKEN, ""),
        created_at=created,
        address=_ipv4(extra.get(specs.ADDRESS, "")),
        console=extra.get(specs.CONSOLE) == "true",
    )


def _ipv4(text: str) -> str:
    try:
        return str(IPv4Address(text))
    except ValueError:
        return ""


def token_of(name: str) -> str:
    """Return the token in the name of a VM of ours."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return match[2]


def _size(node: Node) -> str:
    return f"{node.extra['cpus']}cpu-{node.extra['memory_mib']}mib"
