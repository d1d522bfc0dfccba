# SPDX-License-Identifier: Apache-2.0
"""Following Kubernetes' objects at the API server.

kubeconfig  reads the API server's address and the client's credentials
credentials keeps the access that a kubeconfig gives fresh
api_server  makes requests to the API server
watch       decides what to ask for and what an answer means, without I/O
follow      asks for one kind of objects, again and again
fields      reads objects as checked values
kinds       handles the objects of one kind
cluster     keeps several kinds up to date without keeping the reactor busy
"""
