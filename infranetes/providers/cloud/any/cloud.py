# SPDX-License-Identifier: Apache-2.0
"""Any driver of libcloud's as a `Cloud`.

A node's name says whose it is (`names`), so nothing but `list_nodes` finds it, for a launch too (`intents`).

NodeState                            InstanceState   next
RUNNING                              RUNNING
STOPPED SUSPENDED TERMINATED ERROR   ENDED           unless it was just made, and never seen to run
any other, UNKNOWN too               PENDING         what ran stays RUNNING in the ledger
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from ipaddress import AddressValueError, IPv4Address
from types import MappingProxyType

import attrs
from libcloud.compute.types import NodeState

from infranetes.providers.annotations import Wishes, refuse
from infranetes.providers.cloud.any import credentials, errors, names, sizes
from infranetes.providers.cloud.any.credentials import Session
from infranetes.providers.cloud.any.dialects import find, takes
from infranetes.providers.cloud.any.intents import Intents
from infranetes.providers.cloud.any.libcloud_types import Driver, Named, Node, Size
from infranetes.providers.cloud.any.settings import Settings
from infranetes.providers.cloud.calls.connections import close_session
from infranetes.providers.cloud.calls.errors import classify
from infranetes.providers.cloud.interface import (
    Action,
    CloudError,
    CloudVM,
    ErrorKind,
    LaunchRequest,
    Leftover,
    MachineImage,
    Offer,
    Rate,
)
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.errors import FailedPrecondition

_ENDED = (NodeState.STOPPED, NodeState.SUSPENDED, NodeState.TERMINATED, NodeState.ERROR)
_UNCERTAIN = (ErrorKind.TRANSIENT, ErrorKind.UNEXPECTED)  # the kinds of errors after which a VM may exist
_CREATED = ("created_at", "created", "creation_date")  # keys of `Node.extra`
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PASSWORD_END = "-aA1"  # noqa: S105  what clouds' rules for passwords ask for
_RATES = dict.fromkeys(Action, Rate(1.0, 10.0)) | {Action.LOOK: Rate(2.0, 20.0)}  # bearable everywhere


class AnyCloud:
    """An account at one cloud. :param prices: the administrator's own, by sizes' names."""

    name = "libcloud"
    rates: Mapping[Action, Rate] = _RATES
    looks_per_list = 0

    def __init__(
        self, settings: Settings, context: ProviderContext, prices: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._settings = settings
        self._dialect = settings.dialect
        self._prices = prices
        self._owner = names.owner_of(context.cluster, context.owner)
        self._intents = Intents(context.state_dir / self.name / "intents", settings.settle_seconds)
        self._told: Sequence[Offer] = ()  # with the driver's own prices
        self._sizes: dict[str, Size] = {}  # by their names as offers
        self._places: Sequence[Named] = ()  # the configured locations
        self._nodes: dict[str, Node] = {}  # by id: as they were told last
        self._new: dict[str, float] = {}  # by id: until when a VM counts as starting that never ran
        self.offers: Sequence[Offer] = ()
        self.location = context.located(f"libcloud {settings.driver}")

    def use_prices(self, prices: Mapping[str, float]) -> None:
        """Replace the prices that the administrator has set."""
        self._prices = prices
        self.offers = tuple(sizes.priced(each, prices) for each in self._told)

    def is_id(self, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    def check_wishes(self, wishes: Wishes) -> None:
        wishes.refuse_others(self.location, ("image", "instance_type", "gpus", "region", "set_hostname"))
        where = [*map(_id, self._places), *(str(each.name) for each in self._places)]
        wrong = f"this node makes VMs in {', '.join(self._settings.locations) or 'one location'} only"
        refuse({"region": wrong if wishes.region and wishes.region not in where else ""})

    def zones(self, wishes: Wishes, within: str = "") -> Sequence[str]:
        wanted = [_id(each) for each in self._places if wishes.region in ("", _id(each), each.name)]
        return wanted or [""]

    def classify(self, error: Exception) -> CloudError | None:
        return errors.classify(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Session:
        settings, version = self._settings, credentials.version(self._settings.credentials_file)
        arguments = {**settings.arguments, **credentials._thd_read(settings.credentials_file)}
        try:
            driver: Driver = find(settings.driver)(**arguments)
        except TypeError as error:
            words = f"arguments, credentials_file: the driver {settings.driver} does not take them: {error}"
            raise CloudError(ErrorKind.INVALID, words) from error
        credentials.set_up(driver, settings.endpoint, timeout)
        return Session(driver, version)

    def _thd_is_current(self, driver: Session) -> bool:
        return driver.version == credentials.version(self._settings.credentials_file)

    def _thd_disconnect(self, driver: Session) -> None:
        close_session(driver.driver)

    def _thd_check(self, driver: Session) -> str:
        settings, its = self._settings, driver.driver
        if settings.locations:
            known = its.list_locations()
            self._places = [_found(known, each, "locations", self.location) for each in settings.locations]
        if settings.image:
            self._thd_image(driver, settings.image)
        here = {"location": self._places[0]} if self._places and takes(its.list_sizes, "location") else {}
        found = list(its.list_sizes(**self._listing(its.list_sizes), **here))
        where = {_id(each) for each in self._places}
        offers = {each: sizes.offer(each, self._dialect.price_hours, {}, where) for each in found}
        self._sizes = {each.name: size for size, each in offers.items() if each is not None}
        self._told = tuple(each for each in offers.values() if each is not None)
        self.use_prices(self._prices)
        return "x86_64"

    def _listing(self, method: Callable[..., object]) -> Mapping[str, object]:
        return {name: value for name, value in self._dialect.listing.items() if takes(method, name)}

    def _thd_image(self, driver: Session, text: str) -> Named:
        method = driver.driver.list_images
        here = {"location": self._places[0]} if self._places and takes(method, "location") else {}
        return _found(method(**here), text, "image", self.location)

    # ---- VMs

    def _thd_launch(self, driver: Session, request: LaunchRequest) -> CloudVM:
        name = names.name_of(self._owner, request.token, request.sandbox_id, request.number)
        for node in self._thd_ours(driver):
            if node.name == name:
                return self._vm(node)  # it was launched before, and the answer was lost
        self._intents._thd_begin(name)
        try:
            node = driver.driver.create_node(**self._arguments(driver, request, name))
            if not _ID.fullmatch(_id(node)):
                raise CloudError(ErrorKind.TRANSIENT, f"the driver tells no id of the new VM {name}")
        except Exception as error:
            known = errors.classify(error) or classify(error)
            if known.kind in _UNCERTAIN:
                self._intents._thd_uncertain(name)
            else:
                self._intents._thd_end(name)
            raise
        self._nodes[_id(node)] = node
        self._new[_id(node)] = time.monotonic() + self._settings.settle_seconds
        told = self._vm(node)
        return attrs.evolve(
            told,
            token=request.token,
            sandbox_id=request.sandbox_id,
            size=request.size,
            created_at=told.created_at or time.time(),
        )

    def _arguments(self, driver: Session, request: LaunchRequest, name: str) -> Mapping[str, object]:
        """Return what `create_node` gets."""
        size = self._sizes.get(request.size)
        if size is None:
            raise CloudError(ErrorKind.CAPACITY, f"there is no size {request.size} any more")
        found: dict[str, object] = {**self._dialect.create, "name": name, "size": size}
        argument, _, key = self._dialect.user_data.partition(".")
        text = request.identity.decode()
        given = found.get(argument)
        found[argument] = {**(given if isinstance(given, Mapping) else {}), key: text} if key else text
        image = request.image or self._settings.image
        if image:
            found["image"] = self._thd_image(driver, image)
        if self._dialect.password:
            found.setdefault(self._dialect.password, secrets.token_urlsafe(24) + _PASSWORD_END)
        if request.zone:
            found["location"] = next(each for each in self._places if _id(each) == request.zone)
        return found

    def _thd_poll_launch(self, driver: Session, vm: CloudVM) -> CloudVM:
        return vm

    def _thd_find(self, driver: Session, token: str) -> list[CloudVM]:
        return [vm for vm in self._thd_list(driver) if vm.token == token]

    def _thd_list(self, driver: Session) -> list[CloudVM]:
        return [self._vm(node) for node in self._thd_ours(driver)]

    def _thd_survey(self, driver: Session) -> list[CloudVM]:
        return self._thd_list(driver)

    def _thd_get(self, driver: Session, id: str) -> CloudVM | None:
        return next((vm for vm in self._thd_list(driver) if vm.id == id), None)

    def _thd_ours(self, driver: Session) -> list[Node]:
        """Return this node's VMs, the oldest first."""
        method = driver.driver.list_nodes
        ours = [each for each in method(**self._listing(method)) if names.parse(each.name, self._owner)]
        self._nodes.update((_id(each), each) for each in ours)
        return sorted(ours, key=lambda each: (_created(each), _id(each)))

    def _vm(self, node: Node) -> CloudVM:
        token, sandbox = names.parse(node.name, self._owner) or ("", "")
        public, private = _address(node.public_ips), _address(node.private_ips)
        size = node.size if isinstance(node.size, str) or node.size is None else sizes.name_of(node.size)
        state = self._state(node)
        return CloudVM(
            id=_id(node),
            token=token,
            sandbox_id=sandbox,
            state=state,
            private_address=public if self._dialect.address == "public" else private,
            public_address=public,
            created_at=_created(node),
            size=size or "",
            detail=f"its state is {node.state}" if state is InstanceState.ENDED else "",
            gone=node.state == NodeState.TERMINATED,
            failed=node.state == NodeState.ERROR,
        )

    def _state(self, node: Node) -> InstanceState:
        if node.state == NodeState.RUNNING:
            self._new.pop(_id(node), None)
            return InstanceState.RUNNING
        if node.state in _ENDED:
            starting = node.state == NodeState.STOPPED and self._new.get(_id(node), 0.0) > time.monotonic()
            return InstanceState.PENDING if starting else InstanceState.ENDED
        return InstanceState.PENDING

    def _thd_destroy(self, driver: Session, vm: CloudVM) -> bool:
        """See `Cloud`. What drivers return is no answer: some return False where the cloud said 204."""
        node = self._nodes.get(vm.id) or next((n for n in self._thd_ours(driver) if _id(n) == vm.id), None)
        if node is None:
            raise CloudError(ErrorKind.NOT_FOUND, f"no VM {vm.id} is listed")
        try:
            driver.driver.destroy_node(node=node)
        except Exception as error:
            known = errors.classify(error) or classify(error)
            if known.kind is not ErrorKind.INVALID:
                raise
            return False  # clouds refuse it while another change is under way, each with a status of its own
        self._new.pop(vm.id, None)
        self._nodes.pop(vm.id, None)
        return True

    # ---- What NodeDriver does not have

    def _thd_release_resources(self, driver: Session, vm: CloudVM) -> None:
        return None

    def _thd_assign_address(self, driver: Session, vm: CloudVM) -> None:
        return None

    def _thd_leftovers(self, driver: Session) -> list[Leftover]:
        return []

    def _thd_release(self, driver: Session, leftover: Leftover) -> None:
        return None

    def _thd_console_output(self, driver: Session, id: str) -> str:
        return ""

    # ---- Images

    def _thd_find_image(self, driver: Session, name: str, version: str) -> MachineImage:
        words = "libcloud does not tell whose an image is; let the node's configuration or the annotation "
        raise CloudError(ErrorKind.NOT_FOUND, f"{words}infranetes.io/image name one by its id")

    def _thd_has_image(self, driver: Session, id: str) -> bool:
        return any(_id(each) == id for each in driver.driver.list_images())


def _id(of: Named) -> str:
    return "" if of.id is None else str(of.id)


def _found(among: Sequence[Named], text: str, key: str, location: str) -> Named:
    """Return what has this id, or else this name. :raise FailedPrecondition: nothing, or several."""
    found = [each for each in among if _id(each) == text] or [each for each in among if each.name == text]
    if len(found) != 1:
        what = f"several called {text}: give an id" if found else f"none called {text}"
        raise FailedPrecondition(f"{key} in providers.libcloud: {location} has {what}")
    return found[0]


def _address(told: Sequence[str] | None) -> str:
    """Return the first IPv4 address that is one."""
    for each in told or ():
        try:
            if int(IPv4Address(each)):
                return str(each)
        except AddressValueError:
            continue
    return ""


def _created(node: Node) -> float:
    """Return when a VM was made, as its driver tells; 0: it does not. Times without a zone are in UTC."""
    extra = node.extra or {}
    told = node.created_at or next((extra[key] for key in _CREATED if key in extra), None)
    try:
        at = datetime.fromisoformat(told) if isinstance(told, str) else told
    except ValueError:
        return 0.0
    if not isinstance(at, datetime):
        return 0.0
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
