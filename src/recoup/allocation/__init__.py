"""How many channels each group keeps: for a budget, or as few as a tolerance allows."""
