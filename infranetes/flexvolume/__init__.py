# SPDX-License-Identifier: Apache-2.0
"""`infranetes-flexvolume`, which kubelet runs for pods' FlexVolumes: it has the daemon do what kubelet asks.

kubelet waits for each run, so what a run does not need is not imported.
"""
