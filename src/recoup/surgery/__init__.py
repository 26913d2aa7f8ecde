"""Cutting: the graph at other sizes, the smaller module, and the proof that it computes the same."""
