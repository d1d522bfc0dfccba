# SPDX-License-Identifier: Apache-2.0
"""The time service of a cloud's machine: chrony, as a client alone. Data only, for `cloud_recipe`.

chrony makes the clock run faster or slower, and never sets it, since it would set it back, too. What is far
behind, as after a suspension or with a wrong RTC, would take it half a day for each hour. So a script beside
it has chrony set the clock forward there. The same script hands chrony the time servers that DHCP tells.
Nothing waits for either: where no server answers, the machine's clock is the node's to correct.
"""

from __future__ import annotations

from collections.abc import Mapping

PACKAGES = ("chrony",)
# The package would load its profiles into the kernel of the machine that the disk is made on.
EXCLUDED = ("/etc/apparmor.d/*",)
CONFIGURATION = "etc/infranetes/chrony.conf"
SCRIPT = "usr/lib/infranetes/clock"
UNIT = "infranetes-clock.service"

LINK_LOCAL_AWS = "169.254.169.123"  # source: Amazon EC2 user guide, "Amazon Time Sync Service"
LINK_LOCAL_GCP = "169.254.169.254"  # source: Compute Engine, "Configure NTP": metadata.google.internal
# Source: Azure, "Time sync for Linux VMs": the host's clock, as the driver hv_utils shows it.
AZURE_CLOCK = "/dev/ptp_hyperv"

_TOLD = "/run/infranetes-clock"  # a directory for the time servers that DHCP names
_POLLS = "iburst minpoll 4 maxpoll 6"  # a poll each 16 to 64 s, so that an end of the service is noticed soon

AWS = f"server {LINK_LOCAL_AWS} prefer iburst minpoll 4 maxpoll 4"
GCP = f"server {LINK_LOCAL_GCP} prefer {_POLLS}"
AZURE = f"refclock PHC {AZURE_CLOCK} poll 3 dpoll -2 offset 0 stratum 2"

# No leapsectz: AWS' and Google's servers spread leap seconds over a day. maxdrift: while the agent slews the
# clock, what chrony measures is not a clock's drift. rtcsync also tells the kernel that it is synchronised.
_CONFIGURATION = f"""\
# A client alone: it has no port.
port 0
cmdport 0
sourcedir {_TOLD}
driftfile /var/lib/chrony/chrony.drift
maxupdateskew 100
maxdrift 1000
rtcsync
"""

# In place of Debian's configuration, which asks servers of the internet and may set the clock back.
_SERVICE = f"""\
[Service]
ExecStart=
ExecStart=!/usr/sbin/chronyd -F 1 -f /{CONFIGURATION}
Restart=on-failure
RestartSec=5
"""

# chrony ends without that device, which the kernel may find after the boot.
_WAIT_FOR_AZURE = f"[Unit]\nConditionPathExists={AZURE_CLOCK}\n"
_BEGIN_AT_AZURE = (
    'SUBSYSTEM=="ptp", ATTR{clock_name}=="hyperv", TAG+="systemd", ENV{SYSTEMD_WANTS}+="chrony.service"\n'
)

# The fifth field of chronyc's answer is how many seconds the clock is behind. Looks are frequent only at
# first: one costs an emulated processor a second.
_SCRIPT = f"""\
#!/bin/sh
# Beside chrony, which sets no clock, since it would set it back, too: has it set forward a clock that is a
# second behind or more, and tells it of the time servers that DHCP has.
set -fu
told=
pause=0
while :; do
    servers=
    if [ -r /run/systemd/netif/state ]; then
        while read -r line; do
            case $line in NTP=*) servers=${{line#NTP=}} ;; esac
        done </run/systemd/netif/state
    fi
    if [ "$servers" != "$told" ]; then
        for server in $servers; do
            case $server in *[!0-9.]*) continue ;; esac
            grep -qF " $server " /{CONFIGURATION} || echo "server $server {_POLLS}"
        done | head -n 4 >{_TOLD}/dhcp.sources
        chronyc reload sources >/dev/null && told=$servers
    fi
    IFS=, read -r _ _ _ _ behind _ _ _ _ _ _ _ _ leap <<END
$(chronyc -c tracking)
END
    [ $pause -ge 30 ] || pause=$((pause + 5))
    case $leap in
    Normal | Insert* | Delete*)
        pause=30
        [ "${{behind%%.*}}" -lt 1 ] || chronyc makestep >/dev/null
        ;;
    esac
    sleep $pause
done
"""

_UNIT = f"""\
[Unit]
Description=Set the clock forward where it is far behind, and take DHCP's time servers on
BindsTo=chrony.service
After=chrony.service

[Service]
User=_chrony
RuntimeDirectory=infranetes-clock
ExecStart=/{SCRIPT}
Restart=always
RestartSec=5
CapabilityBoundingSet=
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths=/run/chrony
ProtectHome=yes
PrivateDevices=yes
RestrictAddressFamilies=AF_UNIX

[Install]
WantedBy=chrony.service
"""


def files(clock: str) -> Mapping[str, tuple[int, str]]:
    """Return the files of the service, by path: mode and text.

    :param clock: the cloud's own, in chrony's words; "": it has none but those that DHCP tells.
    """
    service = _SERVICE
    found = {
        CONFIGURATION: (0o644, _CONFIGURATION + (clock + "\n" if clock else "")),
        SCRIPT: (0o755, _SCRIPT),
        f"etc/systemd/system/{UNIT}": (0o644, _UNIT),
    }
    if clock == AZURE:
        service = _WAIT_FOR_AZURE + service
        found["etc/udev/rules.d/90-infranetes-clock.rules"] = (0o644, _BEGIN_AT_AZURE)
    return {**found, "etc/systemd/system/chrony.service.d/infranetes.conf": (0o644, service)}
