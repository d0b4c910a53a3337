"""Tests of graphshard on real gloo process groups, two or four ranks on one machine.

The package exists so that the test modules can share the pool of ranks, the toy models and the parity
check by relative import, and so that their names cannot clash with tests elsewhere.
"""
