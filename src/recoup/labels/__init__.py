"""Channel labels: integer tensors that say which channel every element belongs to, and what ties them."""
