"""Every kernel in plain torch: the reference for the others, and what runs where there is neither Triton nor a compiler."""
