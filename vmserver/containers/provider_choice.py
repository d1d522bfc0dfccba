# SPDX-License-Identifier: Apache-2.0
"""The choice of the ContainerProvider that runs the pod's containers: the configured one, or the pod's.

The node names its choice when it gives the VM to the pod. The agent stops the provider that was in charge,
starts the chosen one, and writes its name to the disk only once that one answers: after a restart of the
agent or the VM, the choice is the same. If the agent is killed earlier, nothing is chosen, and the node asks
again. The choice is made before the first container, and is final from then on.

Before a provider is started, other services of the machine are made to see the agent's mounts, unless it is
an `IMountsForItself`; see `vmserver.machine.mount_namespace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from twisted.logger import Logger

from infranetes_common.concurrency import Flight, deferred, replace_file, run_in_thread, settled, within
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.reactors import IReactor
from vmserver.containers.interface import Changed, IContainerProvider, IMountsForItself, Removed
from vmserver.containers.provider_start import ProviderStart

CHOICE_SECONDS = 110.0  # for a chosen provider to answer; the node waits a little longer
_MAX_NAME = 64

_log = Logger()


class ProviderChoice:
    """The agent's ContainerProvider, which changes at most once in a pod's life.

    :param configured: the one in charge until another is chosen.
    :param choices: names of others that a pod may choose.
    :param make: makes the provider of a name, without starting it.
    :param file: has the name of the chosen provider; read only where there are choices.
    :param thd_share_mounts: makes what the agent mounts visible to other services; None: it always is.
    :ivar provider: the one in charge.
    """

    def __init__(
        self,
        reactor: IReactor,
        configured: IContainerProvider,
        choices: Sequence[str],
        make: Callable[[str], IContainerProvider],
        file: Path,
        thd_share_mounts: Callable[[], None] | None = None,
    ) -> None:
        self.provider = configured
        self._reactor = reactor
        self._offered = (configured.name, *choices)
        self._make = make
        self._file = file
        self._thd_share_mounts = thd_share_mounts
        self._start = ProviderStart(reactor, configured)
        self._watches: list[tuple[Changed, Removed]] = []
        self._choosing: Flight[None] | None = None

    def watch(self, changed: Changed, removed: Removed) -> None:
        """As `IContainerProvider.watch`, whichever provider is in charge."""
        self._watches.append((changed, removed))
        self.provider.watch(changed, removed)

    async def recall(self) -> None:
        """Put the provider in charge that was chosen before, without starting it, and see to the mounts."""
        chosen = await run_in_thread(self._reactor, self._thd_recorded) if len(self._offered) > 1 else ""
        if chosen not in ("", self.provider.name):
            try:
                self._put_in_charge(self._made(chosen))
                self._start = ProviderStart(self._reactor, self.provider)
            except InfranetesError as error:
                _log.error(
                    "the provider {provider}, which the pod chose, is no longer available: {words}",
                    provider=chosen,
                    words=str(error),
                )
        try:
            await self._see_to_mounts(self.provider)
        except InfranetesError as error:
            _log.error("{words}", words=str(error))

    async def start(self) -> None:
        """Start the provider in charge; see `ProviderStart`."""
        await self._start.start()

    async def choose(self, name: str) -> None:
        """Let the provider called `name` run the pod's containers; "" for the configured one. Idempotent.

        The change goes on if the caller cancels, and the next caller waits for it.

        :raise FailedPrecondition: this VM doesn't offer it, or the pod has containers of another provider.
        :raise InfranetesError: it does not start; the previous one is still in charge."""
        name = name or self._offered[0]
        self._check_offered(name)
        while self._choosing is not None and not self._choosing.done:
            await settled([self._choosing.join()])
        if name != self.provider.name:
            self._choosing = Flight(self._change(name))
            await self._choosing.join()

    @deferred
    async def stop(self) -> None:
        """Stop the provider; containers keep running."""
        self._start.cancel()
        if self._choosing is not None:
            self._choosing.cancel()
        await self.provider.stop()

    def _check_offered(self, name: str) -> None:
        if name not in self._offered:
            raise FailedPrecondition(
                f"{name[:_MAX_NAME]} can't run containers in this VM: it offers {', '.join(self._offered)}; "
                "name one of these in the annotation infranetes.io/containers or in contprovider, or make "
                "another guest image: `infranetes-guest build --containers both` has Docker as well"
            )

    def _made(self, name: str) -> IContainerProvider:
        self._check_offered(name)
        return self._make(name)

    async def _change(self, name: str) -> None:
        before, began = self.provider, self._reactor.seconds()
        if await before.containers():
            raise FailedPrecondition(
                f"the pod has containers of {before.name} already; only another pod can have {name}"
            )
        chosen = self._made(name)
        await self._see_to_mounts(chosen)
        try:
            await within(self._reactor, CHOICE_SECONDS, chosen.start(), f"starting the provider {name}")
            await run_in_thread(self._reactor, self._thd_record, name)
        except BaseException:
            await chosen.stop()
            raise
        self._start.cancel()
        self._put_in_charge(chosen)
        _log.info(
            "containers are run by {provider}, as the pod chose: {seconds:.2f} s",
            provider=name,
            seconds=self._reactor.seconds() - began,
        )
        await before.stop()

    async def _see_to_mounts(self, provider: IContainerProvider) -> None:
        if self._thd_share_mounts is not None and not IMountsForItself.providedBy(provider):
            await run_in_thread(self._reactor, self._thd_share_mounts)

    def _put_in_charge(self, provider: IContainerProvider) -> None:
        self.provider = provider
        for changed, removed in self._watches:
            provider.watch(changed, removed)

    def _thd_recorded(self) -> str:
        """Return the name in the file; "": there is none."""
        try:
            return self._file.read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            _log.error("{path}: {words}", path=str(self._file), words=error.strerror)
            return ""

    def _thd_record(self, name: str) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._file, name + "\n")
        except OSError as error:
            raise FailedPrecondition(
                f"{self._file} can't be written: {error.strerror}; see the agent's choice_file"
            ) from error
