# SPDX-License-Identifier: Apache-2.0
"""Real parts for tests, the demo and the benches: a registry, small images."""
