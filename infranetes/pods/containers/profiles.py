# SPDX-License-Identifier: Apache-2.0
"""The security profiles of the node that containers name: VMs get their contents."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes.pods.containers import node_files
from infranetes.pods.node import apparmor
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri


@attrs.frozen(eq=False, repr=False)
class SecurityProfiles:
    """The node's profiles of seccomp and AppArmor. :param directory: has those of AppArmor."""

    _reactor: IReactor
    _directory: Path

    async def put_into(self, config: cri.ContainerConfig) -> cri.ContainerConfig:
        """Return the configuration with profiles' contents in place of their names."""
        if (path := node_files.seccomp_path(config)) is not None:
            text = await run_in_thread(self._reactor, node_files.read_seccomp_profile, path)
            config = node_files.with_seccomp_profile(config, text)
        if (name := apparmor.profile_name(config)) is not None:
            text = await run_in_thread(self._reactor, apparmor.find_profile, self._directory, name)
            config = apparmor.with_profile(config, name, text)
        return config
