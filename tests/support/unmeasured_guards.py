"""Dynamo times the guards of each graph it compiles, behind a flush of the processor's caches: not in the tests."""

from torch._dynamo import guards


def leave_guards_unmeasured() -> None:
    """For good: only telemetry reads the time. To flush the caches takes 17 ms, and slows the other processes."""
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
