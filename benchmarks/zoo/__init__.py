"""Which networks can be pruned: whole libraries of architectures, by us and by Torch-Pruning."""
