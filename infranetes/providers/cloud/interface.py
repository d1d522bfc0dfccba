"""What one cloud has to say for itself; all that clouds have in common is around it.

A cloud is a small class of blocking methods named `_thd_…`. Each runs in one of a bounded number of
threads with that thread's own libcloud driver and asks the cloud little: retries, deadlines, the rate and
the circuit are `calls.Calls`' business, ids that are no longer wanted are `provider.CloudProvider`'s.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from zope.interface import Attribute, Interface

from infranetes.providers.cloud.annotations import Wishes
from infranetes.providers.interface import InstanceState

# The names of the tags that every VM, disk and address of ours has. They are fit for each cloud's
# tags, labels and attributes.
CLUSTER, NODE, SANDBOX, TOKEN = (
    "infranetes-cluster",
    "infranetes-node",
    "infranetes-sandbox",
    "infranetes-token",
)
ADDRESS = "infranetes-address"  # on a VM: the address of its own that it is to have


class Trouble(enum.Enum):
    """What kind of a failure it was, and so what to do about it."""

    THROTTLED = "throttled"  # not done, ask more slowly
    PASSING = "passing"  # may or may not have been done; the same again is harmless
    CAPACITY = "capacity"  # not done; another type or place may be had
    QUOTA = "quota"  # not done; a person has to raise a limit, or pods have to go
    CREDENTIALS = "credentials"  # not done; who we are, or what we may do, is refused
    CONFLICT = "conflict"  # the token is taken by a request of other words: the VM is there
    MISSING = "missing"  # nothing has this id
    INVALID = "invalid"  # can never be done as it is worded
    BROKEN = "broken"  # a fault of ours, or an answer that makes no sense


class CloudError(Exception):
    """A call that failed.

    :param words: for people; never a secret.
    :param retry_after: seconds that the cloud asks us to stay away for.
    """

    def __init__(self, trouble: Trouble, words: str, retry_after: float = 0.0) -> None:
        super().__init__(words)
        self.trouble = trouble
        self.retry_after = retry_after


@attrs.frozen
class Offer:
    """One size of VM that the cloud has."""

    name: str
    cpu_millis: int
    memory_bytes: int
    price: float | None = None  # of an hour, in the cloud's list's currency
    gpus: int = 0
    architecture: str = "x86_64"


@attrs.frozen
class Order:
    """One VM, as it is asked for."""

    token: str
    sandbox_id: str
    number: int  # how many VMs of this token are gone: an idempotency key serves for one VM
    tags: Mapping[str, str]
    identity: bytes = attrs.field(repr=False)  # the document for the agent, with a private key
    wishes: Wishes
    image: str = ""  # "": the configuration's
    size: str = ""
    place: str = ""  # one of `places`


@attrs.frozen
class Found:
    """A VM as the cloud tells of it."""

    id: str
    token: str
    sandbox_id: str
    state: InstanceState
    private_address: str = ""
    public_address: str = ""
    created_at: float = 0.0  # seconds since 1970 UTC
    size: str = ""
    wanted_address: str = ""  # the address of its own that it is to have, as in `Wishes.elastic_address`
    detail: str = ""  # why it ended, for people
    task: str = ""  # of a launch: what the cloud still does for it, and may end with a refusal


@attrs.frozen
class Leftover:
    """An address or a disk of ours that is in no VM's use."""

    id: str
    kind: str  # "address" or "disk"
    token: str


@attrs.frozen
class MachineImage:
    """An image of a whole machine in the cloud's catalogue."""

    id: str  # as `Order.image`
    name: str
    version: str
    size: int = 0  # bytes, 0: not known


class ICloud(Interface):
    """One cloud, for one cluster and node. Methods are called in threads and raise what libcloud does."""

    name = Attribute("The provider's name: `aws`, ... (str)")
    place = Attribute("Where it is, for people: `aws eu-west-1` (str)")
    offers = Attribute("The cloud's own list of sizes, there once `_thd_check` is done (Sequence[Offer])")

    def is_id(text: str) -> bool:
        """Whether this could be a VM's id. Nothing else is ever sent to the cloud as one."""

    def check_wishes(wishes: Wishes) -> None:
        """:raise InvalidArgument: an annotation that this cloud can't serve; names it."""

    def places(wishes: Wishes) -> Sequence[str]:
        """Subnets, zones or hosts to be tried one after the other; [""] where there is no choice."""

    def judge(error: Exception) -> CloudError | None:
        """What an error means that is this cloud's own way; None: nothing special."""

    def _thd_connect(timeout: float) -> Any:
        """A driver for this thread. Called again when credentials have changed, or the last one failed.

        :param timeout: seconds that the driver may wait for the network."""

    def _thd_is_current(driver: Any) -> bool:
        """Whether `driver` has the credentials of now."""

    def _thd_check(driver: Any) -> str:
        """Whether what the configuration names is there; the architecture of its image.

        :raise FailedPrecondition: what lacks, and what to do."""

    def _thd_launch(driver: Any, order: Order) -> Found:
        """Ask for the VM. The same order again is the same VM."""

    def _thd_settle(driver: Any, found: Found) -> Found:
        """A launched VM with a `task`: the same again while that goes on, without it once that is done.
        What the task ends with is raised as if the launch had failed with it."""

    def _thd_find(driver: Any, token: str) -> list[Found]:
        """The VMs of ours with this token, ended ones too where the cloud still shows them."""

    def _thd_list(driver: Any) -> list[Found]:
        """All VMs of ours, ended ones too where the cloud still shows them."""

    def _thd_get(driver: Any, id: str) -> Found | None:
        """One VM, if it is there and ours."""

    def _thd_address(driver: Any, found: Found) -> None:
        """Give a running VM the address of its own that it is to have. Twice is once."""

    def _thd_destroy(driver: Any, found: Found) -> bool:
        """End the VM and, once it has ended, release what it held; whether all of that is done.
        Asked again until it is. A VM that is not there is `Trouble.MISSING`: who asks knows whether it
        is gone or too new to be known everywhere; `_thd_release_all` is asked then."""

    def _thd_release_all(driver: Any, found: Found) -> None:
        """Release what a VM held that is no longer there."""

    def _thd_leftovers(driver: Any) -> list[Leftover]:
        """Addresses and disks of ours that no VM uses."""

    def _thd_release(driver: Any, leftover: Leftover) -> None:
        """Give one back. Gone already: nothing to do."""

    def _thd_console(driver: Any, id: str) -> str:
        """The end of the VM's console, or "" where there is none."""

    def _thd_find_image(driver: Any, name: str, version: str) -> MachineImage | None:
        """The newest image of ours (owners from the settings) with that name and version.

        :raise CloudError: `Trouble.MISSING`, in place of None: there is none, with what was looked for."""

    def _thd_has_image(driver: Any, id: str) -> bool:
        """Whether an image that was found before is still there."""
