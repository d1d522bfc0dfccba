# SPDX-License-Identifier: Apache-2.0
"""What the agent's answers mean. They come from the guest: each is checked, and what it says is bounded."""

from __future__ import annotations

import ipaddress

import attrs

from infranetes.machines.agentless.guest_agent.protocol import Answer, Nonsense, Refusal
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotOffered, Unavailable

MAX_WORDS = 300  # characters of a message of the guest's
MAX_CARDS, MAX_ADDRESSES = 300, 64  # the latter of each card
WINDOWS = "mswindows"  # what guest-get-osinfo calls it

_INT32, _UINT32 = 2**31, 2**32
_SIGNALS = 64


class NotStarted(InfranetesError):
    """A program was not started.

    :ivar exit_code: as a shell's then. :ivar shown: what a shell would write."""

    def __init__(self, program: str, exit_code: int, why: str) -> None:
        super().__init__(f"{program[:200]}: {why}")
        self.exit_code = exit_code
        self.shown = f"{program}: {why}\n".encode()


class CommandLost(Unavailable):
    """The agent does not know of a command that it has started."""


@attrs.frozen
class Ended:
    """A command that has ended. :ivar truncated: there was more output than the agent keeps."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool


@attrs.frozen
class GuestCard:
    """A network card as the guest sees it, with its addresses and their prefixes' lengths."""

    name: str
    mac: str  # "" if it has none
    addresses: tuple[ipaddress.IPv4Interface | ipaddress.IPv6Interface, ...]


def words(text: str) -> str:
    """Return a text of the guest's, for people."""
    shown = "".join(character if character.isprintable() else " " for character in text[: 2 * MAX_WORDS])
    return shown if len(shown) <= MAX_WORDS else shown[:MAX_WORDS] + "…"


def checked(answer: Answer, command: str) -> Answer:
    """Return an answer that is no refusal.

    :raise NotOffered: the agent does not have the command, or may not execute it.
    :raise Unavailable: it executes few while file systems are frozen.
    :raise FailedPrecondition: any other refusal."""
    if answer.refusal is not None:
        raise refused(answer.refusal, command)
    return answer


def refused(refusal: Refusal, command: str) -> InfranetesError:
    """Return the error for a refusal."""
    text = words(refusal.text)
    if "frozen" in refusal.text:
        return Unavailable(f"the guest's file systems are frozen, so its agent refuses {command}: {text}")
    if refusal.kind == "CommandNotFound":
        return NotOffered(
            f"the guest's QEMU guest agent does not offer {command}: it is of an early release, or its "
            f"configuration blocks that (block-rpcs, BLACKLIST_RPC); allow it there, or use SSH ({text})"
        )
    return FailedPrecondition(f"the guest's QEMU guest agent refuses {command}: {text}")


def started(answer: Answer, program: str) -> int:
    """Return the number of the process that guest-exec has started.

    :raise NotStarted: there is no such program, or it can't be executed. As `checked` otherwise."""
    if answer.refusal is not None:
        for words_of_it, code in (("No such file or directory", 127), ("Permission denied", 126)):
            if words_of_it in answer.refusal.text:
                raise NotStarted(program, code, words_of_it)
    return whole(fields_of(checked(answer, "guest-exec").value).get("pid"))


def fields_of(value: object) -> dict[str, object]:
    """Return the fields of an object. :raise Nonsense: it is none."""
    if not isinstance(value, dict):
        raise Nonsense("something else in place of an object")
    return value


def items_of(value: object) -> list[object]:
    """Return the items of a list. :raise Nonsense: it is none."""
    if not isinstance(value, list):
        raise Nonsense("something else in place of a list")
    return value


def whole(value: object, most: int = 2**63 - 1) -> int:
    """Return a number from 0 on. :raise Nonsense: it is none, or too large."""
    if type(value) is not int or not 0 <= value <= most:
        raise Nonsense("something else in place of a number")
    return value


def commands(answer: Answer) -> frozenset[str]:
    """Return the commands that guest-info says are allowed."""
    fields = fields_of(checked(answer, "guest-info").value)
    listed = map(fields_of, items_of(fields.get("supported_commands")))
    return frozenset(str(command.get("name"))[:100] for command in listed if command.get("enabled") is True)


def system(answer: Answer) -> str | None:
    """Return the operating system that guest-get-osinfo names, such as debian; None: it can't tell."""
    if answer.refusal is not None:
        return None
    name = fields_of(answer.value).get("id")
    return name[:100] if isinstance(name, str) else None


def ended(answer: Answer, most: int) -> Ended | None:
    """Return the end that guest-exec-status tells; None: the command runs. :param most: bytes of each stream.

    :raise CommandLost: the agent does not know of it."""
    if answer.refusal is not None:
        raise CommandLost(
            "what became of the command is not known: the guest's QEMU guest agent was started again "
            f"meanwhile ({words(answer.refusal.text)})"
        )
    fields = fields_of(answer.value)
    if fields.get("exited") is not True:
        return None
    stdout, stderr = (answer.bytes_of(fields.get(name, ""))[:most] for name in ("out-data", "err-data"))
    truncated = fields.get("out-truncated") is True or fields.get("err-truncated") is True
    return Ended(_exit_code(fields), stdout, stderr, truncated)


def _exit_code(fields: dict[str, object]) -> int:
    if "signal" in fields:
        number = whole(fields["signal"], _UINT32)
        if number <= _SIGNALS:
            return 128 + number
        return number - _UINT32 if number >= _INT32 else number  # an exception of Windows
    number = fields.get("exitcode", 0)  # type: ignore[assignment]
    if type(number) is not int or not -_INT32 <= number < _UINT32:
        raise Nonsense("something else in place of an exit code")
    return number - _UINT32 if number >= _INT32 else number  # Windows' codes have no sign


def cards(answer: Answer) -> list[GuestCard]:
    """Return what guest-network-get-interfaces lists. What makes no sense in it is left out."""
    listed_cards = []
    for item in items_of(checked(answer, "guest-network-get-interfaces").value)[:MAX_CARDS]:
        fields = fields_of(item)
        listed = items_of(fields.get("ip-addresses", []))[:MAX_ADDRESSES]
        addresses = tuple(address for address in map(_address, map(fields_of, listed)) if address is not None)
        listed_cards.append(
            GuestCard(
                words(str(fields.get("name", ""))), words(str(fields.get("hardware-address", ""))), addresses
            )
        )
    return listed_cards


def _address(fields: dict[str, object]) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface | None:
    address, prefix = fields.get("ip-address"), fields.get("prefix")
    if not isinstance(address, str) or type(prefix) is not int:
        return None
    try:
        return ipaddress.ip_interface((address[:64].partition("%")[0], prefix))
    except ValueError:
        return None
