# SPDX-License-Identifier: Apache-2.0
"""Support for tests, the demo and the benches: real servers, simulated clouds, small images, soak tests."""
