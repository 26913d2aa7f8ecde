"""Structure: capture a network, find which channels belong together, cut them out. Nothing here knows statistics."""
