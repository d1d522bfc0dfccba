"""The image that a pod's VM boots: Debian, Docker and the agent, made by mmdebstrap."""
