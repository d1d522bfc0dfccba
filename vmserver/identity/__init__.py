# SPDX-License-Identifier: Apache-2.0
"""The VM's identity: how it is delivered, what it changes in the machine, and the TLS that serves with it."""
