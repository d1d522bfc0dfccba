# SPDX-License-Identifier: Apache-2.0
"""What the daemon shows of itself over HTTP: metrics for Prometheus, whether it is ready, and a page."""
