# SPDX-License-Identifier: Apache-2.0
"""exec, attach and port-forward as kubelet and crictl speak them: SPDY/3.1 and WebSocket."""
