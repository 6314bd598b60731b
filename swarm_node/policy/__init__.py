"""Models: which there are, how they are loaded and fingerprinted, their dense log-probs, and the memory they take."""
