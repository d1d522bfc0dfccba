"""What pods and containers use: gathered from the agents when asked for, told in the CRI's words."""
