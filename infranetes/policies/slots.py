# SPDX-License-Identifier: Apache-2.0
"""Sets of pods' addresses as the bits of integers, so that sets of thousands are united in microseconds.

Each address of a pod gets its own number, a slot, for as long as the pod has it. Slots are not reused while a
set that contains them is in use, so the meaning of a set never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from infranetes.kubernetes.fields import Name
from infranetes.policies.objects import NamedPort, Pod, Steps

Mask = int  # a set of slots: bit N is set if slot N is in it

STEP = 2000  # slots handled at a time
_BITS = [tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256)]


class Slots:
    """The slots of all pods."""

    def __init__(self) -> None:
        self._addresses: list[int] = []  # by slot
        self._ports: list[tuple[NamedPort, ...]] = []  # the pod's ports, by slot
        self._of: dict[Name, tuple[int, ...]] = {}
        self._pods: dict[Name, tuple[tuple[int, ...], tuple[NamedPort, ...]]] = {}
        self._free: list[int] = []
        self._left: list[int] = []  # freed by their pods, but sets in use may still contain them

    def mask(self, name: Name) -> Mask:
        """Return a pod's slots as a set."""
        return mask(self._of.get(name, ()))

    def of(self, name: Name) -> tuple[int, ...]:
        """Return a pod's slots as a tuple."""
        return self._of.get(name, ())

    def put(self, pod: Pod) -> None:
        """Give a pod its slots: new ones, if its addresses or ports have changed."""
        has = (pod.addresses, pod.ports)
        if self._pods.get(pod.name) != has:
            self.remove(pod.name)
            self._pods[pod.name] = has
            self._of[pod.name] = tuple(self._slot(address, pod.ports) for address in pod.addresses)

    def remove(self, name: Name) -> None:
        """Free a pod's slots. Idempotent."""
        if self._pods.pop(name, None) is not None:
            self._left += self._of.pop(name)

    def _slot(self, address: int, ports: tuple[NamedPort, ...]) -> int:
        if self._free:
            slot = self._free.pop()
            self._addresses[slot], self._ports[slot] = address, ports
        else:
            slot = len(self._addresses)
            self._addresses.append(address)
            self._ports.append(ports)
        return slot

    def reuse(self) -> Mask:
        """Make the freed slots available to other pods, and return them.

        The caller must drop all sets that contain one of them."""
        left, self._left = self._left, []
        self._free += left
        return mask(left)

    def addresses(self, chosen: Mask) -> Steps[set[int]]:
        """Return the addresses of slots, in small steps."""
        found: set[int] = set()
        for number, slot in enumerate(slots(chosen), 1):
            found.add(self._addresses[slot])
            if number % STEP == 0:
                yield
        return found

    def having(self, chosen: Mask, meant: Callable[[NamedPort], bool]) -> Steps[dict[int, Mask]]:
        """Return, by port number, the slots in `chosen` whose pods have a matching port, in small steps.

        :param meant: returns whether a port matches."""
        found: dict[int, list[int]] = {}
        for count, slot in enumerate(slots(chosen), 1):
            for each in self._ports[slot]:
                if meant(each):
                    found.setdefault(each.number, []).append(slot)
            if count % STEP == 0:
                yield
        made = {}
        for port, its in found.items():
            made[port] = mask(its)
            yield
        return made

    def within(self, chosen: Mask, holds: Callable[[int], bool]) -> Steps[Mask]:
        """Return the slots in `chosen` for whose address `holds` returns True, in small steps."""
        found = []
        for number, slot in enumerate(slots(chosen), 1):
            if holds(self._addresses[slot]):
                found.append(slot)
            if number % STEP == 0:
                yield
        return mask(found)


def mask(chosen: Iterable[int]) -> Mask:
    """Return slots as a set."""
    its = list(chosen)
    found = bytearray(max(its, default=-1) // 8 + 1)
    for slot in its:
        found[slot >> 3] |= 1 << (slot & 7)
    return int.from_bytes(found, "little")


def slots(chosen: Mask) -> Iterator[int]:
    """Yield the slots of a set in ascending order."""
    for place, byte in enumerate(chosen.to_bytes((chosen.bit_length() + 7) // 8, "little")):
        for bit in _BITS[byte]:
            yield place * 8 + bit
