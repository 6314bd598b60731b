"""The network in memory and in virtual time: the intake and admission of the real one over links that a test sets."""
