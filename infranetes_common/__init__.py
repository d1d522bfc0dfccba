"""What the node daemon and the agent share: messages, errors, identity, configuration, logging."""
