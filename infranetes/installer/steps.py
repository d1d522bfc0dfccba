# SPDX-License-Identifier: Apache-2.0
"""The states of a node, and what leads from each to the one that is wanted.

    Phase       what is true                                                     goes to
    ABSENT      there is no record; nothing of ours is on the node               INSTALLING
    INSTALLING  recorded; any of the files may be there, the daemon may run,     INSTALLED REMOVING
                kubelet may be pointed at it
    INSTALLED   the daemon of `tree` answers, kubelet uses it                    UPGRADING REMOVING
    UPGRADING   as INSTALLED, and the files may be of `tree` or of `previous`,   INSTALLED REMOVING
                whose daemon answered; what they were is in before.json
    REMOVING    any of it may be gone                                            ABSENT

`TABLE` says what is done in each phase for what is wanted. An installer may be killed at any instant: each
step is
recorded before it is taken, and can be taken again. What fails is undone before the failure is told: a first
installation is removed, an upgrade returns to the tree that the node ran, and a kubelet that does not start
is
started as it was.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress

import attrs

from infranetes.installer import kubelets, layout, record
from infranetes.installer.kubelets import Kubelet
from infranetes.installer.node import Files, Programs
from infranetes.installer.record import Phase, Record
from infranetes.installer.trees import Trees
from infranetes.installer.written import Written
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable

STEADY_SECONDS = 10.0
"""How long kubelet has to run without a restart to count as started."""
_START_SECONDS = 120.0
_PAUSE = 1.0


class Wanted(enum.Enum):
    """What a node is to have, seen from the tree in its record."""

    SAME = "the tree that it has"
    OTHER = "another tree"
    ABSENT = "nothing"


class Action(enum.Enum):
    """What is done about it."""

    NOTHING = enum.auto()
    INSTALL = enum.auto()
    KEEP = enum.auto()
    UPGRADE = enum.auto()
    REMOVE = enum.auto()
    REMOVE_AND_INSTALL = enum.auto()


TABLE: Mapping[tuple[Phase, Wanted], Action] = {
    (Phase.ABSENT, Wanted.SAME): Action.INSTALL,
    (Phase.ABSENT, Wanted.OTHER): Action.INSTALL,
    (Phase.ABSENT, Wanted.ABSENT): Action.NOTHING,
    (Phase.INSTALLING, Wanted.SAME): Action.INSTALL,
    (Phase.INSTALLING, Wanted.OTHER): Action.INSTALL,
    (Phase.INSTALLING, Wanted.ABSENT): Action.REMOVE,
    (Phase.INSTALLED, Wanted.SAME): Action.KEEP,
    (Phase.INSTALLED, Wanted.OTHER): Action.UPGRADE,
    (Phase.INSTALLED, Wanted.ABSENT): Action.REMOVE,
    (Phase.UPGRADING, Wanted.SAME): Action.UPGRADE,
    (Phase.UPGRADING, Wanted.OTHER): Action.UPGRADE,
    (Phase.UPGRADING, Wanted.ABSENT): Action.REMOVE,
    (Phase.REMOVING, Wanted.SAME): Action.REMOVE_AND_INSTALL,
    (Phase.REMOVING, Wanted.OTHER): Action.REMOVE_AND_INSTALL,
    (Phase.REMOVING, Wanted.ABSENT): Action.REMOVE,
}


@attrs.frozen
class Options:
    """What is the cluster's to choose.

    :ivar configuration: infranetes.toml, as `layout.configuration` takes it.
    :ivar node: the node's name. :ivar node_ip: its address.
    :ivar metrics_token: by which metrics are asked for; "": none.
    :ivar manage_kubelet: whether kubelet is pointed at the daemon; otherwise somebody else does it.
    :ivar end_pods: whether a removal ends the VMs of pods, instead of waiting for their ends.
    """

    configuration: str
    node: str
    node_ip: str = ""
    metrics_token: str = attrs.field(default="", repr=False)
    cni: bool = False
    csi: bool = False
    manage_kubelet: bool = True
    end_pods: bool = False


class Installer:
    """Brings one node from its state to the one that is wanted. Blocks.

    :param answers: returns once the daemon answers at its socket, or raises after so many seconds.
    :param running_pods: returns how many pods are VMs.
    """

    def __init__(
        self,
        files: Files,
        programs: Programs,
        trees: Trees,
        options: Options,
        answers: Callable[[float], None],
        running_pods: Callable[[], int],
        say: Callable[[str], None],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._files = files
        self._programs = programs
        self._trees = trees
        self._options = options
        self._answers = answers
        self._running_pods = running_pods
        self._say = say
        self._now = now
        self._sleep = sleep
        self._home = files.path(layout.HOME)
        self._written = Written(files)

    def present(self) -> None:
        """Have the node run the tree that the image brings.

        :raise InfranetesError: it does not; says why, and the node is as it was before."""
        found = record.read(self._home)
        wanted = Wanted.SAME if found.tree == self._trees.name else Wanted.OTHER
        match TABLE[found.phase, wanted]:
            case Action.INSTALL:
                self._install(found)
            case Action.KEEP:
                self._keep(found)
            case Action.UPGRADE:
                self._upgrade(found)
            case Action.REMOVE_AND_INSTALL:
                self._remove(found)
                self._install(Record())

    def absent(self) -> None:
        """Have the node as it was before.

        :raise FailedPrecondition: pods are VMs, and their ends are waited for."""
        found = record.read(self._home)
        if TABLE[found.phase, Wanted.ABSENT] is Action.REMOVE:
            self._remove(found)

    # ---- Installing

    def _install(self, recorded: Record) -> None:
        """:param found: of an attempt that did not come to its end, or an empty one."""
        kubelet = kubelets.find(self._programs)
        self._check(kubelet)
        files = self._daemon_files(kubelet)
        pointing = kubelet.files(self._programs) if self._options.manage_kubelet else {}
        self._written.refuse_others([*files, *pointing], recorded.files)
        begun = attrs.evolve(
            recorded,
            phase=Phase.INSTALLING,
            tree=self._trees.name,
            files={**recorded.files, **{path: kind for path, (kind, _) in files.items()}},
            directories=self._written.to_make(files, recorded.directories),
        )
        self._home.mkdir(exist_ok=True)
        self._note(begun)
        with self._undone_by(lambda: self._remove(record.read(self._home))):
            self._bring(files)
            left = _of_daemon(begun, but=files)
            self._written.delete(left)
            self._start_daemon()
            if self._options.manage_kubelet:
                begun = self._point(kubelet, begun)
        kept = {path: kind for path, kind in begun.files.items() if path not in left}
        self._note(attrs.evolve(begun, phase=Phase.INSTALLED, files=kept))
        self._say(f"installed {self._trees.name}")

    def _check(self, kubelet: Kubelet) -> None:
        """:raise FailedPrecondition: the node can't have the daemon as it is."""
        if not self._files.path(kubelet.kind.runtime).exists():
            raise FailedPrecondition(
                f"{kubelet.unit} runs, but its runtime's socket {kubelet.kind.runtime} is not there: the "
                "daemon "
                "stands before containerd, and can't without it"
            )
        shown = self._programs.run("systemctl", "show", "--property=FragmentPath", layout.UNIT)
        fragment = shown.strip().partition("=")[2]
        if fragment not in ("", layout.UNIT_FILE):
            raise FailedPrecondition(
                f"this node has {layout.UNIT} from {fragment}: it was installed as a package; remove that "
                "first, or "
                "leave this node to it"
            )

    def _daemon_files(self, kubelet: Kubelet) -> dict[str, tuple[str, str]]:
        options = self._options
        configured = layout.configuration(options.configuration, kubelet, options.node, options.node_ip)
        token = options.metrics_token
        templates = self._trees.templates()
        return layout.files(templates, self._trees.name, configured, token, cni=options.cni, csi=options.csi)

    def _bring(self, files: Mapping[str, tuple[str, str]]) -> bool:
        """Have the tree, the files and the link; return whether any file was another."""
        self._trees.bring()
        self._trees.bring_guest_image()
        changed = self._written.write({path: text for path, (_, text) in files.items()})
        self._trees.link_current(self._trees.name)
        return changed

    def _start_daemon(self) -> None:
        """Start or restart the daemon, which leaves the VMs running; return when it answers."""
        self._programs.run("systemctl", "daemon-reload")
        self._programs.run("systemctl", "enable", layout.UNIT)
        self._programs.run("systemctl", "reset-failed", layout.UNIT)
        self._programs.run("systemctl", "restart", layout.UNIT)
        self._answers(_START_SECONDS)

    def _point(self, kubelet: Kubelet, begun: Record) -> Record:
        """Point kubelet at the daemon; return the record that says so."""
        wanted = kubelet.files(self._programs)
        self._written.refuse_others({path: ("kubelet", text) for path, text in wanted.items()}, begun.files)
        directories = begun.directories + self._written.to_make(wanted, begun.directories)
        noted = attrs.evolve(
            begun,
            files={**begun.files, **dict.fromkeys(wanted, "kubelet")},
            directories=tuple(dict.fromkeys(directories)),
            unit=kubelet.unit,
        )
        self._note(noted)
        self._written.write(wanted)
        try:
            self._restart_kubelet(kubelet.unit)
        except InfranetesError as error:
            self._unpoint(noted)
            raise Unavailable(
                f"{kubelet.unit} did not start with the daemon's socket, and uses its own again: {error}"
            ) from None
        return noted

    def _restart_kubelet(self, unit: str) -> None:
        self._programs.run("systemctl", "daemon-reload")
        self._programs.run("systemctl", "restart", unit)
        until = self._now() + STEADY_SECONDS
        first = self._restarts(unit)
        while self._now() < until:
            self._sleep(_PAUSE)
            state, restarts = self._restarts(unit)
            if (state, restarts) != ("active", first[1]):
                raise Unavailable(
                    f"it is {state}, and was started {restarts - first[1]} times again; see journalctl "
                    f"--unit {unit}"
                )

    def _restarts(self, unit: str) -> tuple[str, int]:
        shown = self._programs.run("systemctl", "show", "--property=ActiveState,NRestarts", unit)
        values = dict(line.partition("=")[::2] for line in shown.splitlines())
        return values.get("ActiveState", "unknown"), int(values.get("NRestarts") or 0)

    # ---- Keeping and upgrading

    def _keep(self, recorded: Record) -> None:
        """Mend what an administrator or an update of the node has changed, and follow the configuration."""
        self._written.forget_before()
        kubelet = kubelets.find(self._programs)
        files = self._daemon_files(kubelet)
        texts = {path: text for path, (_, text) in files.items()}
        if not self._written.has(texts) or set(files) != set(_of_daemon(recorded)):
            self._upgrade(recorded)
            return
        if self._options.manage_kubelet and not self._written.has(kubelet.files(self._programs)):
            self._say(f"{kubelet.unit} is started otherwise than it was: its drop-in is written anew")
            self._point(kubelet, recorded)
        self._trees.prune({recorded.tree, recorded.previous})

    def _upgrade(self, recorded: Record) -> None:
        kubelet = kubelets.find(self._programs)
        files = self._daemon_files(kubelet)
        ours = {path: kind for path, (kind, _) in files.items()}
        good = recorded.previous if recorded.phase is Phase.UPGRADING else recorded.tree
        self._written.refuse_others(files, recorded.files)
        begun = attrs.evolve(
            recorded,
            phase=Phase.UPGRADING,
            tree=self._trees.name,
            previous=good,
            files={**recorded.files, **ours},
            directories=tuple(
                dict.fromkeys(recorded.directories + self._written.to_make(files, recorded.directories))
            ),
        )
        if recorded.phase is Phase.INSTALLED:
            self._written.forget_before()  # of one that came to its end, and was killed just then
        self._written.save_before(_of_daemon(recorded))
        self._note(begun)
        try:
            self._bring(files)
            left = _of_daemon(begun, but=files)
            self._written.delete(left)
            self._start_daemon()
        except (InfranetesError, OSError) as error:
            self._go_back(begun, good)
            raise Unavailable(
                f"{self._trees.name} does not serve this node, which runs {good} again: {error}"
            ) from None
        kept = {path: kind for path, kind in begun.files.items() if path not in left}
        self._note(
            attrs.evolve(
                begun, phase=Phase.INSTALLED, files=kept, previous="" if good == begun.tree else good
            )
        )
        self._written.forget_before()
        self._trees.prune({begun.tree, good})
        self._say(f"the node runs {begun.tree} in place of {good}")

    def _go_back(self, begun: Record, good: str) -> None:
        before = self._written.before()
        self._written.delete(_of_daemon(begun, but=before))
        self._written.write(before)
        self._trees.link_current(good)
        self._start_daemon()
        kinds = {path: kind for path, kind in begun.files.items() if kind == "kubelet" or path in before}
        self._note(attrs.evolve(begun, phase=Phase.INSTALLED, tree=good, previous="", files=kinds))
        self._written.forget_before()

    # ---- Removing

    def _remove(self, recorded: Record) -> None:
        """Take everything back: kubelet first, so that the node has a runtime all the time."""
        if (
            not self._options.end_pods
            and recorded.phase is not Phase.INSTALLING
            and (count := self._running_pods())
        ):
            raise FailedPrecondition(
                f"{count} pods of this node are VMs, which nothing would find without the daemon: drain "
                "the node; "
                "the removal goes on when they have ended"
            )
        gone = attrs.evolve(recorded, phase=Phase.REMOVING)
        self._note(gone)
        if gone.unit:
            self._unpoint(gone)
        self._end_daemon(gone)
        self._written.delete(_of_daemon(gone))
        self._programs.run("systemctl", "daemon-reload")
        stays = self._trees.remove_state()
        self._trees.remove_all()
        self._written.remove_directories(gone.directories)
        self._written.forget_before()
        (self._home / record.FILE).unlink(missing_ok=True)
        self._home.rmdir()
        self._say("removed; " + (f"{stays} stays: it has persistent volumes" if stays else "nothing stays"))

    def _unpoint(self, recorded: Record) -> None:
        """Have kubelet use the node's own runtime again."""
        self._written.delete([path for path, kind in recorded.files.items() if kind == "kubelet"])
        if self._state_of(recorded.unit)[0] == "loaded":
            self._restart_kubelet(recorded.unit)

    def _end_daemon(self, recorded: Record) -> None:
        """Stop the daemon, and end what outlives it: VMs, bridges, tables of nftables."""
        if self._is_loaded():
            self._programs.run("systemctl", "disable", layout.UNIT)
            self._programs.run("systemctl", "stop", layout.UNIT)
            with suppress(InfranetesError):  # systemd forgets a unit that has no process any more
                self._programs.run("systemctl", "kill", "--kill-whom=all", "--signal=KILL", layout.UNIT)
        for name in dict.fromkeys(each for each in (recorded.tree, recorded.previous) if each):
            if self._trees.is_there(name):
                self._programs.run(
                    f"{layout.tree(name)}/usr/bin/python3", "-I", "-B", "-m", "infranetes.removal",
                )  # fmt: skip
                return

    def _is_loaded(self) -> bool:
        return self._state_of(layout.UNIT)[0] == "loaded"

    def _state_of(self, unit: str) -> tuple[str, str]:
        shown = self._programs.run("systemctl", "show", "--property=LoadState,ActiveState", unit)
        values = dict(line.partition("=")[::2] for line in shown.splitlines())
        return values.get("LoadState", ""), values.get("ActiveState", "")

    # ---- Both

    def _note(self, noted: Record) -> None:
        record.write(self._home, noted)

    @contextmanager
    def _undone_by(self, undo: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except (InfranetesError, OSError) as error:  # such as a full disk
            try:
                undo()
            except (InfranetesError, OSError) as also:
                raise Unavailable(f"{error}; and it could not be undone: {also}") from None
            raise


def _of_daemon(recorded: Record, but: Container[str] = ()) -> list[str]:
    """Return the files of the daemon that a record has, but for some."""
    return [path for path, kind in recorded.files.items() if kind != "kubelet" and path not in but]
