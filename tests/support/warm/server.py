# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.support.warm.server LISTENER LIFE``: import our programs, and fork one for each request.

LISTENER is a listening socket, LIFE a pipe at whose end this ends; both are numbers of files. What is
imported must neither start a thread nor install a reactor, which a fork can't take along.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading

IMPORTED = (
    "infranetes.ctl.cli",
    "infranetes.flexvolume.cli",
    "infranetes.providers.cloud.aws",
    "infranetes.providers.cloud.azure",
    "infranetes.providers.cloud.gcp",
    "infranetes.providers.cloud.openstack",
    "infranetes.providers.cloud.vsphere",
    "infranetes.providers.qemu",
    "infranetes.publish.command",
    "infranetes.service",
    "infranetes_simulation.farm.__main__",
    "infranetes_simulation.provider",
    "twisted.scripts.twistd",
    "vmserver.containers.oci.provider",
    "vmserver.service",
)


def serve(listener: socket.socket, life: int) -> list[str]:
    """Fork for each request. Return in each child the arguments for Python; end in the parent with `life`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that keep
    while True:
        readable, _, _ = select.select([listener.fileno(), life], [], [])
        if life in readable:
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
                listener.close()
                return start(connection)


def start(connection: socket.socket) -> list[str]:
    """Fork again: the child is the program; the parent keeps it, and tells how it ends."""
    length, files, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as whole:
        arguments, directory, environment, kept = json.loads(whole.read(int.from_bytes(length, "big")))
    pid = os.fork()
    if pid:
        keep(pid, connection, kept)
    if not kept:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    connection.detach()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    return list(arguments)


def keep(pid: int, connection: socket.socket, kept: bool) -> None:
    """Tell the program's pid, and its status once it has ended; kill it if nobody listens any more."""
    try:
        connection.sendall(b"%d\n" % pid)
        if kept:
            readable, _, _ = select.select([os.pidfd_open(pid), connection.fileno()], [], [])
            if connection.fileno() in readable:
                os.kill(pid, signal.SIGKILL)
            connection.sendall(b"%d\n" % os.waitpid(pid, 0)[1])
    except ConnectionError:
        pass
    finally:
        os._exit(0)


def run(arguments: list[str]) -> None:
    """Do what ``python *arguments`` does, for ``-m MODULE ...`` and ``-c CODE ...``."""
    how, what, *others = arguments
    sys.path[0] = os.getcwd()
    sys.argv = [how, *others]
    if how == "-m":
        for name in (what, f"{what}.__main__"):  # else Python warns that it was imported
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})  # noqa: S102 - as python -c does


def main() -> None:
    """Import, serve, and run what is asked for."""
    for name in IMPORTED:
        importlib.import_module(name)
    if threading.active_count() > 1 or "twisted.internet.reactor" in sys.modules:
        raise SystemExit("what is imported has started a thread or installed a reactor")
    gc.collect()
    gc.freeze()
    run(serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))


if __name__ == "__main__":
    main()
