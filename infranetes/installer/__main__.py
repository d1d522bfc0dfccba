# SPDX-License-Identifier: Apache-2.0
"""`python3 -m infranetes.installer`: what the image's container runs on each node.

`run` brings the node to what is wanted of it, and keeps it there; it never ends by itself. `present` and
`absent` do so once. A signal ends it at any instant, and removes nothing: what is wanted is said by arguments
and labels alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infranetes.installer import layout
from infranetes.installer.cluster import INSTALL, VMS, ApiServer, DaemonSet, Node
from infranetes.installer.node import ChrootPrograms, Files
from infranetes.installer.steps import Installer, Options
from infranetes.installer.trees import Trees
from infranetes.pods.store.states import SandboxState
from infranetes.pods.store.store import FILE
from infranetes_common.errors import ConfigError, InfranetesError, Unavailable

_ROOT = Path("/")
_PASS_SECONDS = 30.0
_POLL_SECONDS = 2.0
_ENDED = (SandboxState.STOPPED.value, SandboxState.LOST.value)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m infranetes.installer", description=__doc__)
    parser.add_argument("command", choices=("run", "present", "absent", "remove-everywhere"))
    parser.add_argument(
        "--root", type=Path, default=_ROOT, metavar="DIRECTORY", help="the node's root (%(default)s)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="infranetes.toml, with @NODE@ and the like"
    )
    parser.add_argument("--node", default=os.uname().nodename, metavar="NAME", help="the node's name")
    parser.add_argument("--state", choices=("present", "absent"), default="present", help="what `run` wants")
    parser.add_argument("--cni", action="store_true", help="VMs may be in the CNI's network")
    parser.add_argument("--csi", action="store_true", help="pods may have persistent volumes")
    parser.add_argument(
        "--leave-kubelet", action="store_true", help="somebody else points kubelet at the socket"
    )
    parser.add_argument("--end-pods", action="store_true", help="removing ends VMs that still run")
    parser.add_argument("--node-ip", default="", metavar="ADDRESS", help="the node's address")
    parser.add_argument(
        "--metrics-token", type=Path, metavar="FILE", help="the token that metrics are asked for by"
    )
    parser.add_argument(
        "--daemonset", default="", metavar="NAMESPACE/NAME", help="whose pods `remove-everywhere` tells"
    )
    parser.add_argument(
        "--install-label", default=INSTALL, metavar="LABEL", help="of nodes; `absent` has one removed"
    )
    parser.add_argument("--labels", action="store_true", help="read and set the labels of the node's object")
    parser.add_argument(
        "--ready", type=Path, metavar="FILE", help="a file that is there while all is as wanted"
    )
    parser.add_argument("--guest", type=Path, default=Path(f"{layout.HOME}/guest-image"), metavar="DIRECTORY")
    return parser


def installer(options: argparse.Namespace) -> Installer:
    """Return the installer of a node.

    :raise ConfigError: the configuration can't be read, or this is no tree."""
    tree = os.environ.get("INFRANETES_TREE", "")
    if not tree:
        raise ConfigError(
            "$INFRANETES_TREE does not say which tree to install: the image's configuration does"
        )
    configuration, token = _read(options.config), _read(options.metrics_token).strip()
    files = Files(options.root)
    own = f"{layout.tree(Path(tree).name)}/usr/bin"
    programs = ChrootPrograms(options.root)

    def answers(seconds: float) -> None:
        command = (f"{own}/python3", "-I", "-B", "-m", "infranetes.installer.probe")
        programs.run(*command, layout.SOCKET, str(seconds), seconds=seconds + 60.0)

    return Installer(
        files,
        programs,
        Trees(files, Path(tree), options.guest, processes),
        Options(
            configuration,
            options.node,
            options.node_ip,
            token,
            cni=options.cni,
            csi=options.csi,
            manage_kubelet=not options.leave_kubelet,
            end_pods=options.end_pods,
        ),
        answers,
        lambda: running_pods(files),
        say,
    )


def _read(path: Path | None) -> str:
    try:
        return path.read_text() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None


def processes() -> set[str]:
    """Return the paths of the programs that the node's processes execute."""
    found: set[str] = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(directory / "exe"))
    return found


def running_pods(files: Files) -> int:
    """Return how many pods of the node are VMs, by the daemon's records."""
    path = files.path(f"{layout.STATE[0]}/{FILE}")
    if not path.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return sum(state not in _ENDED for (state,) in connection.execute("SELECT state FROM sandboxes"))
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return 0
        raise InfranetesError(f"the daemon's records in {path} can't be read: {error}") from error


def say(words: str) -> None:
    """Tell the pod's log."""
    print(f"infranetes-installer: {words}", flush=True)


class Keeper:
    """Brings the node to what is wanted, again and again.

    :param node: its object; None: labels are neither read nor set.
    """

    def __init__(
        self, installer: Installer, node: Node | None, state: str, ready: Path | None, label: str = INSTALL
    ) -> None:
        self._install_label = label
        self._installer = installer
        self._node = node
        self._state = state
        self._ready = ready
        self._show(ready=False)  # an installer before this one may have said so

    def once(self) -> bool:
        """Bring it there; return whether it is. What keeps it from that is told."""
        try:
            if self._wanted() == "absent":
                self._label(None)
                self._installer.absent()
            else:
                self._installer.present()
                self._label("true")
        except (InfranetesError, OSError) as error:
            say(str(error))
            self._show(ready=False)
            return False
        self._show(ready=True)
        return True

    def _wanted(self) -> str:
        """Return what is wanted: the node's own label is stronger than what all nodes are to have."""
        if (
            self._state == "present"
            and self._node is not None
            and self._node.labels().get(self._install_label) == "absent"
        ):
            return "absent"
        return self._state

    def _label(self, value: str | None) -> None:
        if self._node is not None and self._node.labels().get(VMS) != value:
            self._node.set_label(VMS, value)

    def _show(self, ready: bool) -> None:
        if self._ready is not None:
            if ready:
                self._ready.touch()
            else:
                self._ready.unlink(missing_ok=True)


def remove_everywhere(daemonset: DaemonSet, sleep: Callable[[float], None] = time.sleep) -> None:
    """Tell all nodes' installers to remove, and wait until they have.

    The API server may be away meanwhile: where kubelet is a part of k3s, it is restarted with it.

    :raise InfranetesError: the API server refuses to tell them, or is away at the beginning."""
    daemonset.want("absent")
    told = ""
    while waiting := _waiting(daemonset):
        if waiting != told:
            say(told := waiting)
        sleep(_POLL_SECONDS)
    say("every node is as it was")


def _waiting(daemonset: DaemonSet) -> str:
    try:
        return daemonset.waiting()
    except Unavailable as error:
        return str(error)


def passes(forever: bool) -> Iterator[None]:
    """Yield once, or again after each pause."""
    yield
    while forever:
        time.sleep(_PASS_SECONDS)
        yield


def main(arguments: Sequence[str] | None = None, wait: Callable[[bool], Iterator[None]] = passes) -> int:
    """Run the command and return its exit code: 1 if the node is not as wanted."""
    options = parser().parse_args(arguments)
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
    try:
        if options.command == "remove-everywhere":
            remove_everywhere(DaemonSet(options.daemonset, ApiServer(host, port)))
            return 0
        made = installer(options)
    except InfranetesError as error:
        say(str(error))
        return 1
    node = Node(options.node, ApiServer(host, port)) if options.labels else None
    state = options.state if options.command == "run" else options.command
    keeper = Keeper(made, node, state, options.ready, options.install_label)
    done = False
    for _ in wait(options.command == "run"):
        done = keeper.once()
    return int(not done)


if __name__ == "__main__":
    sys.exit(main())
