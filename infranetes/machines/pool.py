# SPDX-License-Identifier: Apache-2.0
"""The pool: VMs that wait for a pod, booted, or stopped after a first boot.

What each state means, and why a VM is never used twice, stands in `pool_record`. A VM of the pool has from
the beginning the id of the sandbox that it becomes, so its tags and names in the IaaS and the name in its
certificate stay the same when a pod claims it: it gets a new key and certificate, the pod's host name and
the rest of its configuration over the channel.

    what happens              here                              the store                  the provider
    a size lacks one          BOOTING, its launch begins        pool: BOOTING              asked, by token
    it is up                  IDLE                              pool: IDLE                 RUNNING
    it is to be stopped       as BOOTING, but PREPARING;        pool: PREPARING,           RUNNING, then
                              then STOPPING, STOPPED            STOPPING, STOPPED          STOPPED
    a pod claims it           asked if it lives; then its       one write: pool to         nothing
                              PodMachine is handed over         sandboxes, LAUNCHING
    or it claims a stopped    the same, unasked                 the same, without its      asked, by token:
    one, if none is IDLE                                        VM: a token that is        starts it, or
                                                                asked for                  makes another
    the daemon is killed      the next one goes on from the store: boots, keeps or ends the VM, or finishes
                              the pod's launch with that very VM
    found dead, or drained    ENDING, destroyed, then forgotten pool: ENDING, deleted      destroyed
    the sweep lists it        its token is known here, or among the sandboxes, at every instant
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.machines.context import VmFacts
from infranetes.machines.ids import new_id
from infranetes.machines.pod_machine import PodMachine
from infranetes.machines.pool_config import PoolConfig
from infranetes.machines.pool_context import Adopt, PoolContext
from infranetes.machines.pool_record import BOOTS, PoolRecord, PoolState
from infranetes.machines.pooled import SHARED, Member, Pace, Purpose, check_stops, smallest, wants_own_vm
from infranetes.observer import Launch, LaunchKind, LaunchStep, reason_of
from infranetes.providers.interface import Instance, InstanceState, Size
from infranetes.tracing.spans import on_its_own, step
from infranetes_common.concurrency import Flight, settled, shielded, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument

DRAINED = "pool_drained"  # the setting in the store
PROBE_SECONDS = 5.0  # how long a check waits for an idle VM's agent
STOP_SECONDS = 900.0  # in which a VM has to be stopped
CLAIMED_SECONDS = 10.0  # within which the pod's launch goes on
MOST_FAILURES = 2  # checks in a row that an agent may leave unanswered
_log = Logger()


class Pool:
    """Keeps as many VMs of each size waiting as the configuration says.

    :param purpose: whose pods may have them.
    :ivar members: its VMs by their ids. :ivar drained: whether it makes none until `fill`.
    :ivar trouble: why the last launch failed; "": it succeeded.
    """

    def __init__(self, context: PoolContext, config: PoolConfig, purpose: Purpose = SHARED) -> None:
        self.context = self._context = context
        self.purpose = purpose
        self._drained_setting = f"{DRAINED}:{purpose.handler}" if purpose.handler else DRAINED
        self._config = config
        self._pace = Pace(config.per_minute, config.retry)
        self._later: IDelayedCall | None = None
        self._ready = False  # the provider has started
        self._adjusting = self._adjust_again = False
        self.members: dict[str, Member] = {}
        self.drained = False
        self.trouble = ""

    # ---- with the daemon

    def load(self, records: Iterable[PoolRecord], settings: Mapping[str, str]) -> None:
        """Take over what an earlier daemon recorded."""
        self.members = {record.id: self._member(record) for record in records}
        self.drained = bool(settings.get(self._drained_setting))

    def reconfigure(self, config: PoolConfig) -> None:
        """Keep as many VMs as `config` says from now on."""
        if (config.per_minute, config.retry) != (self._config.per_minute, self._config.retry):
            self._pace = Pace(config.per_minute, config.retry)
        self._config = config
        self.adjust()

    def provider_ready(self) -> None:
        """Go on with what was under way, and fill up, now that the provider has started."""
        self._ready = True
        for member in list(self.members.values()):
            if member.state in (*BOOTS, PoolState.STOPPING) and member.booting is None:
                self._boot(member)
            elif member.state is PoolState.ENDING:
                self._ending(member)
        self.adjust()

    async def stop(self) -> None:
        """Close the agents' clients; the VMs go on. What is under way is left for the next daemon."""
        if self._later is not None and self._later.active():
            self._later.cancel()
        for member in self.members.values():
            for flight in (member.booting, member.ending):
                if flight is not None and not flight.done:
                    flight.cancel()
            await member.machine.disconnect()

    # ---- claims, checks and commands

    def owns(self, token: str) -> bool:
        """Whether a VM with this token is the pool's."""
        return any(member.record.token == token for member in self.members.values())

    def idle(self) -> list[Member]:
        """The VMs that a pod could have."""
        return [
            member for member in self.members.values() if member.state is PoolState.IDLE and not member.taken
        ]

    def stopped(self) -> list[Member]:
        """The VMs that a pod could have once they are started."""
        return [
            member
            for member in self.members.values()
            if member.state is PoolState.STOPPED and not member.taken
        ]

    async def claim(self, size: Size, annotations: Iterable[str], adopt: Adopt, zone: str = "") -> bool:
        """Hand an idle VM that is large enough, or else a stopped one, to a pod with these annotations' keys,
        through `adopt`.

        :param zone: where it has to be; "": anywhere.
        :return: False: there is none.
        :raise InfranetesError: it could not be recorded."""
        if wants_own_vm(annotations):
            return False
        while (member := smallest(self.idle(), size, zone)) is not None:
            with step("claim a VM of the pool"):
                if await self._claim(member, adopt):
                    return True
        while (member := smallest(self.stopped(), size, zone)) is not None:
            with step("claim a stopped VM of the pool"):
                member.taken = True
                if await shielded(self._hand_over(member, adopt)):
                    return True
        return False

    async def _claim(self, member: Member, adopt: Adopt) -> bool:
        alive, member.taken = False, True
        try:
            alive = await member.machine.answers(PROBE_SECONDS)
        finally:
            member.taken = alive
        if not alive:
            self.end(member, "its agent did not answer when a pod claimed it")
            return False
        return await shielded(self._hand_over(member, adopt))

    def ended(self, instance: Instance) -> None:
        """End the VM that the provider says is no longer executing, if it is the pool's."""
        for member in list(self.members.values()):
            if member.record.token == instance.token and member.taken:
                member.machine.instance = instance  # the pod that takes it will see it
            elif member.record.token == instance.token:
                self.end(member, f"it ended by itself: {instance.detail or 'no reason known'}")

    async def check(self, by_token: Mapping[str, Instance] | None) -> None:
        """End what is dead, try again what could not be ended, and fill up.

        :param by_token: every VM that the provider lists; None: it was not asked."""
        checks = [start(self._check(member, by_token)) for member in self.idle()]
        checks += [start(self._check_stopped(member, by_token)) for member in self.stopped()]
        for member in list(self.members.values()):
            if member.state is PoolState.ENDING:
                self._ending(member)
        await settled(checks)
        self.adjust()

    async def drain(self) -> list[Member]:
        """End all VMs and make no more until `fill`. Returns those that were to be ended, once each is
        ended or could not be."""
        self.drained = True
        await self._context.store.put_setting(self._drained_setting, "1")
        members = [member for member in self.members.values() if not member.taken]
        await settled([self.end(member, "the pool is drained").join() for member in members])
        return members

    async def fill(self) -> None:
        """Make VMs again after `drain`; returns at once."""
        await self._context.store.put_setting(self._drained_setting, "")
        self.drained = False
        self.adjust()

    # ---- filling

    def adjust(self) -> None:
        """End VMs that are too many and launch those that are missing, as fast as the configuration lets."""
        self._adjust_again = True
        if self._adjusting:
            return  # called by the loop below, which goes on
        self._adjusting = True
        try:
            while self._adjust_again and not self._context.stopping and self._ready:
                self._adjust_again = False
                with on_its_own():
                    self._adjust()
        finally:
            self._adjusting = False

    def _adjust(self) -> None:
        for to_stop, targets in ((False, self._config.targets), (True, self._stopped_targets())):
            for size in {*targets, *(member.size for member in self.members.values())}:
                self._adjust_kind(size, to_stop, 0 if self.drained else targets[size])

    def _adjust_kind(self, size: Size, to_stop: bool, target: int) -> None:
        members = [
            member
            for member in self.members.values()
            if member.size == size and member.is_to_stop is to_stop and member.state is not PoolState.ENDING
        ]
        spare = [member for member in members if not member.taken]
        for member in spare[: max(len(members) - target, 0)]:
            self.end(member, "it is not wanted any more")
        for _ in range(target - len(members)):
            if not self._may_launch():
                break
            self._launch(size, to_stop)

    def _stopped_targets(self) -> Counter[Size]:
        """How many stopped VMs of each size there are to be, where the provider can have any."""
        if not self._config.stops:
            return Counter()
        try:
            check_stops(self._context.provider, self.purpose.annotations)
        except InvalidArgument as error:
            self.trouble = str(error)
            return Counter()
        return self._config.stopped_targets

    @property
    def target(self) -> int:
        """How many VMs there are to be."""
        return 0 if self.drained else self._config.targets.total() + self._stopped_targets().total()

    def _may_launch(self) -> bool:
        booting = sum(member.state in BOOTS for member in self.members.values())
        if booting >= self._config.parallel:
            return False  # asked again when one of them is up or has failed
        if not self._context.starts.when_idle(self.adjust):
            return False  # pods go first
        pause = self._pace.wait(self._context.clock.seconds())
        if pause and (self._later is None or not self._later.active()):
            self._later = self._context.clock.callLater(pause, self.adjust)
        return not pause

    def _launch(self, size: Size, to_stop: bool) -> None:
        self._pace.begun(self._context.clock.seconds())
        record = PoolRecord(
            id=new_id(),
            token=new_id(),
            state=PoolState.PREPARING if to_stop else PoolState.BOOTING,
            cpu_millis=size.cpu_millis,
            memory_bytes=size.memory_bytes,
            created_at=self._context.now(),
            provider=self._context.provider.name,
            handler=self.purpose.handler,
        )
        member = self.members[record.id] = self._member(record)
        self._boot(member, new=True)

    def _boot(self, member: Member, new: bool = False) -> None:
        member.booting = Flight(self._bring_up(member, new))
        member.booting.join().addErrback(lambda _: None)

    async def _bring_up(self, member: Member, new: bool) -> None:
        context = self._context
        began, at, timeline = context.clock.seconds(), context.now(), member.machine.timeline
        try:
            if new:
                await context.store.put_pool(member.record)
            if member.state is not PoolState.STOPPING:
                request = self.purpose.request(member.size)
                until, brief = began + context.times.launch, member.is_to_stop
                await member.machine.bring_up(request, until, brief=brief)
            if member.is_to_stop:
                await self._stop(member)
            else:
                with timeline.step("the VM is made ready for any pod", launch=LaunchStep.CONFIGURE):
                    await member.make_ready(self.purpose.contprovider or context.contprovider)
                with timeline.step("the VM waits in the pool", launch=LaunchStep.RECORD):
                    await self.update(member, member.record.to(PoolState.IDLE))
        except Exception as error:
            if not context.stopping:
                if member.state is not PoolState.ENDING:
                    self._tell(member, at, error)
                self._failed(member, error)
            return
        self._tell(member, at)
        self.trouble = ""
        self._pace.succeeded()
        _log.info(
            "vm {vm} waits in the pool: {seconds:.2f} s",
            vm=member.record.instance_id,
            seconds=context.clock.seconds() - began,
        )
        self.adjust()

    async def _stop(self, member: Member) -> None:
        """Have a VM that is up stopped. It is not made ready first: it would forget that."""
        if member.state is PoolState.PREPARING:
            await self.update(member, member.record.to(PoolState.STOPPING))
        await member.machine.stop_vm(STOP_SECONDS)
        with member.machine.timeline.step("the VM waits in the pool, stopped", launch=LaunchStep.RECORD):
            await self.update(member, member.record.stopped())
        member.has_stopped()

    def _tell(self, member: Member, began: int, error: Exception | None = None) -> None:
        """Report a launch that has ended to the observer. :param began: nanoseconds since 1970."""
        steps, provider = member.machine.timeline.launch_steps(began), self._context.provider.name
        reason, message = ("", "") if error is None else (reason_of(error), str(error))
        self._context.observer.launched(
            Launch(member.id, "", provider, LaunchKind.POOL, began / 1e9, steps, reason, message)
        )

    def _failed(self, member: Member, error: Exception) -> None:
        if member.state is PoolState.ENDING:
            return  # it failed because it is being ended
        self.trouble = str(error) or type(error).__name__
        _log.warn("a VM for the pool could not be made: {error}", error=self.trouble)
        self._pace.failed(self._context.clock.seconds())
        self.end(member, self.trouble)

    # ---- claiming

    async def _hand_over(self, member: Member, adopt: Adopt) -> bool:
        """Return whether the VM is the pod's now. It is not if its record is gone: it is being ended."""
        instance_id = member.record.instance_id
        try:
            await adopt(member.machine)
        except FailedPrecondition as error:
            _log.warn("{error}", error=error)
            if member.state is not PoolState.ENDING:
                self.members.pop(member.id, None)
            return False
        except InfranetesError:
            member.taken = False
            raise
        self.members.pop(member.id, None)
        self._context.starts.take(member.id, CLAIMED_SECONDS)
        _log.info("sandbox {sandbox} has vm {vm} from the pool", sandbox=member.id, vm=instance_id)
        self.adjust()
        return True

    # ---- checking

    async def _check(self, member: Member, by_token: Mapping[str, Instance] | None) -> None:
        instance = by_token.get(member.record.token) if by_token is not None else None
        if by_token is not None and instance is None and await self._is_gone(member):
            self.end(member, "the provider no longer has it")
            return
        if instance is not None:
            member.machine.instance = instance
            if instance.state is InstanceState.ENDED:
                self.ended(instance)
                return
        answers = await member.machine.answers(PROBE_SECONDS)
        member.failures = 0 if answers else member.failures + 1
        if answers:
            member.machine.tell_of_services()
        if member.failures >= MOST_FAILURES and not member.taken:
            self.end(member, "its agent does not answer")

    async def _check_stopped(self, member: Member, by_token: Mapping[str, Instance] | None) -> None:
        if by_token is None:
            return
        instance = by_token.get(member.record.token)
        if instance is None and await self._is_gone(member):
            self.end(member, "the provider no longer has it")
        elif instance is not None:
            member.machine.instance = instance
            if instance.state is InstanceState.ENDED:
                self.ended(instance)
            elif instance.state is not InstanceState.STOPPED:
                self.end(member, "it was stopped, and somebody else has started it")

    async def _is_gone(self, member: Member) -> bool:
        try:
            return await member.machine.look(self._context.times.destroy) is None
        except InfranetesError:
            return False  # not known: the next check asks again

    # ---- ending

    def end(self, member: Member, reason: str) -> Flight[None]:
        """Destroy the VM and forget it. If it can't be destroyed, the next `check` tries again."""
        if self.members.get(member.id) is not member:
            return Flight(succeed(None))  # claimed or ended already
        if member.state is not PoolState.ENDING:
            _log.info(
                "vm {vm} leaves the pool: {reason}",
                vm=member.record.instance_id or member.record.token,
                reason=reason,
            )
            member.record = member.record.to(PoolState.ENDING, message=reason)
        return self._ending(member)

    def _ending(self, member: Member) -> Flight[None]:
        """Return the end of a VM that is ENDING, and begin it unless it is under way."""
        if member.ending is None or member.ending.done:
            member.ending = Flight(self._finish(member))
            member.ending.join().addErrback(self._not_ended, member)
        return member.ending

    async def _finish(self, member: Member) -> None:
        context = self._context
        if member.booting is not None and not member.booting.done:
            member.booting.cancel()
        written = context.store.update_pool(member.record)
        context.note(written, f"the end of vm {member.record.instance_id}")
        await written  # a daemon that is killed now must not leave a VM that is gone for idle
        await member.machine.tear_down()
        await context.store.delete_pool(member.id)
        self.members.pop(member.id, None)
        self.adjust()

    def _not_ended(self, failure: Failure, member: Member) -> None:
        if not self._context.stopping:
            _log.error(
                "vm {vm} of the pool is not destroyed yet: {error}; the next pass tries again",
                vm=member.record.instance_id or member.record.token,
                error=failure.value,
            )

    # ---- records

    def _member(self, record: PoolRecord) -> Member:
        return Member(record, lambda member: PodMachine(self._context, _PoolVm(self, member)))

    def update(self, member: Member, record: PoolRecord) -> Deferred[None]:
        """Make `record` the member's; fires once it is on the disk.

        For a VM that is no longer the pool's nothing is written."""
        if self.members.get(member.id) is not member:
            return succeed(None)
        member.record = record
        return self._context.store.update_pool(record)


class _PoolVm:
    """Keeps the record of a VM that is the pool's; a `VmOwner`."""

    def __init__(self, pool: Pool, member: Member) -> None:
        self._pool = pool
        self._member = member

    @property
    def facts(self) -> VmFacts:
        return VmFacts.of(self._member.record)

    def note(self, facts: VmFacts) -> None:
        self._member.record = facts.put_into(self._member.record)

    def write(self, facts: VmFacts) -> Deferred[None]:
        return self._pool.update(self._member, facts.put_into(self._member.record))
