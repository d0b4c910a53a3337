"""What a run without the slow tests leaves out."""

from types import SimpleNamespace

import pytest
from support import thorough


@pytest.mark.parametrize(
    ("expression", "number", "drawn"),
    [("not slow and not gpu", 40, 10), ("not slow and not gpu", 8, 3), ("", 40, 40), ("slow", 8, 8)],
)
def test_examples_of_a_run(expression, number, drawn, monkeypatch):
    monkeypatch.setattr(thorough, "_run", {})
    thorough.note_run(SimpleNamespace(option=SimpleNamespace(markexpr=expression)))
    assert thorough.examples(number).max_examples == drawn


@pytest.mark.parametrize(
    ("expression", "number", "kept"), [("not slow", 40, 10), ("not slow", 8, 3), ("not slow", 2, 2), ("", 40, 40)]
)
def test_random_cases_of_a_run(expression, number, kept, monkeypatch):
    monkeypatch.setattr(thorough, "_run", {})
    thorough.note_run(SimpleNamespace(option=SimpleNamespace(markexpr=expression)))
    cases = thorough.drawn(range(number))
    assert len(cases) == kept and cases == sorted(set(cases)) and cases == thorough.drawn(range(number))
