"""The pool: VMs that are booted and wait for a pod.

What each state means, and why a VM is never used twice, stands in `states`. A VM of the pool has from the
beginning the id of the sandbox that it becomes, so nothing that the IaaS keeps of it (tags, names) and
nothing in its certificate's name changes when a pod claims it: it gets a new key and certificate, the
pod's host name and all else of its configuration over the channel.

    what happens              here                              the store                  the provider
    a size lacks one          BOOTING, its launch begins        pool: BOOTING              asked, by token
    it answers                IDLE                              pool: IDLE                 RUNNING
    a pod claims it           asked if it lives; gone from here one write: pool to         nothing
                              and a sandbox, in one turn        sandboxes, LAUNCHING
    the daemon is killed      the next one has what the store says: boots on, keeps, ends, or finishes the
                              pod's launch with that very VM
    found dead, or drained    ENDING, destroyed, then forgotten pool: ENDING, deleted      destroyed
    the sweep lists it        its token is known here, or among the sandboxes, at every instant
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from infranetes.pods.inventory import Sandbox
from infranetes.pods.launch import greet, running_vm, size_of, vm_spec
from infranetes.pods.node import Node
from infranetes.pods.poolconfig import PoolConfig
from infranetes.pods.pooled import Member, Pace, fits, wants_own_vm
from infranetes.pods.records import PoolRecord, new_id
from infranetes.pods.renewal import renew
from infranetes.pods.states import PoolState
from infranetes.pods.waits import Flight, go, settle, uncut, within
from infranetes.providers.interface import Instance, InstanceState, Size
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound

DRAINED = "pool_drained"  # the setting in the store
PROBE_SECONDS = 5.0  # what an idle VM's agent gets to answer before it counts as dead
MOST_FAILURES = 2  # looks in a row that an agent may miss
_log = Logger()


class Pool:
    """Keeps as many VMs of each size booted as the configuration says."""

    def __init__(self, node: Node, config: PoolConfig) -> None:
        self._node = node
        self._config = config
        self._pace = Pace(config.per_minute, config.retry)
        self._later: Any = None
        self._tidying = self._untidy = False
        self.members: dict[str, Member] = {}
        self.drained = False
        self.trouble = ""  # why the last launch failed; "": it did not

    # ---- the daemon's life

    def load(self, records: Iterable[PoolRecord], settings: Mapping[str, str]) -> None:
        """Take up what an earlier daemon left."""
        self.members = {record.id: Member(record) for record in records}
        self.drained = bool(settings.get(DRAINED))

    def provider_ready(self) -> None:
        """The provider has started: go on with what was under way, and fill up."""
        for member in list(self.members.values()):
            if member.state is PoolState.BOOTING and member.booting is None:
                self._boot(member)
            elif member.state is PoolState.ENDING:
                self.end(member, member.record.message)
        self.tidy()

    async def stop(self) -> None:
        """Let go; the VMs go on. What is under way is left for the next daemon."""
        if self._later is not None and self._later.active():
            self._later.cancel()
        for member in self.members.values():
            for flight in (member.booting, member.ending):
                if flight is not None and not flight.done:
                    flight.cancel()
            await self._disconnect(member)

    # ---- what others ask

    def owns(self, token: str) -> bool:
        """Whether a VM with this token is the pool's."""
        return any(member.record.token == token for member in self.members.values())

    def idle(self) -> list[Member]:
        """Those that a pod could have."""
        return [one for one in self.members.values() if one.state is PoolState.IDLE and not one.taken]

    def save(self, member: Member, record: PoolRecord) -> None:
        """Keep a changed record, as long as the VM is the pool's."""
        if self.members.get(member.id) is member:
            self._node.note(self._update(member, record), f"vm {record.instance_id} of the pool")

    async def claim(self, sandbox: Sandbox) -> bool:
        """Make an idle VM that fits the LAUNCHING sandbox's, whose id and token it then has; recorded.

        :return: False: there is none, and the sandbox is as it was.
        :raise InfranetesError: it could not be recorded."""
        config = sandbox.config
        if wants_own_vm(config.annotations):
            return False
        while (member := self._best(size_of(config))) is not None:
            alive, member.taken = False, True
            try:
                alive = await self._answers(member)
            finally:
                member.taken = alive
            if not alive:
                self.end(member, "its agent did not answer when a pod was to have it")
            elif await uncut(go(self._hand_over(member, sandbox))):
                return True
        return False

    def ended(self, instance: Instance) -> None:
        """The provider says that a VM is no longer executing."""
        for member in list(self.members.values()):
            if member.record.token == instance.token and member.taken:
                member.instance = instance  # whoever is about to have it will see
            elif member.record.token == instance.token:
                self.end(member, f"it ended by itself: {instance.detail or 'no reason known'}")

    async def check(self, by_token: Mapping[str, Instance]) -> None:
        """A pass: end what is dead, try again what could not be ended, and fill up.

        :param by_token: every VM that the provider lists."""
        checks = [go(self._check(member, by_token)) for member in self.idle()]
        for member in list(self.members.values()):
            if member.state is PoolState.ENDING and (member.ending is None or member.ending.done):
                self.end(member, member.record.message)
        await settle(checks)
        self.tidy()

    async def drain(self) -> list[Member]:
        """End all of them and make no more until `fill`; those that were ended, when they have."""
        self.drained = True
        await self._node.store.put_setting(DRAINED, "1")
        members = [member for member in self.members.values() if not member.taken]
        await settle([self.end(member, "the pool is drained").join() for member in members])
        return members

    async def fill(self) -> None:
        """Make VMs again after `drain`; returns at once."""
        await self._node.store.put_setting(DRAINED, "")
        self.drained = False
        self.tidy()

    # ---- filling

    def tidy(self) -> None:
        """End what is too many, begin what is missing, as fast as is allowed."""
        self._untidy = True
        if self._tidying:
            return  # what was done here ended at once, and may call for more
        self._tidying = True
        try:
            while self._untidy and not self._node.stopping and self._node.ready.fired:
                self._untidy = False
                self._tidy()
        finally:
            self._tidying = False

    def _tidy(self) -> None:
        wanted = {} if self.drained else self._wanted()
        for size in {*wanted, *(member.size for member in self.members.values())}:
            members = [
                one for one in self.members.values() if one.size == size and one.state is not PoolState.ENDING
            ]
            spare = [one for one in members if not one.taken]
            for member in spare[: max(len(members) - wanted.get(size, 0), 0)]:
                self.end(member, "it is not wanted any more")
            for _ in range(wanted.get(size, 0) - len(members)):
                if not self._may_begin():
                    break
                self._begin(size)

    @property
    def wanted(self) -> int:
        """How many there are to be when it is full."""
        return 0 if self.drained else sum(self._wanted().values())

    def _wanted(self) -> dict[Size, int]:
        wanted: dict[Size, int] = {}
        for each in self._config.sizes:
            wanted[each.size] = wanted.get(each.size, 0) + each.count
        return wanted

    def _may_begin(self) -> bool:
        booting = sum(one.state is PoolState.BOOTING for one in self.members.values())
        if booting >= self._config.parallel:
            return False  # looked at again when one of them is done
        pause = self._pace.wait(self._node.clock.seconds())
        if pause and (self._later is None or not self._later.active()):
            self._later = self._node.clock.callLater(pause, self.tidy)
        return not pause

    def _begin(self, size: Size) -> None:
        self._pace.begun(self._node.clock.seconds())
        record = PoolRecord(
            id=new_id(),
            token=new_id(),
            state=PoolState.BOOTING,
            cpu_millis=size.cpu_millis,
            memory_bytes=size.memory_bytes,
            created_at=self._node.now(),
        )
        member = self.members[record.id] = Member(record)
        self._boot(member, new=True)

    def _boot(self, member: Member, new: bool = False) -> None:
        member.booting = Flight(go(self._booted(member, new)))
        member.booting.join().addErrback(lambda _: None)

    async def _booted(self, member: Member, new: bool) -> None:
        node = self._node
        began = node.clock.seconds()
        deadline = began + node.times.launch
        try:
            if new:
                await node.store.put_pool(member.record)
            spec = vm_spec(node, member, member.size)
            await running_vm(node, member, spec, lambda record: self._update(member, record), deadline)
            self._connect(member)
            await greet(node, member, deadline)
            await renew(node, member, lambda record: self._update(member, record))
            await self._update(member, member.record.to(PoolState.IDLE))
        except Exception as error:
            if not node.stopping:
                self._failed(member, error)
            return
        self.trouble = ""
        self._pace.succeeded()
        _log.info(
            "vm {vm} waits in the pool: {seconds:.2f} s",
            vm=member.record.instance_id,
            seconds=node.clock.seconds() - began,
        )
        self.tidy()

    def _failed(self, member: Member, error: Exception) -> None:
        if member.state is PoolState.ENDING:
            return  # that is why
        self.trouble = str(error) or type(error).__name__
        _log.warn("a VM for the pool could not be had: {error}", error=self.trouble)
        self._pace.failed(self._node.clock.seconds())
        self.end(member, self.trouble)

    # ---- claiming

    def _best(self, size: Size) -> Member | None:
        """The smallest idle one that fits, and of those the oldest."""
        fitting = [member for member in self.idle() if fits(size, member.record)]

        def waste(member: Member) -> tuple[int, int, int]:
            return member.record.memory_bytes, member.record.cpu_millis, member.record.created_at

        return min(fitting, key=waste, default=None)

    async def _hand_over(self, member: Member, sandbox: Sandbox) -> bool:
        """Whether the VM is the sandbox's now; it is not where it began to end in this moment."""
        had = member.record
        fields = ("id", "token", "instance_id", "address", "agent_host", "agent_port")
        kept = {name: getattr(had, name) for name in (*fields, "certificate_until", "certificate_key")}
        record = attrs.evolve(sandbox.record, **kept)
        try:
            await self._node.store.claim(record)
        except FailedPrecondition as error:
            _log.warn("{error}", error=error)
            if member.state is not PoolState.ENDING:
                self.members.pop(member.id, None)
            return False
        except InfranetesError:
            member.taken = False
            raise
        self.members.pop(member.id, None)
        self._node.inventory.become(sandbox, record)
        sandbox.instance, sandbox.client = member.instance, member.client
        _log.info("sandbox {sandbox} has vm {vm} from the pool", sandbox=sandbox.id, vm=had.instance_id)
        self.tidy()
        return True

    async def _answers(self, member: Member) -> bool:
        """Whether the agent of an idle VM answers, and as who it should."""
        self._connect(member)
        assert member.client is not None
        try:
            info = await member.client.info(within=PROBE_SECONDS)
        except InfranetesError as error:
            _log.info("vm {vm} of the pool: {error}", vm=member.record.instance_id, error=error)
            return False
        return bool(info.sandbox_id == member.id)

    async def _check(self, member: Member, by_token: Mapping[str, Instance]) -> None:
        instance = by_token.get(member.record.token)
        if instance is None and not await self._is_there(member):
            self.end(member, "the provider no longer has it")
            return
        if instance is not None:
            member.instance = instance
            if instance.state is InstanceState.ENDED:
                self.ended(instance)
                return
        member.failures = 0 if await self._answers(member) else member.failures + 1
        if member.failures >= MOST_FAILURES and not member.taken:
            self.end(member, "its agent does not answer")

    async def _is_there(self, member: Member) -> bool:
        try:
            getting = self._node.provider.get(member.record.instance_id)
            await within(self._node.clock, self._node.times.destroy, getting, "looking for a VM of the pool")
        except NotFound:
            return False
        except InfranetesError:
            pass  # not known: the next pass asks again
        return True

    def _connect(self, member: Member) -> None:
        if member.client is None:
            record = member.record
            member.client = self._node.connect(member.id, record.agent_host, record.agent_port)

    async def _disconnect(self, member: Member) -> None:
        client, member.client = member.client, None
        if client is not None:
            try:
                await client.close()
            except (InfranetesError, CancelledError) as error:
                _log.debug("an agent's connection failed to close: {error}", error=error)

    # ---- ending

    def end(self, member: Member, reason: str) -> Flight[None]:
        """Destroy the VM and forget it; one that can't be destroyed is tried again at the next pass."""
        if self.members.get(member.id) is not member:
            return Flight(go(_nothing()))  # claimed, or gone already
        if member.ending is None or member.ending.done:
            _log.info(
                "vm {vm} leaves the pool: {reason}",
                vm=member.record.instance_id or member.record.token,
                reason=reason,
            )
            if member.state is not PoolState.ENDING:
                member.record = member.record.to(PoolState.ENDING, message=reason)
            member.ending = Flight(go(self._finish(member)))
            member.ending.join().addErrback(self._not_ended, member)
        return member.ending

    async def _finish(self, member: Member) -> None:
        node = self._node
        node.note(node.store.update_pool(member.record), f"the end of vm {member.record.instance_id}")
        if member.booting is not None and not member.booting.done:
            member.booting.cancel()
        await self._disconnect(member)
        if member.asked is not None:
            answered = await settle(
                [go(within(node.clock, node.times.destroy, member.asked.join(), "the provider's answer"))]
            )
            if isinstance(answered[0], Instance) and not member.record.instance_id:
                member.record = attrs.evolve(member.record, instance_id=answered[0].id)
        await node.destroy_vm(member)
        await node.store.delete_pool(member.id)
        self.members.pop(member.id, None)
        self.tidy()

    def _not_ended(self, failure: Any, member: Member) -> None:
        if not self._node.stopping:
            _log.error(
                "vm {vm} of the pool is not destroyed yet: {error}; the next pass tries again",
                vm=member.record.instance_id or member.record.token,
                error=failure.value,
            )

    def _update(self, member: Member, record: PoolRecord) -> Any:
        """Make `record` the member's, unless it is being ended already: then only what else it says."""
        if member.state is PoolState.ENDING:
            record = attrs.evolve(record, state=PoolState.ENDING, message=member.record.message)
        member.record = record
        return self._node.store.update_pool(record)


async def _nothing() -> None:
    pass
