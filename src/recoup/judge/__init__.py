"""How far a candidate is from the original, and whether it may pass."""
