"""What two workers run first."""

from types import SimpleNamespace

import pytest
from support.run_order import SECONDS, TESTS, order_items, scope_of


def test_ranks_come_first_then_the_longest_files():
    longest, *_, shortest = sorted(SECONDS, key=SECONDS.__getitem__, reverse=True)
    names = ["ir/test_mesh.py", shortest, "ranks/test_rows.py", longest, "ranks/test_agreement.py", "ir/test_mesh.py"]
    items = [SimpleNamespace(path=TESTS / name) for name in names]
    order_items(items)
    assert [item.path.relative_to(TESTS).as_posix() for item in items] == [
        "ranks/test_rows.py", "ranks/test_agreement.py", longest, shortest, "ir/test_mesh.py", "ir/test_mesh.py"
    ]  # fmt: skip


def test_all_ranks_are_one_scope():
    files = ("tests/ranks/test_rows.py", "tests/ir/test_mesh.py")
    assert [scope_of(f"{file}::test_it[a::b]") for file in files] == ["ranks", "tests/ir/test_mesh.py"]


@pytest.mark.parametrize("name", SECONDS)
def test_long_files_are_where_the_order_says(name):
    assert (TESTS / name).is_file()
