"""Groups sampled by the policy as it is now: the engines behind one interface, and who chooses between them."""
