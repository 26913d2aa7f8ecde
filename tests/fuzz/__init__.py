"""Random networks under laws: generated from a seed, cut by a method, judged from outside, shrunk where they fail.

`python -m tests.fuzz --help` runs them. Only torch and the standard library are needed.
"""
