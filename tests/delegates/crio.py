# SPDX-License-Identifier: Apache-2.0
"""CRI-O, as built by `tests/delegates/tools`, with a root of its own; conmon and runc are Debian's."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tests.delegates.programs import built
from tests.harness.tools import need
from tests.infranetes.daemon.case import toml
from tests.interop.critest_images import PAUSE, REGISTRIES
from tests.interop.killable import Killable
from tests.support.registry import Registry


class Crio(Killable):
    """A CRI-O process, with the same network as containerd."""

    name = "cri-o"

    def configured(self, registry: Registry) -> tuple[list[str], Mapping[str, str]]:
        """Write the configuration; return the command line, and additions to its environment."""
        for name in ("net.d", "hooks", "exits", "attach"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "net.d" / "10-conformance.conflist").write_text(json.dumps(self.network()))
        registries = self.root / "registries.conf"
        registries.write_text(
            "\n".join(
                f"[[registry]]\nprefix = {name!r}\nlocation = {registry.host!r}\ninsecure = true"
                for name in (*REGISTRIES, registry.host)
            )
        )
        (self.root / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        path = self.root / "crio.conf"
        path.write_text(toml({"crio": self._tables()}))
        (self.root / "storage.conf").write_text('[storage]\ndriver = "overlay"\n')
        command = [str(built("crio/crio")), "--config", str(path), "--config-dir", ""]
        command += ["--registries-conf", str(registries), "--registries-conf-dir", str(self.root / "hooks")]
        environment = {"CONTAINERS_STORAGE_CONF": str(self.root / "storage.conf")}
        return command, environment

    def _tables(self) -> dict[str, object]:
        at = str(self.root)
        runc = {
            "runtime_path": need("runc"),
            "runtime_root": f"{at}/runc",
            "monitor_path": need("conmon"),
            "monitor_cgroup": "pod",
        }
        return {
            "root": f"{at}/root",
            "runroot": f"{at}/run",
            "storage_driver": "overlay",
            "log_dir": f"{at}/logs",
            "version_file": f"{at}/version",
            "clean_shutdown_file": f"{at}/clean",
            "api": {"listen": str(self.socket), "stream_address": "127.0.0.1", "stream_port": "0"},
            "runtime": {
                "apparmor_profile": "unconfined",
                "allowed_devices": [],
                "cdi_spec_dirs": [],
                "cgroup_manager": "cgroupfs",
                "conmon_cgroup": "pod",
                "container_attach_socket_dir": f"{at}/attach",
                "container_exits_dir": f"{at}/exits",
                "decryption_keys_path": f"{at}/keys",
                "default_runtime": "runc",
                "enable_criu_support": False,
                "enable_pod_events": True,
                "hooks_dir": [f"{at}/hooks"],
                "irqbalance_config_file": f"{at}/irqbalance",
                "irqbalance_config_restore_file": "disable",
                "namespaces_dir": f"{at}/namespaces",
                "pinns_path": str(built("crio/pinns")),
                "runtimes": {"runc": runc},
            },
            "image": {
                "pause_image": f"{REGISTRIES[0]}/{PAUSE[0]}:{PAUSE[1]}",
                "pause_command": "",
                "signature_policy": f"{at}/policy.json",
            },
            "network": {"network_dir": f"{at}/net.d", "plugin_dirs": ["/usr/lib/cni"]},
            "nri": {"enable_nri": False},
        }
