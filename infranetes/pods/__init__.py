# SPDX-License-Identifier: Apache-2.0
"""The sandboxes and containers of the node: their states, their store, and all decisions about them."""
