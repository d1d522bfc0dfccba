# SPDX-License-Identifier: Apache-2.0
"""VMs' network on the machine: a bridge that stands for the cloud's network, and a cable to each VM.

The machine has the gateway's address on the bridge, so it reaches every VM, and VMs reach each other without
it, as in a VPC.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NETWORK_CARD = "eth0"
LINK_LOCAL = "169.254.0.0/16"  # where clouds have their metadata services
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


def bridge_of(farm: Path) -> str:
    """Return the name of the bridge of the farm with that directory."""
    return f"infsim-{hashlib.sha256(os.fsencode(farm.resolve())).hexdigest()[:8]}"


def cable_of(bridge: str, id: str) -> str:
    """Return the name of the machine's end of the cable from a bridge to a VM.

    VMs of two farms may have the same id."""
    return f"infsim{hashlib.sha256(f'{bridge} {id}'.encode()).hexdigest()[:9]}"


def plug_in(lock: Path, bridge: str, cable: str, gateway: str, namespace: int | str) -> None:
    """Connect a network namespace to the bridge by a cable; the bridge is created if it does not exist.

    :param namespace: its name, or a process that has it.
    :param gateway: the machine's address there, with the length of its prefix.
    :raise OSError, subprocess.CalledProcessError: it can't be connected.
    """
    with _held(lock):
        made = []
        if not _exists(bridge):
            # The bridge has an address of its own, which would otherwise change with the cables.
            number = hashlib.sha256(bridge.encode()).hexdigest()
            card = ":".join(["02", *(number[at : at + 2] for at in range(0, 10, 2))])
            made = [f"link add {bridge} address {card} type bridge", f"link set {bridge} up"]
        ip(
            *made,
            f"address replace {gateway} dev {bridge}",
            f"link add {cable} type veth peer name {NETWORK_CARD} netns {namespace}",
            f"link set {cable} master {bridge} up",
        )
        if _FORWARDING.read_text().strip() != "1":
            _FORWARDING.write_text("1\n")


def unplug(lock: Path, bridge: str, cable: str) -> None:
    """Remove a VM's cable, and with the last one the bridge. Idempotent."""
    if not _exists(bridge):
        return
    with _held(lock):
        if _exists(cable):
            ip(f"link delete {cable}", check=False)
        if _exists(bridge) and not ip(f"link show master {bridge}").strip():
            ip(f"link delete {bridge}", check=False)


def _exists(link: str) -> bool:
    """Return whether this process's network namespace has the link; /sys may show another namespace."""
    return any(name == link for _, name in socket.if_nameindex())


def set_up(address: str, gateway: str) -> None:
    """Switch on the VM's network cards. Called in its network namespace.

    :param address: to be set, with the length of its prefix, and a default route by the gateway; "": neither.
    """
    addressed = [
        f"address add {address} dev {NETWORK_CARD}",
        f"route add default via {gateway.partition('/')[0]}",
        f"route add {LINK_LOCAL} dev {NETWORK_CARD}",
    ]
    ip("link set lo up", f"link set {NETWORK_CARD} up", *(addressed if address else ()))


def ip(*commands: str, namespace: str = "", check: bool = True) -> str:
    """Run these commands of the program `ip`, until one fails; return their output.

    :param namespace: the name of the network namespace that they are for; "": this process's.
    :raise subprocess.CalledProcessError: one fails.
    """
    # Not by `infranetes_common.commands`: each VM has such a process, which does without Twisted.
    inside = ["-n", namespace] if namespace else []
    done = subprocess.run(  # noqa: S603
        ["ip", *inside, "-batch", "-"],  # noqa: S607
        input="\n".join(commands),
        capture_output=True,
        text=True,
    )
    if check and done.returncode:
        words = ["ip", *inside, "; ".join(commands)]
        raise subprocess.CalledProcessError(done.returncode, words, stderr=done.stderr)
    return done.stdout


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
