# SPDX-License-Identifier: Apache-2.0
"""`infranetes-flexvolume`, which kubelet runs for pods' FlexVolumes: it passes the requests to the daemon.

kubelet waits for each run, so a run imports only what it needs.
"""
