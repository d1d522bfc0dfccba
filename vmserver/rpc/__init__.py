# SPDX-License-Identifier: Apache-2.0
"""The agent's gRPC service: validates requests and passes them to the provider and the other packages."""
