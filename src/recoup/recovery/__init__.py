"""Recovery: refitting the weights that are left so that the network does what it did before."""
