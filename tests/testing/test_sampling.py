"""Which cases of a grid `make test` runs."""

from itertools import combinations, product

import pytest
from support.sampling import covering


def _grid(**sizes):
    return [dict(zip(sizes, values, strict=True)) for values in product(*map(range, sizes.values()))]


def test_each_value_of_two_arguments_occurs():
    cases = _grid(a=2, b=5)
    kept = [cases[place] for place in covering(cases)]
    assert len(kept) == 5
    assert {case["a"] for case in kept} == {0, 1} and {case["b"] for case in kept} == set(range(5))


@pytest.mark.parametrize("sizes", [(2, 3, 4), (3, 3, 3, 3)])
def test_each_two_values_of_more_arguments_meet(sizes):
    cases = _grid(**{f"argument{place}": size for place, size in enumerate(sizes)})
    kept = [cases[place] for place in covering(cases)]
    for one, other in combinations(cases[0], 2):
        assert {(case[one], case[other]) for case in kept} == {(case[one], case[other]) for case in cases}
    assert len(kept) < len(cases) * 0.6


def test_arguments_given_together_are_one():
    cases = [{"a": place, "b": place, "c": other} for place, other in product(range(3), range(3))]
    assert len(covering(cases)) == 3


def test_one_argument_is_sampled_to_one_case():
    assert covering(_grid(a=4)) == {0}
