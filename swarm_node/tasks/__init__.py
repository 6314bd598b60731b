"""Problems and their verifiers, one file a task: pure functions of (split, seed, index) that every peer computes alike."""
