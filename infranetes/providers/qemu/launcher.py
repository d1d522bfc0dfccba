"""Makes VMs and ends them: the steps of `boot` in order, then the identity, and the way back."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from infranetes.providers.interface import InstanceSpec
from infranetes.providers.qemu import boot, subnet
from infranetes.providers.qemu.boot import Connections, Steps, addresses, port_of
from infranetes.providers.qemu.ground import as_ours
from infranetes.providers.qemu.machine import User, growth
from infranetes.providers.qemu.network import Network
from infranetes.providers.qemu.record import Phase, Record, Records
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.template import Template
from infranetes.providers.qemu.vm import Paths, Vm
from infranetes_common.errors import DeadlineExceeded, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.identity import encode, encode_clock

_KILL_SECONDS = 10.0
_CLOCK_SECONDS = 10.0
_TOKEN = re.compile(r"[0-9a-f]{32}")
_log = Logger()


class Launcher:
    """One daemon's hands.

    :param ended: called with a VM that was launched and executes no longer, unasked.
    """

    def __init__(
        self,
        reactor: Any,
        settings: QemuSettings,
        records: Records,
        net: Network,
        user: User,
        paths: Paths,
        ended: Callable[[Vm], None],
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._records = records
        self._net = net
        self._user = user
        self._paths = paths
        self._ended = ended
        self._last: IPv4Address | None = None
        self._network: IPv4Network | None = None

    def check(self, spec: InstanceSpec, template: Template) -> None:
        """:raise InvalidArgument: this VM can't be had."""
        if not _TOKEN.fullmatch(spec.token):
            raise InvalidArgument("the token of a VM has to be 32 of 0-9 and a-f")
        growth(template.machine, spec.size, self._settings.guest_memory // MIB)

    def reserve(self, spec: InstanceSpec, network: IPv4Network, vms: dict[str, Vm]) -> Vm:
        """A VM with an address of its own, among `vms` from now on; nothing else is done yet.

        :raise ResourceExhausted: all addresses are taken.
        """
        taken = {IPv4Address(vm.record.address) for vm in vms.values()}
        self._last = subnet.free_address(network, taken, self._last)
        self._network = network
        record = Record(spec.token, spec.sandbox_id, spec.cluster, spec.node, str(self._last), time.time())
        vm = Vm(record, self._paths.place(spec.token, self._user))
        vm.launching = True
        vms[spec.token] = vm
        return vm

    async def launch(self, vm: Vm, spec: InstanceSpec, template: Template) -> None:
        """Have it execute, and its identity on the way to it.

        :raise InfranetesError, OSError: a step failed; nothing of it is left.
        """
        steps = Steps(self._reactor)
        assert self._network is not None
        network = self._network
        try:
            await self._execute(vm, spec, template, steps)
        except Exception as error:
            words = vm.place.last_words()
            _log.error(
                "sandbox {sandbox}: VM {vm} can't be made: {error} (done: {steps})",
                sandbox=spec.sandbox_id,
                vm=vm.record.id,
                error=str(error),
                steps=str(steps),
            )
            await self._undo_or_keep(vm)
            ours = as_ours(error)
            raise type(ours)(f"{ours}; QEMU's last words: {words}" if words else str(ours)) from error
        vm.handover = Deferred.fromCoroutine(self._hand_over(vm, spec, template, network, steps))
        vm.handover.addErrback(lambda failure: _log.failure("the handover to a VM failed", failure))

    async def _execute(self, vm: Vm, spec: InstanceSpec, template: Template, steps: Steps) -> None:
        settings = self._settings
        await self._thread(self._records.add, vm.record, template.overlay, self._user[:2])
        steps.done("files")
        vm.process = boot.start_process(
            self._reactor, template, vm.record, vm.place, lambda: self.process_ended(vm)
        )
        steps.done("process")
        vm.connections = Connections(self._reactor)
        await vm.connections.open(vm.place.sockets)
        joining = Deferred.fromCoroutine(self._join(vm.record))
        await boot.begin(vm.connections, joining, settings.launch_timeout, steps)

    async def _join(self, record: Record) -> None:
        port = port_of(record)
        await self._net.allow(port)
        await self._net.join(port)

    async def _hand_over(
        self, vm: Vm, spec: InstanceSpec, template: Template, network: IPv4Network, steps: Steps
    ) -> None:
        settings = self._settings
        try:
            agent_port = await self._identify(vm, spec, network)
            steps.done("identity")
            more = growth(template.machine, spec.size, settings.guest_memory // MIB)
            assert vm.connections is not None
            await vm.connections.grow(template, more, settings.boot_timeout)
            steps.done("size")
            vm.record = attrs.evolve(vm.record, phase=Phase.READY, agent_port=agent_port)
            await self._thread(self._records.update, vm.record)
            _log.info(
                "sandbox {sandbox}: VM {vm} runs at {address} after {seconds:.3f} s ({steps})",
                sandbox=spec.sandbox_id,
                vm=vm.record.id,
                address=vm.record.address,
                seconds=steps.seconds,
                steps=str(steps),
            )
        except CancelledError:
            pass  # the daemon stops, or the VM is destroyed
        except Exception as error:
            if not vm.destroying:
                await self._failed(vm, as_ours(error))
        finally:
            vm.launching = False
            vm.changed()
        if vm.record.phase is Phase.READY and vm.process is not None and vm.process.gone:
            self.process_ended(vm)

    async def _identify(self, vm: Vm, spec: InstanceSpec, network: IPv4Network) -> int:
        assert vm.connections is not None
        port = vm.connections.port
        assert port is not None
        given = addresses(vm.record, network, self._net.mtu)
        port.send(encode(attrs.evolve(spec.identity, now_nanos=time.time_ns(), network=given)))

        def too_late(outcome: Any, seconds: float) -> Any:
            raise DeadlineExceeded(f"its agent did not take its identity on in {seconds:g} s")

        agent_port: int = await port.ready.wait().addTimeout(
            self._settings.boot_timeout, self._reactor, too_late
        )
        # The document was long on its way through a machine that has just woken up; this line is not.
        port.send(encode_clock(time.time_ns()))
        port.again.wait().addTimeout(_CLOCK_SECONDS, self._reactor).addBoth(lambda _: port.close())
        return agent_port

    async def _failed(self, vm: Vm, error: InfranetesError) -> None:
        """A machine that executes and does not become a pod is ended."""
        try:
            await self._kill(vm)
            detail = f"{error}; {vm.end_detail()}" if vm.connections and vm.connections.reason else str(error)
        except InfranetesError as stuck:
            detail = f"{error}; {stuck}"
        vm.record = attrs.evolve(vm.record, phase=Phase.FAILED, detail=detail)
        _log.error(
            "sandbox {sandbox}: VM {vm} is of no use: {detail}",
            sandbox=vm.record.sandbox_id,
            vm=vm.record.id,
            detail=detail,
        )
        await self._keep(vm)
        self._ended(vm)

    def process_ended(self, vm: Vm) -> None:
        """A VM's process is gone. Told once for each."""
        if vm.destroying or vm.launching:
            return  # whoever is at work on it finds out by itself
        if not vm.record.detail:
            vm.record = attrs.evolve(vm.record, detail=vm.end_detail())
        _log.warn(
            "sandbox {sandbox}: VM {vm} has ended: {detail}",
            sandbox=vm.record.sandbox_id,
            vm=vm.record.id,
            detail=vm.record.detail,
        )
        vm.changed()
        Deferred.fromCoroutine(self._keep(vm))
        self._ended(vm)

    async def _keep(self, vm: Vm) -> None:
        try:
            await self._thread(self._records.update, vm.record)
        except OSError as error:
            _log.warn("the record of VM {vm} can't be kept: {error}", vm=vm.record.id, error=str(error))

    async def undo(self, vm: Vm) -> None:
        """Give back all that a VM holds, whatever there is of it. Again: nothing to do.

        :raise Unavailable: its process can't be ended; the rest is kept.
        """
        await self._kill(vm)
        vm.let_go()
        await self._net.forbid(port_of(vm.record))
        await self._thread(self._remove, vm)

    async def _undo_or_keep(self, vm: Vm) -> None:
        """What can't be undone now stays in sight, and `destroy` tries again."""
        try:
            await self.undo(vm)
        except Exception as error:
            detail = f"it could not be made, nor undone: {error}"
            _log.error("VM {vm}: {detail}", vm=vm.record.id, detail=detail)
            vm.record = attrs.evolve(vm.record, phase=Phase.FAILED, detail=detail)
            await self._keep(vm)

    def _remove(self, vm: Vm) -> None:
        shutil.rmtree(vm.place.sockets, ignore_errors=True)
        if vm.place.directory.exists():
            shutil.rmtree(self._records.hide(vm.record.token), ignore_errors=True)

    async def _kill(self, vm: Vm) -> None:
        if vm.process is None:
            return
        pid = vm.process.pid

        def stuck(outcome: Any, seconds: float) -> Any:
            raise Unavailable(
                f"QEMU's process {pid} of VM {vm.record.id} does not end {seconds:g} s after SIGKILL; "
                "it may hang in the kernel"
            )

        await vm.process.kill().addTimeout(_KILL_SECONDS, self._reactor, stuck)

    def _thread(self, function: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), function, *arguments)
