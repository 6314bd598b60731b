"""Processes of our own that may die at any time: their supervisor, their frames, and what they are started with."""
