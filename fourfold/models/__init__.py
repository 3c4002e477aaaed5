"""Loading, splitting and assembling the four models: actor, critic, reference, reward."""
