"""A PodProvider whose VMs are QEMU processes on this node, each a copy of a template.

What it must know of a VM is in the VM's directory (see `record`); its process is found by a word in
its arguments. So a daemon that was killed at any instant is followed by one that knows every VM.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList, DeferredLock
from twisted.internet.task import LoopingCall
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.guest import image as images
from infranetes.providers.interface import (
    Instance,
    InstanceSpec,
    InstanceState,
    IPodProvider,
    Progress,
    ProviderContext,
)
from infranetes.providers.qemu import ground, process, record
from infranetes.providers.qemu.boot import port_of
from infranetes.providers.qemu.launcher import Launcher
from infranetes.providers.qemu.machine import Machine, User
from infranetes.providers.qemu.network import Network
from infranetes.providers.qemu.record import Phase, Records
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.subnet import subnet
from infranetes.providers.qemu.template import Template, TemplateMaker
from infranetes.providers.qemu.vm import Paths, Vm
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    Unavailable,
)

_T = TypeVar("_T")
_CONSOLE_SECONDS = 30.0  # between two looks at the consoles' sizes
_log = Logger()


@implementer(IPodProvider)
class QemuProvider:
    """See `IPodProvider`."""

    name = "qemu"

    def __init__(self, reactor: Any, settings: QemuSettings, context: ProviderContext) -> None:
        self._reactor = reactor
        self._settings = settings
        self._context = context
        self._paths = Paths(context.state_dir / self.name, context.run_dir / self.name)
        self._records = Records(self._paths.vms)
        self._network: IPv4Network | None = None
        self._net = Network(reactor, settings.bridge, settings.mtu)
        self._net_lock = DeferredLock()
        self._vms: dict[str, Vm] = {}  # by token; other nodes' of this directory too: addresses are shared
        self._locks: dict[str, DeferredLock] = {}
        self._under_way: set[Deferred[Any]] = set()
        self._watchers: list[Callable[[Instance], None]] = []
        self._consoles = LoopingCall(self._trim_consoles)
        self._consoles.clock = reactor
        self._lock = -1
        self._launcher: Launcher | None = None
        self._template: Template | None = None
        self._template_lock = DeferredLock()
        self._maker: TemplateMaker | None = None
        self._machine: Machine | None = None
        self._preload: Path | None = None
        self._accelerator_reason = ""

    # ---- IPodProvider

    def start(self, progress: Progress) -> Deferred[None]:
        return Deferred.fromCoroutine(self._start(progress))

    def stop(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._stop())

    def configure_network(self, pod_cidr: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self._configure_network(pod_cidr))

    def launch(self, spec: InstanceSpec) -> Deferred[Instance]:
        return self._detached(self._one_at_a_time(spec.token, lambda: self._launch(spec)))

    def wait_running(self, instance_id: str, timeout: float) -> Deferred[Instance]:
        def too_late(outcome: Any, seconds: float) -> Any:
            raise DeadlineExceeded(f"VM {instance_id} is not running after {seconds:g} s; it may need longer")

        waiting = Deferred.fromCoroutine(self._wait_running(instance_id))
        return waiting.addTimeout(timeout, self._reactor, too_late)

    def get(self, instance_id: str) -> Deferred[Instance]:
        async def get() -> Instance:
            return self._find(instance_id).instance()

        return Deferred.fromCoroutine(get())

    def list(self) -> Deferred[list[Instance]]:
        async def list_ours() -> list[Instance]:
            return [vm.instance() for vm in self._vms.values() if self._is_ours(vm)]

        return Deferred.fromCoroutine(list_ours())

    def destroy(self, instance_id: str) -> Deferred[None]:
        token = record.token_of(instance_id)
        if token is None:
            return Deferred.fromCoroutine(_nothing())
        return self._detached(self._one_at_a_time(token, lambda: self._destroy(token)))

    def watch(self, ended: Callable[[Instance], None]) -> None:
        self._watchers.append(ended)

    def status(self) -> Mapping[str, str]:
        states = [vm.state for vm in self._vms.values() if self._is_ours(vm)]
        machine = self._machine
        return {
            "QEMU": machine.version if machine else "not started",
            "accelerator": f"{machine.accelerator} ({self._accelerator_reason})"
            if machine
            else "not chosen yet",
            "guest image": str(self._template.image.directory) if self._template else "",
            "template": str(self._template.directory) if self._template else "none yet",
            "bridge": self._settings.bridge,
            "pod CIDR": str(self._network or self._settings.pod_cidr),
            "pods held to their addresses": "yes" if self._net.guarded else "no",
            **{f"VMs {state.value}": str(states.count(state)) for state in InstanceState},
        }

    # ---- Start and stop

    async def _start(self, progress: Progress) -> None:
        ground.check_rights()
        user = ground.qemu_user(self._settings.user)
        templates = self._paths.templates(self._settings.template_dir)
        ground.make_directories(self._paths, templates)
        self._lock = ground.take_lock(self._paths)
        try:
            await self._find_vms(user)
            self._machine, self._accelerator_reason = await ground.find_machine(
                self._reactor, self._settings, user, self._paths.kvm
            )
            progress(f"QEMU uses {self._machine.accelerator}: {self._accelerator_reason}")
            preload = await self._context.preload(progress) if self._context.preload else None
            if preload is not None:
                self._machine = attrs.evolve(self._machine, preload=preload.key)
                self._preload = preload.path
            self._maker = TemplateMaker(self._reactor, self._settings, templates, self._paths.run, user)
            await self._whole_template(progress)
            await self._set_up_network()
            self._launcher = Launcher(
                self._reactor, self._settings, self._records, self._net, user, self._paths, self._told_ended
            )
        except BaseException:
            await self._stop()
            raise
        self._consoles.start(_CONSOLE_SECONDS, now=False)

    async def _find_vms(self, user: User) -> None:
        found = await self._thread(self._records.open)
        processes = await self._thread(process.named, [each.process_name for each in found])
        for each in found:
            vm = Vm(each, self._paths.place(each.token, user))
            self._vms[each.token] = vm
            for pid in processes.get(each.process_name, ()):
                with contextlib.suppress(ProcessLookupError):
                    vm.process = process.Watched(
                        self._reactor, pid, functools.partial(self._process_ended, vm)
                    )
        await self._thread(ground.sweep, self._paths.run, set(self._vms))
        running = sum(vm.alive for vm in self._vms.values())
        _log.info("found {count} VMs, {running} of them running", count=len(self._vms), running=running)

    async def _whole_template(self, progress: Progress) -> Template:
        """The template, made again if somebody has touched it."""
        if self._template is not None and self._template.whole():
            return self._template
        assert self._maker is not None
        assert self._machine is not None
        await self._template_lock.acquire()
        try:
            image = images.current(self._settings.image_dir)
            self._template = await self._maker.get(self._machine, image, progress, self._preload)
            return self._template
        finally:
            self._template_lock.release()

    async def _stop(self) -> None:
        if self._consoles.running:
            self._consoles.stop()
        self._launcher = None
        if self._under_way:
            await DeferredList(list(self._under_way), consumeErrors=True)
        for vm in self._vms.values():
            vm.let_go()
            vm.changed()
        self._vms.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- The subnet

    async def _chosen_network(self) -> IPv4Network:
        if self._network is None:
            self._network = await self._thread(
                ground.kept_network, self._paths.network, self._settings.pod_cidr
            )
        return self._network

    async def _set_up_network(self) -> None:
        await self._net_lock.acquire()
        try:
            network = await self._chosen_network()
            await self._net.set_up(network, [port_of(vm.record) for vm in self._vms.values() if vm.alive])
        finally:
            self._net_lock.release()

    async def _configure_network(self, pod_cidr: str) -> None:
        network = subnet(pod_cidr)
        await self._net_lock.acquire()
        try:
            if network == await self._chosen_network():
                return
            others = [address for address in await self._addresses_in_use() if address not in network]
            if others:
                raise FailedPrecondition(
                    f"pod CIDR {network} can't replace {self._network}: {len(others)} running VMs have other "
                    f"addresses ({others[0]}); remove those pods first"
                )
            if self._lock >= 0:
                await self._net.set_up(network, [port_of(vm.record) for vm in self._vms.values() if vm.alive])
            await self._thread(ground.keep_network, self._paths.network, self._settings.pod_cidr, network)
            self._network = network
        finally:
            self._net_lock.release()

    async def _addresses_in_use(self) -> Sequence[IPv4Address]:
        if self._lock >= 0:
            busy = [vm.record for vm in self._vms.values() if vm.alive or vm.launching]
        else:
            kept = await self._thread(self._records.read)
            processes = await self._thread(process.named, [each.process_name for each in kept])
            busy = [each for each in kept if each.process_name in processes]
        return [IPv4Address(each.address) for each in busy]

    # ---- Launching, waiting, destroying

    async def _launch(self, spec: InstanceSpec) -> Instance:
        launcher = self._ready()
        there = self._vms.get(spec.token)
        if there is not None:
            if there.launching or there.record.phase is not Phase.STARTING:
                return there.instance()
            await launcher.undo(there)  # an earlier daemon did not come to the end of it
            self._vms.pop(spec.token, None)
        template = await self._whole_template(lambda words: _log.info("{words}", words=words))
        launcher.check(spec, template)
        await self._net_lock.acquire()
        try:
            vm = launcher.reserve(spec, await self._chosen_network(), self._vms)
        finally:
            self._net_lock.release()
        try:
            await launcher.launch(vm, spec, template)
        except Exception as error:
            vm.launching = False
            if not vm.place.directory.exists():
                self._vms.pop(spec.token, None)  # else something could not be undone, and is still seen
            vm.changed()
            raise ground.as_ours(error) from error
        return vm.instance()

    async def _wait_running(self, instance_id: str) -> Instance:
        while True:
            vm = self._find(instance_id)
            state = vm.state
            if state is InstanceState.RUNNING:
                return vm.instance()
            if state is InstanceState.ENDED:
                raise vm.ended_error()
            if not vm.launching:
                raise Unavailable(
                    f"VM {instance_id} was being made by a daemon that was killed; launch it again"
                )
            await vm.next_change()

    async def _destroy(self, token: str) -> None:
        vm = self._vms.get(token)
        if vm is None or not self._is_ours(vm):
            return
        launcher = self._ready()
        vm.destroying = True
        try:
            await launcher.undo(vm)
        except Exception as error:
            vm.destroying = False
            raise ground.as_ours(error) from error
        self._vms.pop(token, None)
        vm.changed()

    def _process_ended(self, vm: Vm) -> None:
        """A process found at the start, or launched by us, is gone."""
        if self._launcher is not None:
            self._launcher.process_ended(vm)

    def _told_ended(self, vm: Vm) -> None:
        if not self._is_ours(vm):
            return
        for watcher in (*self._watchers,):
            try:
                watcher(vm.instance())
            except Exception:
                _log.failure("whoever watches for VMs' ends failed over {vm}", vm=vm.record.id)

    # ---- Small things

    def _ready(self) -> Launcher:
        if self._launcher is None:
            raise Unavailable("the QEMU provider is not started, or is stopping")
        return self._launcher

    def _find(self, instance_id: str) -> Vm:
        vm = self._vms.get(record.token_of(instance_id) or "")
        if vm is None or not self._is_ours(vm):
            raise NotFound(f"there is no VM {instance_id[:80]!r}")
        return vm

    def _is_ours(self, vm: Vm) -> bool:
        owner = (vm.record.cluster, vm.record.node)
        return owner in ((self._context.cluster, self._context.node), ("", ""))

    def _detached(self, body: Coroutine[Any, Any, _T]) -> Deferred[_T]:
        """`body`'s outcome. It goes on to its end whoever cancels: half a VM is of no use to anyone."""
        answer: Deferred[_T] = Deferred()
        work = Deferred.fromCoroutine(body)
        self._under_way.add(work)

        def done(outcome: Any) -> None:
            self._under_way.discard(work)
            if not answer.called:
                answer.callback(outcome)  # a Failure goes on as one

        work.addBoth(done)
        return answer

    async def _one_at_a_time(self, token: str, body: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        lock = self._locks.setdefault(token, DeferredLock())
        await lock.acquire()
        try:
            return await body()
        finally:
            lock.release()
            if not lock.locked:
                self._locks.pop(token, None)

    def _thread(self, function: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), function, *arguments)

    async def _trim_consoles(self) -> None:
        keep = self._settings.console_size
        for vm in (*self._vms.values(),):
            if vm.alive:
                for path in (vm.place.console, vm.place.directory / record.OUTPUT):
                    with contextlib.suppress(OSError):
                        await self._thread(record.trim, path, keep)


async def _nothing() -> None:
    pass
