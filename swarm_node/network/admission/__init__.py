"""What is refused of what peers send, and why: the cheap checks on headers, the full ones on groups."""
