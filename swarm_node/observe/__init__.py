"""What a node says of itself, without torch: status, metrics, the step line and the report."""
