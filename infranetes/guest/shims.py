# SPDX-License-Identifier: Apache-2.0
"""containerd shims that wait in the guest for a pod's first containers. Data only, as in `recipe`.

containerd runs a shim for each container. Starting one takes two starts of a program, half a second each on
an emulated processor. So two shims are started before a template is saved, just as containerd starts them:
the agent's prewarming container takes one, and the other is there in each clone. containerd looks for the
program in /usr/local/bin first, where it finds a script that hands out a waiting shim.

A shim that was handed out belongs to its container like any other: nothing is shared, and it ends with it.

Source: containerd's runtime/v2/README.md, on the arguments and the output of `start`.
"""

from __future__ import annotations

DIRECTORY = "/run/infranetes-shims"
SHIM = "/usr/bin/containerd-shim-runc-v2"

# A shim finds in its working directory what containerd puts into a container's bundle. A spare shim is ready
# once `ready` has a file that is named after its process, and contains its address.
_BEGIN = f"""\
#!/bin/sh
# Begins shims that wait for containers; /usr/local/bin/containerd-shim-runc-v2 hands them out.
set -eu
export TTRPC_ADDRESS=/run/containerd/containerd.sock.ttrpc
mkdir -p {DIRECTORY}/ready
for number in 1 2; do
    name="spare-$$-$number"
    mkdir "{DIRECTORY}/$name"
    cd "{DIRECTORY}/$name"
    echo '{{}}' >config.json
    ln -s /dev/null log
    address=$({SHIM} -namespace moby -address /run/containerd/containerd.sock \\
        -publish-binary /usr/bin/containerd -id "$name" start </dev/null)
    printf %s "$address" >told
    for process in /proc/[0-9]*; do
        if tr '\\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q -- " -id $name "; then
            mv told "{DIRECTORY}/ready/${{process#/proc/}}"
            break
        fi
    done
done
"""

_HAND_OUT = f"""\
#!/bin/sh
# containerd runs this in a container's bundle. To `start`, it answers with the address of a shim that waits
# already, where one is left and lives; all else the shim itself does.
for action; do :; done
if [ "$action" = start ]; then
    for spare in {DIRECTORY}/ready/*; do
        if kill -0 "${{spare##*/}}" 2>/dev/null && mv "$spare" address 2>/dev/null; then
            read -r address <address || :
            printf %s "$address"
            exit 0
        fi
    done
fi
exec {SHIM} "$@"
"""

# Containers inherit their shim's limits, so the shims have containerd's own.
_UNIT = f"""\
[Unit]
Description=Shims that wait for containers
After=containerd.service infranetes-warm.service
Requires=containerd.service
Before=vmserver.service

[Service]
Type=oneshot
RemainAfterExit=yes
KillMode=process
RuntimeDirectory={DIRECTORY.removeprefix("/run/")}
RuntimeDirectoryMode=0700
LimitNPROC=infinity
LimitCORE=infinity
LimitNOFILE=infinity
TasksMax=infinity
OOMScoreAdjust=-999
ExecStart=/usr/lib/infranetes/begin-shims
TimeoutStartSec=300

[Install]
WantedBy=multi-user.target
"""

UNIT_NAME = "infranetes-shims.service"

# Files by path: mode and text.
FILES: dict[str, tuple[int, str]] = {
    "usr/lib/infranetes/begin-shims": (0o755, _BEGIN),
    "usr/local/bin/containerd-shim-runc-v2": (0o755, _HAND_OUT),
    f"etc/systemd/system/{UNIT_NAME}": (0o644, _UNIT),
}
