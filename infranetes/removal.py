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
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from infranetes import config
from infranetes.config import Config
from infranetes.hostports.hostports import table_name
from infranetes.pods.states import SandboxState
from infranetes.pods.store import FILE
from infranetes.providers.qemu import bridge, uids
from infranetes.providers.qemu.paths import ProviderPaths
from infranetes.providers.qemu.process import pids_by_argument
from infranetes.providers.qemu.record import VmRecords
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.overlay import NODE_MAC

CONFIGURATION = "/etc/infranetes/infranetes.toml"
LOCAL_PROVIDERS = ("qemu", "simulated")  # whose VMs are processes of the node
_MACS = (bridge.MAC, NODE_MAC)  # of the pods' bridges, and of the overlay's devices
_END_SECONDS, _PAUSE = 10.0, 0.05
_PORT_SECONDS = 3.0  # that the kernel may need to remove the port of a VM that has ended
_COMMAND_SECONDS = 30.0
# A VM may be left of sandboxes in all states but this one.
_VMS_ELSEWHERE = """
    SELECT provider, instance_id FROM sandboxes WHERE instance_id != '' AND state != ?
    UNION SELECT provider, instance_id FROM pool WHERE instance_id != ''
"""


def vms_elsewhere(state_dir: Path) -> dict[str, list[str]]:
    """Return the ids of the VMs that a provider has outside of this node, by the provider's name."""
    found: dict[str, list[str]] = {}
    path = state_dir / FILE
    if not path.exists():
        return found
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for provider, id in connection.execute(_VMS_ELSEWHERE, (SandboxState.STOPPED.value,)):
            if provider not in LOCAL_PROVIDERS:
                found.setdefault(provider, []).append(id)
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


def remove_network(state_dir: Path) -> None:
    """Delete the pods' bridges, the overlay's devices, and the nftables tables of both and of host ports.

    A bridge to which something is still connected stays: it belongs to another daemon, whose VMs run.
    """
    links = _unused_links()
    tables = {table_name(state_dir)}
    for link in links:
        tables |= {f"infranetes_{link}", f"infranetes_{link}_firewalls"}
    for family, name in _tables():
        if name in tables:
            _try("nft", "delete", "table", family, name)
    for link in links:
        _try("ip", "link", "delete", "dev", link)


def _unused_links() -> list[str]:
    """Return the names of our links, except bridges with ports. Waits for ports that are disappearing."""
    until = time.monotonic() + _PORT_SECONDS
    while True:
        found = json.loads(_said("ip", "-j", "link"))
        ours = [link["ifname"] for link in found if link.get("address") in _MACS]
        used = {link["master"] for link in found if "master" in link}
        if used.isdisjoint(ours) or time.monotonic() > until:
            return [link for link in ours if link not in used]
        time.sleep(_PAUSE)


def _tables() -> Iterator[tuple[str, str]]:
    for entry in json.loads(_said("nft", "-j", "list", "tables"))["nftables"]:
        if table := entry.get("table"):
            yield table["family"], table["name"]


def _said(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_SECONDS).stdout  # noqa: S603


def _try(*command: str) -> None:
    try:
        _said(*command)
    except subprocess.CalledProcessError as error:
        _say(f"{' '.join(command)}: {error.stderr.decode(errors='replace').strip()}")


def _say(words: str) -> None:
    print(f"infranetes: {words}", file=sys.stderr)


def _state_dir(file: str) -> Path:
    """Return the configured state directory, or the default one if the configuration can't be read."""
    try:
        return config.load(file if Path(file).exists() else None, {}).state_dir
    except InfranetesError as error:
        default = Config().state_dir
        _say(f"{error}. The VMs that have records in {default} are ended")
        return default


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if something could not be ended."""
    parser = argparse.ArgumentParser(prog="python3 -m infranetes.removal", description=__doc__)
    parser.add_argument("--config", default=CONFIGURATION, metavar="FILE")
    state_dir = _state_dir(parser.parse_args(arguments).config)
    failed = False
    try:
        for provider, ids in sorted(vms_elsewhere(state_dir).items()):
            _say(f"VMs of {provider} still run and cost money; end them there: {', '.join(sorted(ids))}")
    except sqlite3.Error as error:
        _say(f"VMs at clouds may still run: {state_dir / FILE} can't be read: {error}")
        failed = True
    for step in (end_vms, remove_network):
        try:
            step(state_dir)
        except (OSError, subprocess.SubprocessError, ValueError, InfranetesError) as error:
            _say(str(error))
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
