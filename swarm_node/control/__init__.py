"""How many completions a group gets: SAGC and what it learns from, pure arithmetic without torch."""
