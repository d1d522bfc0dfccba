# SPDX-License-Identifier: Apache-2.0
"""The interface that each cloud implements; `provider.CloudProvider` is common to all clouds.

A cloud is a small class of blocking methods named `_thd_…`. Each runs in one of a bounded number of threads
with a libcloud driver that no other call uses meanwhile. Retries, deadlines, rate limits and circuit breaking
are done by `calls.Calls`; what becomes of failed launches and unwanted VMs by `CloudProvider`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import attrs

from infranetes.providers.address_ranges import AddressRange
from infranetes.providers.annotations import Wishes
from infranetes.providers.confidential import Confidential
from infranetes.providers.interface import InstanceState

# The names of the tags on every VM, disk and address of ours. They are valid as tags, labels and attributes
# of every cloud.
CLUSTER, NODE, SANDBOX, TOKEN = (
    "infranetes-cluster",
    "infranetes-node",
    "infranetes-sandbox",
    "infranetes-token",
)
ADDRESS = "infranetes-address"  # a VM's tag: the elastic address that it is to get

D = TypeVar("D")  # a cloud's driver
D_contra = TypeVar("D_contra", contravariant=True)  # likewise


class ErrorKind(enum.Enum):
    """The kinds of failures, by what can be done about them."""

    THROTTLED = "throttled"  # not done; ask more slowly
    TRANSIENT = "transient"  # may or may not have been done; the same call again is harmless
    CAPACITY = "capacity"  # not done; another size or zone may be available
    QUOTA = "quota"  # not done; a limit has to be raised, or pods removed
    FULL_ZONE = "full zone"  # not done; the zone has room for no size, but another zone may have
    FAMILY_QUOTA = "family quota"  # as QUOTA, but a size with another `Offer.quota` may be available
    CREDENTIALS = "credentials"  # not done; our credentials or permissions are refused
    CONFLICT = "conflict"  # the token was used for a different request: the VM exists
    STATE = "state"  # not done; a disk or VM is in a state that does not allow it, or out of reach
    NOT_FOUND = "not found"  # nothing has this id
    INVALID = "invalid"  # can never succeed as requested
    UNEXPECTED = "unexpected"  # a bug of ours, or an answer that makes no sense


REFUSALS = (ErrorKind.CAPACITY, ErrorKind.FULL_ZONE, ErrorKind.FAMILY_QUOTA, ErrorKind.QUOTA)
"""The kinds of failures of a launch that another attempt may help against. Nothing was launched."""


class CloudError(Exception):
    """A call that failed.

    :param message: for people; never holds a secret.
    :param retry_after: seconds for which the cloud asks us not to call.
    :param unasked: the cloud was not called, as there were no credentials.
    """

    def __init__(
        self, kind: ErrorKind, message: str, retry_after: float = 0.0, *, unasked: bool = False
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after
        self.unasked = unasked


class Action(enum.Enum):
    """The kinds of calls that clouds count and limit separately."""

    LAUNCH = "launches"
    DESTROY = "ends of VMs"
    CHANGE = "other changes"
    LOOK = "looks"


@attrs.frozen
class Rate:
    """The rate at which a cloud serves calls. :ivar burst: the calls that it serves at once after a rest."""

    per_second: float
    burst: float


@attrs.frozen
class Offer:
    """A size of VM that the cloud sells."""

    name: str
    cpu_millis: int  # thousandths of a CPU that it can sustain; see `shared_cpus`
    memory_bytes: int
    price: float | None = None  # per hour, in the currency of the cloud's price list
    gpus: int = 0
    architecture: str = "x86_64"
    shared_cpus: int = 0  # the CPUs of a size that can sustain only a share of them; 0: its CPUs are its own
    zones: tuple[str, ...] = ()  # the cloud's zones that offer it; empty: all, or the cloud does not tell
    priced_by: str = ""  # the source of the price, for people
    quota: str = ""  # the name of the limit that it shares with other sizes of its family; "": not known
    confidential: tuple[Confidential, ...] = ()  # what its VMs can have
    always_confidential: bool = False  # whether it makes no other VMs


@attrs.frozen
class LaunchRequest:
    """A request for one VM."""

    token: str
    sandbox_id: str
    number: int  # how many VMs of this token were destroyed: each VM needs an idempotency key of its own
    tags: Mapping[str, str]
    # The document for the agent, with a private key; of an image without our agent, its user-data.
    identity: bytes = attrs.field(repr=False)
    wishes: Wishes
    agentless: bool = False  # whether the image is without our agent
    image: str = ""  # "": the configured one
    size: str = ""
    zone: str = ""  # one of `Cloud.zones`


@attrs.frozen
class CloudVM:
    """A VM as the cloud describes it."""

    id: str
    token: str
    sandbox_id: str
    state: InstanceState
    private_address: str = ""
    public_address: str = ""
    created_at: float = 0.0  # seconds since 1970 UTC
    size: str = ""
    wanted_address: str = ""  # the elastic address that it is to get, as in `Wishes.elastic_address`
    detail: str = ""  # why it ended, for people
    operation: str = ""  # the cloud's operation of its launch, while that is still running and may fail
    # Whether lists show the VM as ended if the operation fails, so that it need not be polled first.
    operation_listed: bool = False
    # The zone whose volumes it can be given, as `VmRequest.zone`; "": the cloud has no zones.
    zone: str = ""
    gone: bool = False  # it no longer exists, though the cloud still shows it for a while
    failed: bool = False  # it has ended by an error of the cloud's
    # Its state is ENDED because it is stopped, or suspended: the cloud keeps it, and could start it again.
    halted: bool = False
    halting: bool = False  # likewise, it is being stopped, or deleted


@attrs.frozen
class Leftover:
    """An address or disk of ours that no VM uses."""

    id: str
    kind: str  # "address", "disk" or, at Azure, "network interface"
    token: str


@attrs.frozen
class MachineImage:
    """An image of a whole machine in the cloud's catalogue."""

    id: str  # as in `LaunchRequest.image`
    name: str
    version: str
    size: int = 0  # bytes, 0: not known


@runtime_checkable
class Cloud(Protocol[D]):
    """A cloud, for one cluster and node. Methods named `_thd_…` run in threads and may raise any error."""

    name: str  # the provider's name, such as `aws`
    location: str  # for people, such as `aws eu-west-1`
    rates: Mapping[Action, Rate]  # the limits that the cloud documents for accounts without a raised limit
    # How many VMs are better looked at one by one than by a list, in calls and in what limits them; 0: none.
    looks_per_list: int

    @property
    def offers(self) -> Sequence[Offer]:
        """The sizes that the cloud sells where this node makes VMs; complete once it has started."""

    def is_id(self, text: str) -> bool:
        """Return whether a text could be a VM's id. Nothing else is ever sent to the cloud as one."""

    def check_wishes(self, wishes: Wishes) -> None:
        """Check annotations. :raise InvalidArgument: this cloud can't serve one; names it."""

    def zones(self, wishes: Wishes, within: str = "") -> Sequence[str]:
        """Zones, subnets or resource pools to try in this order; [""] where there is no choice.

        :param within: where the VM has to be, as `VmRequest.zone`.
        :raise FailedPrecondition: none of them is there; says which are."""

    def classify(self, error: Exception) -> CloudError | None:
        """Return the meaning of an error of this cloud's own; None: `errors.classify` decides."""

    def _thd_connect(self, timeout: float) -> D:
        """Return a driver for this thread. Called again when credentials changed or the last one failed.

        :param timeout: seconds that the driver may wait for the network."""

    def _thd_disconnect(self, driver: D) -> None:
        """Close the driver's connections."""

    def _thd_is_current(self, driver: D) -> bool:
        """Return whether the driver's credentials are still the current ones."""

    def _thd_check(self, driver: D) -> str:
        """Check that what the configuration names exists. Returns the architecture of its image.

        :raise FailedPrecondition: what is missing, and what to do."""

    def _thd_launch(self, driver: D, request: LaunchRequest) -> CloudVM:
        """Ask for a VM. Idempotent: the same request again returns the same VM."""

    def _thd_poll_launch(self, driver: D, vm: CloudVM) -> CloudVM:
        """Look at a launched VM's `operation`: the VM is returned without it once it has succeeded. An
        operation that failed is raised as if the launch itself had failed."""

    def _thd_find(self, driver: D, token: str) -> list[CloudVM]:
        """Our VMs with this token, including ended ones that the cloud still shows."""

    def _thd_list(self, driver: D) -> list[CloudVM]:
        """Return all VMs of ours, including ended ones that the cloud still shows."""

    def _thd_survey(self, driver: D) -> list[CloudVM]:
        """Return what `_thd_list` does with as few of the cloud's scarce calls as there can be: a VM that has
        run may be returned as it was, so that its end is not seen."""

    def _thd_get(self, driver: D, id: str) -> CloudVM | None:
        """Return a VM, if it exists and is ours.

        :raise CloudError: `ErrorKind.STATE`: the cloud can't tell of this VM now, and can of others."""

    def _thd_assign_address(self, driver: D, vm: CloudVM) -> None:
        """Give a running VM its `wanted_address`. Idempotent."""

    def _thd_destroy(self, driver: D, vm: CloudVM) -> bool:
        """Ask for a VM's end, and release what it held. Returns whether the cloud has taken that: the VM ends
        without another call. Called again until it has, and later if the VM is still there. Idempotent.

        :raise CloudError: `ErrorKind.NOT_FOUND`: the VM is gone, or too new to be known everywhere. The
            caller knows which, and calls `_thd_release_resources` if it is gone."""

    def _thd_release_resources(self, driver: D, vm: CloudVM) -> None:
        """Release what a VM that no longer exists held."""

    def _thd_leftovers(self, driver: D) -> list[Leftover]:
        """Addresses and disks of ours that no VM uses."""

    def _thd_release(self, driver: D, leftover: Leftover) -> None:
        """Release one address or disk. Idempotent."""

    def _thd_console_output(self, driver: D, id: str) -> str:
        """Return the end of the VM's console output; "" where there is none."""

    def _thd_find_image(self, driver: D, name: str, version: str) -> MachineImage:
        """Return the newest image of ours with that name and version.

        :raise CloudError: `ErrorKind.NOT_FOUND`: there is none; says what was looked for."""

    def _thd_has_image(self, driver: D, id: str) -> bool:
        """Return whether an image that was found before still exists."""


@runtime_checkable
class TellsRanges(Protocol[D_contra]):
    """Also provided by a `Cloud` that tells from which networks its VMs get their addresses."""

    def _thd_ranges(self, driver: D_contra) -> Sequence[AddressRange]:
        """Return the ranges of the configured networks. Called after `_thd_check`."""


@runtime_checkable
class GuestCloud(Cloud[D], Protocol[D]):
    """A cloud whose VMs may also have no agent of ours. Their user-data is `LaunchRequest.identity`.

    :ivar user_data_bytes: how many the cloud takes."""

    user_data_bytes: int

    def _thd_power_off(self, driver: D, id: str) -> None:
        """Ask a VM's guest to power off, as by its power button. Idempotent. It stays until it is destroyed.

        :raise CloudError: `ErrorKind.STATE`: it does not run, or another change is under way."""

    def _thd_console_log(self, driver: D, id: str) -> bytes:
        """Return what a VM wrote to its serial port last, as much as the cloud has, as it wrote it."""


@runtime_checkable
class BillsStoppedVms(Protocol[D_contra]):
    """Also provided by a `GuestCloud` that bills a VM which is off as if it ran."""

    def _thd_deallocate(self, driver: D_contra, id: str) -> None:
        """Have a VM that is off, and stays until it is destroyed, cost its disk alone. Idempotent."""


@runtime_checkable
class StoppingCloud(Cloud[D], Protocol[D]):
    """A cloud whose VMs can be stopped, and started again with another identity."""

    def check_stoppable(self, wishes: Wishes) -> None:
        """Check that VMs with these wishes can be stopped. :raise InvalidArgument: they can't; says why."""

    def _thd_stop(self, driver: D, vm: CloudVM) -> None:
        """Ask for the stop of a VM that runs; lists show it as `CloudVM.halted` then. Idempotent.

        :raise CloudError: `ErrorKind.INVALID`: it can't be stopped; says why."""

    def _thd_take_identity(self, driver: D, vm: CloudVM) -> bool:
        """Remove the identity that a halted VM was launched with from all that the cloud has. Idempotent.

        :return: whether it is gone. If not, it is asked again soon."""

    def _thd_start(self, driver: D, vm: CloudVM, identity: bytes) -> CloudVM:
        """Give a halted VM an identity, and ask for its start. Returns the VM with the operation of that, if
        the cloud has one; see `_thd_poll_launch`.

        :raise CloudError: one of REFUSALS: the cloud has no room for it. `ErrorKind.STATE`: the VM is not
            halted, or another change of it is under way: it is asked again soon."""
