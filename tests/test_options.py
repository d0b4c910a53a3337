"""Backend options: defaults, values, and what users are told about mistakes."""

from pathlib import Path

import pytest

from graphshard.errors import GraphShardError, OptionError
from graphshard.options import BackendOptions


@pytest.mark.parametrize("given", [None, {}])
def test_defaults(given):
    assert BackendOptions.parse(given) == BackendOptions()
    assert BackendOptions().bucket == "unit" and BackendOptions().overlap is True
    assert BackendOptions().verify == "cheap" and BackendOptions().dump is None


@pytest.mark.parametrize(
    "given",
    [
        {"bucket": "none"},
        {"overlap": False},
        {"overlap": "always"},
        {"verify": "full"},
        {"verify": "off"},
        {"inductor": {"max_autotune": True}},
    ],
    ids=str,
)
def test_values_arrive(given):
    parsed = BackendOptions.parse(given)
    ((name, value),) = given.items()
    assert getattr(parsed, name) == value
    assert parsed != BackendOptions()


def test_dump_becomes_a_path():
    assert BackendOptions.parse({"dump": "somewhere"}).dump == Path("somewhere")


def test_unknown_options_list_the_known_ones():
    with pytest.raises(
        OptionError, match=r"unknown option.s. 'buckets', 'overlaps'; known: bucket, overlap"
    ) as error:
        BackendOptions.parse({"overlaps": True, "buckets": 1})
    assert "options of Inductor go into 'inductor'" in str(error.value)
    assert isinstance(error.value, ValueError) and isinstance(error.value, GraphShardError)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket": "units"}, "option bucket='units' must be one of 'unit', 'none'"),
        ({"bucket": None}, "option bucket=None must be one of"),
        ({"overlap": "yes"}, "option overlap='yes' must be one of True, False, 'always'"),
        ({"verify": True}, "option verify=True must be one of 'off', 'cheap', 'full'"),
        ({"inductor": "max_autotune"}, "option inductor='max_autotune' must be a dict of Inductor options"),
        ({"inductor": None}, "option inductor=None must be a dict"),
        ({"dump": 3}, "option dump=3 must be"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_values_that_cannot_be(given, message):
    with pytest.raises(OptionError, match=message):
        BackendOptions.parse(given)


def test_the_given_dict_is_not_changed():
    given = {"dump": "somewhere"}
    BackendOptions.parse(given)
    assert given == {"dump": "somewhere"}
