"""A network as a graph of ATen operations: captured, folded, run and written as a module of its own."""
