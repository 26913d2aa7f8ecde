"""Which channels belong together: labels are propagated through the graph and resolved into groups."""
