# SPDX-License-Identifier: Apache-2.0
"""What the pods of a node share: the inventory, the providers, the logs, the firewalls."""
