# SPDX-License-Identifier: Apache-2.0
"""What the removal of the package ends: QEMU's VMs, and the pods' networks on the node.

The package's maintainer script runs ``python3 -m infranetes.removal`` after it has stopped the daemon. VMs
outlive the daemon, and without the package nothing would find them again. VMs at a cloud are only named, so
that somebody ends them there. This is a program of its own without a reactor, so it may wait and sleep.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from infranetes import config
from infranetes.config import Config
from infranetes.firewalls.agent_ports import FAMILY
from infranetes.firewalls.agent_ports import table_name as agents_table
from infranetes.hostports.hostports import table_name
from infranetes.hostports.table import Routes, is_open, localnet_of, script, write_route_localnet
from infranetes.pods.sleeping.probe_table import table_name as probes_table
from infranetes.pods.store.states import SandboxState
from infranetes.pods.store.store import FILE
from infranetes.providers.cloud.interface import TOKEN
from infranetes.providers.qemu.cgroups import placement
from infranetes.providers.qemu.host import uids
from infranetes.providers.qemu.network import bridge
from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes.providers.qemu.vm.record import VmRecords
from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.overlay import NODE_MAC

CONFIGURATION = "/etc/infranetes/infranetes.toml"
LOCAL_PROVIDERS = ("qemu", "simulated")  # whose VMs are processes of the node
_MACS = (bridge.MAC, NODE_MAC)  # of the pods' bridges, and of the overlay's devices
_END_SECONDS, _PAUSE = 10.0, 0.05
_PORT_SECONDS = 3.0  # that the kernel may need to remove the port of a VM that has ended
_COMMAND_SECONDS = 30.0
# A VM may be left of sandboxes in all states but these.
_WITHOUT_VM = (SandboxState.STOPPED.value, SandboxState.VACANT.value)
_VMS = """
    SELECT provider, instance_id, token FROM sandboxes WHERE state NOT IN (?, ?)
    UNION SELECT provider, instance_id, token FROM pool
"""

_T = TypeVar("_T")


def vms_elsewhere(state_dir: Path) -> dict[str, list[str]]:
    """Return the VMs that a provider has, or may have, outside of this node, by the provider's name.

    Each VM is named by its id, or by its tag if the provider had not answered yet when the daemon ended."""
    found: dict[str, list[str]] = {}
    path = state_dir / FILE
    if not path.exists():
        return found
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for provider, id, token in connection.execute(_VMS, _WITHOUT_VM):
            if provider not in LOCAL_PROVIDERS:
                found.setdefault(provider, []).append(id or f"the one tagged {TOKEN}={token}")
    return found


def end_vms(state_dir: Path) -> int:
    """End QEMU's VMs of the daemon that has this state directory; return how many ran.

    :raise Unavailable: some do not end.
    """
    records = VmRecords(ProviderPaths(state_dir / "qemu", Path()).vms).read()
    names = [record.process_name for record in records]
    ran = len(pids_by_argument(names))
    until = time.monotonic() + _END_SECONDS
    while (left := pids_by_argument(names)) and time.monotonic() < until:
        for pid in (pid for pids in left.values() for pid in pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)
    troubles = [f"{name} does not end" for name in left]
    for record in records:
        try:
            if record.uid:  # a QEMU that its guest had taken over may have started others
                uids.kill_processes(record.uid)
        except Unavailable as error:
            troubles.append(str(error))
    if troubles:
        raise Unavailable("; ".join(troubles))
    return ran


def end_slice(state_dir: Path) -> None:
    """Have systemd forget the slice in which VMs were that count in no pod, which it keeps when it is empty.

    One in which there still are VMs is another daemon's, too, and stays.

    :raise Unavailable: systemd does not end it."""
    if not placement.BOOTED.is_dir() or shutil.which("systemctl") is None:
        return
    until = time.monotonic() + _END_SECONDS
    while _systemd("list-units", "--no-legend", "--plain", f"{placement.SCOPES}*.scope").strip():
        if time.monotonic() > until:
            return
        time.sleep(_PAUSE)
    if _systemd("show", "--property=ActiveState", placement.SLICE).strip() == b"ActiveState=active":
        _systemd("stop", placement.SLICE)


def _systemd(*words: str) -> bytes:
    # The installer's container sees the node's systemd from the node's root, which is not its own.
    command = Command(("systemctl", *words), _COMMAND_SECONDS, environment={"SYSTEMD_IGNORE_CHROOT": "1"})
    return thd_check(command)


def remove_network(state_dir: Path) -> None:
    """Delete the pods' bridges, the overlay's devices, and the nftables tables of both, of host ports and of
    agents' ports.

    A bridge to which something is still connected stays: it belongs to another daemon, whose VMs run.

    :raise Unavailable: something could not be deleted. Everything else is."""
    troubles: list[str] = []

    def attempt(work: Callable[[], _T]) -> _T | None:
        try:
            return work()
        except (OSError, ValueError, InfranetesError) as error:
            troubles.append(str(error))
            return None

    links = attempt(_unused_links) or []
    kinds = ("", "_firewalls", "_shares", "_fragments")
    tables = {f"infranetes_{link}{kind}" for link in links for kind in kinds} | {probes_table(state_dir)}
    for link in links:  # before the tables, which protect them
        attempt(partial(_output, "ip", "link", "delete", "dev", link))
    for family, name in attempt(_tables) or []:
        if (family, name) == ("ip", table_name(state_dir)):
            attempt(partial(_end_host_ports, name))
        elif name in tables or (family, name) == (
            FAMILY,
            agents_table(state_dir),
        ):
            attempt(partial(_output, "nft", "delete", "table", family, name))
    if troubles:
        raise Unavailable("; ".join(troubles))


def _end_host_ports(name: str) -> None:
    """Set route_localnet back where the daemon has set it, then delete the table of the host ports.

    Of the table, what guards 127.0.0.1 stays while route_localnet is still 1: another program has set it, or
    it can't be set back.

    :raise Unavailable: it can't be set back."""
    localnet = localnet_of(_output("nft", "-j", "list", "table", "ip", name))
    troubles = []
    for interface in (each for each, ours in localnet.items() if ours):
        try:
            write_route_localnet(interface, "0")
        except OSError as error:
            troubles.append(f"route_localnet of {interface} can't be set back to 0: {error.strerror}")
    left = {interface: ours for interface, ours in localnet.items() if is_open(interface)}
    if left:
        _output("nft", "-f", "-", stdin=script(name, {}, Routes(), left).encode())
        _say(
            f"the nftables table ip {name} stays: it keeps other machines from what listens on 127.0.0.1, "
            f"because route_localnet is 1 for {', '.join(sorted(left))}"
        )
    else:
        _output("nft", "delete", "table", "ip", name)
    if troubles:
        raise Unavailable("; ".join(troubles))


def _unused_links() -> list[str]:
    """Return the names of our links, except bridges with ports. Waits for ports that are disappearing."""
    if shutil.which("ip") is None:  # then there are none
        return []
    until = time.monotonic() + _PORT_SECONDS
    while True:
        found = json.loads(_output("ip", "-j", "link"))
        ours = [link["ifname"] for link in found if link.get("address") in _MACS]
        used = {link["master"] for link in found if "master" in link}
        if used.isdisjoint(ours) or time.monotonic() > until:
            return [link for link in ours if link not in used]
        time.sleep(_PAUSE)


def _tables() -> list[tuple[str, str]]:
    """Return the family and the name of each nftables table."""
    if shutil.which("nft") is None:
        return []
    listed = json.loads(_output("nft", "-j", "list", "tables"))["nftables"]
    return [(entry["table"]["family"], entry["table"]["name"]) for entry in listed if "table" in entry]


def _output(*command: str, stdin: bytes = b"") -> bytes:
    """Run a program, and return its standard output.

    :raise InfranetesError: it fails, or has not ended after `_COMMAND_SECONDS`."""
    return thd_check(Command(command, _COMMAND_SECONDS, stdin))


def _say(words: str) -> None:
    print(f"infranetes: {words}", file=sys.stderr)


def _configuration(file: str) -> Config:
    """Return the configuration, or the default one if it can't be read."""
    try:
        return config.load(file if Path(file).exists() else None, {})
    except InfranetesError as error:
        default = Config()
        _say(f"{error}. The VMs that have records in {default.state_dir} are ended")
        return default


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if something could not be ended."""
    parser = argparse.ArgumentParser(prog="python3 -m infranetes.removal", description=__doc__)
    parser.add_argument("--config", default=CONFIGURATION, metavar="FILE")
    state_dir = _configuration(parser.parse_args(arguments).config).state_dir
    failed = False
    try:
        for provider, vms in sorted(vms_elsewhere(state_dir).items()):
            _say(f"VMs of {provider} may still run and cost money; end them there: {', '.join(sorted(vms))}")
    except sqlite3.Error as error:
        _say(f"VMs at clouds may still run: {state_dir / FILE} can't be read: {error}")
        failed = True
    for step in (end_vms, end_slice, remove_network):
        try:
            step(state_dir)
        except (OSError, ValueError, InfranetesError) as error:
            _say(str(error))
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
