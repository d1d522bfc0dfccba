"""From a spec to a VM that was asked for: one, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
from twisted.internet.task import deferLater
from twisted.logger import Logger

from infranetes.providers.cloud.annotations import PREFIX, read
from infranetes.providers.cloud.calls import Calls
from infranetes.providers.cloud.interface import (
    ADDRESS,
    CLUSTER,
    NODE,
    SANDBOX,
    TOKEN,
    CloudError,
    Found,
    ICloud,
    Order,
    Trouble,
)
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.sizes import choose
from infranetes.providers.cloud.translate import failed
from infranetes.providers.cloud.view import View
from infranetes.providers.interface import InstanceSpec, InstanceState, ProviderContext
from infranetes_common.errors import InfranetesError, InvalidArgument, Unavailable
from infranetes_common.identity import encode

_PATIENCE = 1.5  # from one look at a launch that is not decided yet to the next
_ATTEMPTS = 4  # with VMs of the same token that turn out to be gone

_log = Logger()


class Launcher:
    """Makes VMs.

    :param unwanted: tokens whose launch failed, until when: a VM that turns up is destroyed.
    :param end: destroys a VM.
    """

    def __init__(
        self,
        reactor: Any,
        cloud: ICloud,
        settings: CloudSettings,
        context: ProviderContext,
        calls: Calls,
        view: View,
        unwanted: dict[str, float],
        end: Callable[[Found], Awaitable[None]],
    ) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._context = context
        self._calls = calls
        self._view = view
        self._unwanted = unwanted
        self._end = end
        self.architecture = "x86_64"

    async def launch(self, spec: InstanceSpec) -> Found:
        """The VM of the spec's token, asked for if there is none.

        :raise CloudError, InfranetesError: it can't be had, and nothing of it remains."""
        if (spec.cluster, spec.node) != (self._context.cluster, self._context.node):
            raise InvalidArgument(f"a VM for {spec.cluster}/{spec.node} can't be launched by this node")
        known = self._view.of_token(spec.token)
        if known is not None:
            return known
        order, sizes = self._order(spec)
        self._unwanted.pop(spec.token, None)
        try:
            return self._view.launched(await self._ask(order, sizes))
        except (CloudError, InfranetesError) as error:
            await self._undo(order.token, error)
            raise

    def _order(self, spec: InstanceSpec) -> tuple[Order, list[str]]:
        """The order but for size and place, and the sizes to try.

        :raise InvalidArgument: an annotation or the size can't be served."""
        wishes = read(spec.annotations)
        self._cloud.check_wishes(wishes)
        offers = choose(
            self._cloud.offers,
            spec.size,
            wishes,
            allowed=self._settings.sizes,
            guest_memory=self._settings.guest_memory,
            architecture=self.architecture,
        )
        tags = {
            CLUSTER: spec.cluster,
            NODE: spec.node,
            SANDBOX: spec.sandbox_id,
            TOKEN: spec.token,
            **({ADDRESS: wishes.elastic_address} if wishes.elastic_address else {}),
        }
        identity = attrs.evolve(
            spec.identity,
            listen=f"0.0.0.0:{self._settings.agent_port}",
            hostname=spec.identity.hostname if wishes.set_hostname else "",
        )
        if spec.image and wishes.image:
            raise InvalidArgument(
                f"annotation {PREFIX}image: the image of the pod's container is the VM; leave it out"
            )
        number = self._view.count_destroyed(spec.token)
        image = wishes.image or spec.image
        order = Order(spec.token, spec.sandbox_id, number, tags, encode(identity), wishes, image)
        return order, [offer.name for offer in offers[: self._settings.max_sizes]]

    async def _ask(self, order: Order, sizes: list[str]) -> Found:
        for number in range(order.number, order.number + _ATTEMPTS):
            found = await self._ask_for(attrs.evolve(order, number=number), sizes)
            if found.state is not InstanceState.ENDED:
                return found
            if found.id not in self._view.destroyed and number == order.number:
                return found
        raise Unavailable(f"VMs of token {order.token} end as soon as they are asked for; see {found.detail}")

    async def _ask_for(self, order: Order, sizes: list[str]) -> Found:
        """The cheapest size at the first place that has it."""
        refused: CloudError | None = None
        for size in sizes:
            for place in self._cloud.places(order.wishes):
                attempt = attrs.evolve(order, size=size, place=place)
                try:
                    found = await self._calls.call(
                        f"launch a {size}", partial(self._thd_launch, attempt), kind="launch"
                    )
                    if not found.task:
                        return found
                    # what is refused now has had an id: the next attempt is another VM's
                    order = attrs.evolve(order, number=order.number + 1)
                    return await self._settled(found)
                except CloudError as error:
                    if error.trouble is Trouble.CONFLICT:
                        return await self._appears(order.token, error)
                    if error.trouble is not Trouble.CAPACITY:
                        raise
                    refused = error
                    _log.info(
                        "{cloud} has no {size} {place}: {error}",
                        cloud=self._cloud.place,
                        size=size,
                        place=place,
                        error=error,
                    )
        assert refused is not None
        raise CloudError(Trouble.CAPACITY, f"none of {', '.join(sizes)} can be had; at last: {refused}")

    def _thd_launch(self, order: Order, driver: Any) -> Found:
        return self._cloud._thd_launch(driver, order)

    async def _settled(self, found: Found) -> Found:
        """The VM once the cloud has made up its mind, or has thought for long: what becomes of it is
        seen in lists then.

        :raise CloudError: it is refused, and is not there."""
        deadline = self._reactor.seconds() + self._settings.settle_seconds
        what = f"see whether VM {found.id} can be had"
        pause = self._settings.poll_seconds
        while found.task and self._reactor.seconds() < deadline:
            await deferLater(self._reactor, pause)
            pause *= _PATIENCE  # each VM is asked for by itself, and boots meanwhile
            try:
                found = await self._calls.call(what, partial(self._thd_settle, found))
            except CloudError as error:
                if error.trouble in (Trouble.CAPACITY, Trouble.QUOTA):
                    self._view.gone(found.id, found.token)
                raise
        return attrs.evolve(found, task="")

    def _thd_settle(self, found: Found, driver: Any) -> Found:
        return self._cloud._thd_settle(driver, found)

    async def _appears(self, token: str, error: CloudError) -> Found:
        """An earlier daemon has asked for the VM with another identity: it is there, if not shown yet."""
        deadline = self._reactor.seconds() + self._settings.settle_seconds
        while True:
            founds = await self._calls.call("find a VM", lambda driver: self._cloud._thd_find(driver, token))
            there = [one for one in founds if one.id not in self._view.destroyed]
            if there:
                return min(there, key=lambda one: (one.state is InstanceState.ENDED, one.created_at, one.id))
            if self._reactor.seconds() > deadline:
                raise error
            await deferLater(self._reactor, self._settings.poll_seconds)

    async def _undo(self, token: str, why: Exception) -> None:
        """See to it that nothing of a launch that failed remains."""
        self._unwanted[token] = self._reactor.seconds() + self._settings.settle_seconds
        if isinstance(why, CloudError) and why.trouble is Trouble.INVALID:
            return  # whatever it was, it was never done
        try:
            founds = await self._calls.call(
                "find what a failed launch left", lambda driver: self._cloud._thd_find(driver, token)
            )
            for found in founds:
                await self._end(found)
        except (CloudError, InfranetesError) as error:
            words = error if isinstance(error, InfranetesError) else failed(self._cloud.place, error)
            _log.warn("a launch failed and what it left is swept later: {error}", error=words)
