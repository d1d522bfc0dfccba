# SPDX-License-Identifier: Apache-2.0
"""A node in a directory, and a systemctl that is as unkind as the real one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from infranetes.installer import kubelets, layout
from infranetes.installer.node import Files
from infranetes_common.errors import InfranetesError

KUBELET = """\
[Unit]
Description=kubelet
[Service]
ExecStart=/usr/bin/kubelet
Restart=always
[Install]
WantedBy=multi-user.target
"""
KUBEADM = """\
[Service]
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS \\
  $KUBELET_EXTRA_ARGS
"""
UNIT_PATHS = ("/etc/systemd/system", "/usr/lib/systemd/system")


class Killed(BaseException):
    """Stands for SIGKILL: nothing that runs handles it."""


@attrs.define
class _Unit:
    text: str = ""
    fragment: str = ""
    files: tuple[str, ...] = ()
    active: bool = False
    enabled: bool = False
    restarts: int = 0
    command: str = ""


class FakeSystem:
    """A node's root, with systemd's units as of its last daemon-reload.

    :ivar said: the programs that were run. :ivar broken: units that end as soon as they are started, by a
    word in
        their commands. :ivar fails: called before each program; raises what it fails with.
    :ivar tree: the tree whose daemon runs; "": none.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[tuple[str, ...]] = []
        self.broken: set[str] = set()
        self.fails: Callable[[tuple[str, ...]], None] = lambda words: None
        self.units: dict[str, _Unit] = {}
        self.ended_networks = 0
        for name in ("opt", "etc/systemd/system", "usr/lib/systemd/system", "var/lib", "run/containerd"):
            (root / name).mkdir(parents=True)
        (root / "run/containerd/containerd.sock").touch()
        (root / "usr/lib/systemd/system/kubelet.service").write_text(KUBELET)
        dropped = root / "usr/lib/systemd/system/kubelet.service.d"
        dropped.mkdir()
        (dropped / "10-kubeadm.conf").write_text(KUBEADM)
        self.reload()
        self._start("kubelet.service")

    # ---- What systemd does

    def reload(self) -> None:
        """Read the units' files: what was written since has had no effect."""
        seen: dict[str, _Unit] = {}
        for directory in reversed(UNIT_PATHS):
            for path in (self.root / directory.lstrip("/")).glob("*.service"):
                seen[path.name] = _Unit(
                    path.read_text(), f"{directory}/{path.name}", (f"{directory}/{path.name}",)
                )
        for name, unit in seen.items():
            drops: dict[str, str] = {}
            for directory in reversed(UNIT_PATHS):
                for path in (self.root / directory.lstrip("/") / f"{name}.d").glob("*.conf"):
                    drops[path.name] = f"{directory}/{name}.d/{path.name}"
            unit.files += tuple(drops[each] for each in sorted(drops))
            old = self.units.get(name, _Unit())
            unit.active, unit.restarts, unit.command = old.active, old.restarts, old.command
            wants = self.root / "etc/systemd/system/multi-user.target.wants" / name
            unit.enabled = wants.is_symlink()
        for name, old in self.units.items():
            if name not in seen and old.active:  # its process runs on, without a unit's file
                seen[name] = attrs.evolve(old, text="", fragment="", files=())
        self.units = seen

    def command_of(self, name: str) -> str:
        """Return the command that would start a unit, as of the last reload."""
        found = ""
        for file in self.units[name].files:
            text = re.sub(r"\\\n\s*", " ", (self.root / file.lstrip("/")).read_text())
            for value in re.findall(r"^ExecStart=(.*)$", text, flags=re.M):
                found = value
        return found

    def _start(self, name: str) -> None:
        unit = self.units[name]
        unit.command = self.command_of(name)
        unit.active = not any(word in unit.command for word in self.broken)
        if not unit.active and "Restart=always" in unit.text:
            unit.restarts += 3

    def run(self, *words: str, seconds: float = 0.0) -> str:
        """See `Programs.run`."""
        self.said.append(words)
        self.fails(words)
        if words[0] == "systemctl":
            options = {word for word in words[1:] if word.startswith("-")}
            verb, *names = [word for word in words[1:] if not word.startswith("-")]
            method: Callable[..., str] = getattr(self, f"_do_{verb.replace('-', '_')}")
            return method(*names, **({"options": options} if verb == "show" else {}))
        if words[-1] == "infranetes.removal":
            if not (self.root / words[0].lstrip("/")).exists():
                raise InfranetesError(f"{words[0]}: not found")
            self.ended_networks += 1
            return ""
        raise AssertionError(f"nothing was to run {words}")

    def _do_show(self, name: str, options: set[str]) -> str:
        unit = self.units.get(name)
        values = {
            "LoadState": "loaded" if unit and unit.fragment else "not-found",
            "ActiveState": "active"
            if unit and unit.active
            else "activating"
            if unit and unit.restarts
            else "inactive",
            "NRestarts": str(unit.restarts if unit else 0),
            "FragmentPath": unit.fragment if unit else "",
        }
        (wanted,) = options
        return "".join(f"{each}={values[each]}\n" for each in wanted.partition("=")[2].split(","))

    def _do_cat(self, name: str) -> str:
        return "".join(
            f"# {file}\n{self.root.joinpath(file.lstrip('/')).read_text()}\n"
            for file in self.units[name].files
        )

    def _do_daemon_reload(self) -> str:
        self.reload()
        return ""

    def _known(self, name: str) -> _Unit:
        if name not in self.units:
            raise InfranetesError(f"Failed to act: Unit {name} not loaded.")
        return self.units[name]

    def _do_enable(self, name: str) -> str:
        self._known(name)
        wants = self.root / "etc/systemd/system/multi-user.target.wants"
        wants.mkdir(exist_ok=True)
        if not (wants / name).is_symlink():
            (wants / name).symlink_to(f"/etc/systemd/system/{name}")
        return ""

    def _do_disable(self, name: str) -> str:
        self._known(name)
        wants = self.root / "etc/systemd/system/multi-user.target.wants"
        (wants / name).unlink(missing_ok=True)
        if wants.is_dir() and not any(wants.iterdir()):  # as systemctl does
            wants.rmdir()
        return ""

    def _do_restart(self, name: str) -> str:
        self._known(name)
        if not self.units[name].fragment:
            raise InfranetesError(f"Failed to restart {name}: Unit {name} not found.")
        self.units[name].restarts = 0
        self._start(name)
        return ""

    def _do_stop(self, name: str) -> str:
        self._known(name).active = False
        return ""

    def _do_kill(self, name: str) -> str:
        if not self._known(name).active:  # systemd forgets a unit that has no process any more
            raise InfranetesError(f"Failed to kill unit {name}: Unit {name} not loaded.")
        return ""

    def _do_reset_failed(self, name: str) -> str:
        self._known(name).restarts = 0
        return ""

    # ---- What tests look at

    @property
    def tree(self) -> str:
        """The tree whose daemon runs; "": none."""
        unit = self.units.get(layout.UNIT)
        found = re.search(rf"{layout.HOME}/([^/]+)/", unit.command) if unit and unit.active else None
        return found[1] if found else ""

    def answers(self, seconds: float) -> None:
        """Stands for the daemon at its socket."""
        if not self.tree:
            raise InfranetesError("the daemon does not answer")
        (self.root / "var/lib/infranetes").mkdir(exist_ok=True)
        (self.root / "run/infranetes").mkdir(exist_ok=True)

    @property
    def kubelet_uses_daemon(self) -> bool:
        """Whether the kubelet that runs was started with the daemon's socket."""
        return kubelets.SOCKET in self.units["kubelet.service"].command

    def snapshot(self) -> Mapping[str, object]:
        """Return all that is on the node: files with modes and contents, units, and what runs."""
        found: dict[str, object] = {}
        for directory, directories, names in os.walk(self.root):
            for name in [*directories, *names]:
                path = Path(directory) / name
                content = (
                    os.readlink(path)
                    if path.is_symlink()
                    else path.read_bytes()
                    if path.is_file()
                    else "directory"
                )
                found[str(path.relative_to(self.root))] = (oct(path.lstat().st_mode), content)
        units = {name: (unit.active, unit.command, unit.files) for name, unit in self.units.items()}
        return {**found, "units": units}


def tree(top: Path, name: str) -> Path:
    """Return a tree as an image has it, with little in it."""
    path = top / name
    share = path / "usr/share/infranetes"
    share.mkdir(parents=True)
    repository = Path(__file__).resolve().parents[3]
    for source in ("debian/infranetes.service", "docs/systemd-cni.conf", "docs/systemd-csi.conf"):
        (share / Path(source).name).write_text((repository / source).read_text())
    (path / "usr/bin").mkdir()
    (path / "usr/bin/python3").write_text(name)
    (path / "usr/lib").mkdir()
    (path / "usr/lib/module.py").write_text(f"name = {name!r}\n")
    return path


def files(system: FakeSystem) -> Files:
    """Return the node's files."""
    return Files(system.root)
