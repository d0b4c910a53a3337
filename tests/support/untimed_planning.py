"""Searches for plans are cut off after some seconds of a processor, by default: not in the tests.

A slow or busy machine would find other plans, and the tests of what a plan looks like would fail there.
"""

from graphshard import progress


def plan_without_a_clock() -> None:
    """For good: the limit that counts where none is given (``planning_seconds``) is an hour."""
    progress._LEAST_SECONDS = 3600.0
