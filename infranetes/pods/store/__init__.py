# SPDX-License-Identifier: Apache-2.0
"""The records of sandboxes and containers, their states, and the file that holds them."""
