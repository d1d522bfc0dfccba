"""What a clone is asked for with."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

import attrs
from pyVmomi import vim

from infranetes.providers.cloud.interface import SANDBOX, CloudError, Order, Trouble
from infranetes.providers.cloud.vsphere import sizes

IDENTITY = "guestinfo.infranetes.identity"  # where vmserver's `metadata` looks
CREATED = "infranetes-created"  # seconds since 1970: what the API tells of that is newer than 6.5
NAME = "infranetes-name"  # the VM's name as it was made: people may rename it
MAX_IDENTITY = 44 * 1024  # bytes: with base64, under the 64 KiB that open-vm-tools reads at once

_Operation = vim.vm.device.VirtualDeviceSpec.Operation
_Card = vim.vm.device.VirtualEthernetCard


@attrs.frozen
class Template:
    """What is known of a template."""

    id: str
    uuid: str
    name: str
    is_template: bool
    snapshot: Any = None  # with one, clones share its disks
    card: Any = None  # its first network card


def clone(name: str, order: Order, template: Template, pool: Any, datastore: Any, network: Any) -> Any:
    """The CloneSpec. What costs money has its tags from the first moment on.

    :param datastore: None: the template's. :param network: a card's backing.
    :raise CloudError: the identity is too large."""
    if len(order.identity) > MAX_IDENTITY:
        raise CloudError(Trouble.INVALID, "the VM's identity is larger than guestinfo may be")
    cpus, mib = sizes.parse(order.size)
    extra = {
        **order.tags,
        NAME: name,
        CREATED: f"{time.time():.3f}",
        IDENTITY: base64.b64encode(order.identity).decode(),
    }
    config = vim.vm.ConfigSpec(
        numCPUs=cpus,
        numCoresPerSocket=1,
        memoryMB=mib,
        annotation=f"Sandbox {order.tags.get(SANDBOX, '')} of Infranetes, which makes and ends this VM",
        extraConfig=_options(extra),
        deviceChange=[_card(template.card, network)],
    )
    where = vim.vm.RelocateSpec(pool=pool)
    if datastore is not None:
        where.datastore = datastore
    spec = vim.vm.CloneSpec(location=where, config=config, template=False, powerOn=False)
    if template.snapshot is not None:
        where.diskMoveType = "createNewChildDiskBacking"
        spec.snapshot = template.snapshot
    return spec


def _options(values: Mapping[str, str]) -> list[Any]:
    return [vim.option.OptionValue(key=key, value=value) for key, value in values.items()]


def _card(old: Any, backing: Any) -> Any:
    """The template's network card, or a new one, at a network."""
    connected = vim.vm.device.VirtualDevice.ConnectInfo(
        startConnected=True, connected=True, allowGuestControl=False
    )
    if old is None:
        card = vim.vm.device.VirtualVmxnet3(
            key=-1, backing=backing, connectable=connected, addressType="generated"
        )
        return vim.vm.device.VirtualDeviceSpec(operation=_Operation.add, device=card)
    card = type(old)(
        key=old.key,
        controllerKey=old.controllerKey,
        unitNumber=old.unitNumber,
        backing=backing,
        connectable=connected,
        addressType="generated",  # each VM has an address of its own
    )
    return vim.vm.device.VirtualDeviceSpec(operation=_Operation.edit, device=card)


def backing(network: Any) -> Any:
    """How a card is at a network: an opaque one, a port group of a distributed switch, or of a host's own."""
    if isinstance(network, vim.dvs.DistributedVirtualPortgroup):
        switch: Any = network.config.distributedVirtualSwitch
        port = vim.dvs.PortConnection(portgroupKey=network.key, switchUuid=switch.uuid)
        return _Card.DistributedVirtualPortBackingInfo(port=port)
    if isinstance(network, vim.OpaqueNetwork):
        summary = network.summary
        return _Card.OpaqueNetworkBackingInfo(
            opaqueNetworkId=summary.opaqueNetworkId, opaqueNetworkType=summary.opaqueNetworkType
        )
    return _Card.NetworkBackingInfo(network=network, deviceName=network.name)
