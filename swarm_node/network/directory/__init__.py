"""The directory process: addresses of other nodes, kept as signed records in hivemind's DHT."""
