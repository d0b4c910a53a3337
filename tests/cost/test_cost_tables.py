"""Measured tables: what is read between, below and above the rows, and what cannot be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.cost.tables import TableRows, load_tables, parse_tables, tables_of
from graphshard.errors import OptionTypeError, TableError

HEADER = "group,op,bytes,seconds\n"
TEXT = HEADER + "shard,all_gather,1000,1e-3\nshard,all_gather,100000,1e-2\nshard,all_gather,200000,2e-2\n"


def test_rows_are_returned_as_measured():
    tables = parse_tables(TEXT, where="t.csv")
    for num_bytes, seconds in ((1000, 1e-3), (100000, 1e-2), (200000, 2e-2)):
        assert tables.seconds("all_gather", num_bytes, "shard", 8) == pytest.approx(seconds)


def test_between_rows_logarithms_are_linear():
    tables = parse_tables(TEXT, where="t.csv")
    assert tables.seconds("all_gather", 10000, "shard", 8) == pytest.approx(10**-2.5)


def test_above_the_last_row_the_last_bandwidth_counts_with_a_warning():
    tables = parse_tables(TEXT, where="t.csv")
    with pytest.warns(
        UserWarning, match=r"t\.csv: all_gather over shard \(8 ranks\).*1000 B to 195.3 KiB.*last two"
    ):
        assert tables.seconds("all_gather", 400000, "shard", 8) == pytest.approx(4e-2)


def test_below_the_first_row_its_latency_counts_with_a_warning():
    tables = parse_tables(TEXT, where="t.csv")
    with pytest.warns(UserWarning, match="below it the first row is used"):
        assert tables.seconds("all_gather", 10, "shard", 8) == 1e-3


def test_one_row_gives_latency_and_bandwidth():
    tables = parse_tables(HEADER + "8,all_reduce,1000,1e-3\n", where="t.csv")
    with pytest.warns(UserWarning):
        assert tables.seconds("all_reduce", 3000, "shard", 8) == pytest.approx(3e-3)
    with pytest.warns(UserWarning):
        assert tables.seconds("all_reduce", 3, "shard", 8) == pytest.approx(1e-3)


def test_a_group_is_named_or_counted_and_the_name_comes_first():
    tables = parse_tables(HEADER + "shard,all_gather,8,1\n4,all_gather,8,2\n", where="t.csv")
    assert tables.seconds("all_gather", 8, "shard", 4) == 1
    assert tables.seconds("all_gather", 8, "other", 4) == 2
    assert tables.seconds("all_gather", 8, "other", 2) is None
    assert tables.seconds("all_reduce", 8, "shard", 4) is None


def test_words_of_torch_and_nccl_and_further_columns(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("seconds, Bytes ,op,group_size,note\n1,8,AllReduce,2,x\n2,8,reduce_scatter_tensor,2,y\n")
    tables = load_tables(path)
    assert tables.seconds("all_reduce", 8, "any", 2) == 1
    assert tables.seconds("reduce_scatter", 8, "any", 2) == 2


@pytest.mark.parametrize(
    ("header", "row"),
    [("group,op,bytes,time", "shard,all_gather,8,1"), ("seconds,op,bytes,group,time", "1,all_gather,8,shard,9")],
)
def test_a_column_time_is_in_seconds_unless_there_is_one_of_seconds(header, row):
    tables = parse_tables(f"{header}\n{row}\n", where="t.csv")
    assert tables.seconds("all_gather", 8, "shard", 2) == 1


def test_rows_of_one_size_are_averaged_and_noise_is_smoothed_out():
    rows = TableRows.of([(8, 3.0), (8, 1.0), (16, 1.0), (32, 4.0)])
    assert rows.rows == ((8, 2.0), (16, 2.0), (32, 4.0))


ROWS = st.lists(st.tuples(st.integers(1, 2**30), st.floats(1e-6, 10)), min_size=1, max_size=8)


@given(rows=ROWS, sizes=st.tuples(st.integers(1, 2**32), st.integers(1, 2**32)))
def test_more_bytes_never_take_less_time(rows, sizes):
    table = TableRows.of(rows)
    less, more = map(table.seconds, sorted(sizes))
    assert 0 < less <= more * (1 + 1e-9)


@pytest.mark.parametrize(
    ("header", "missing"),
    [
        ("group,op,bytes", "missing columns seconds; there are group, op, bytes"),
        ("op,seconds", r"missing columns group \(or group_size\), bytes; there are op, seconds"),
        ("", r"missing columns .*; there are none"),
    ],
)
def test_missing_columns_are_named(header, missing):
    with pytest.raises(TableError, match=rf"t\.csv: {missing}"):
        parse_tables(header + "\n", where="t.csv")


def test_rows_that_cannot_be_read_are_named_by_line():
    text = (
        HEADER
        + "shard,all_gather,8,1\nshard,gossip,8,1\n,all_gather,8,1\nshard,all_gather,eight,1\nshard,all_gather\n"
    )
    text += "shard,all_gather,8,-1\nshard,all_gather,8,nan\nshard,all_gather,0.5,1\n"
    with pytest.raises(TableError) as error:
        parse_tables(text, where="t.csv")
    message = str(error.value)
    for complaint in (
        "t.csv: line 3: op 'gossip' is none of all_gather, ",
        "line 4: group is empty",
        "line 5: bytes 'eight' is not a number",
        "line 6: bytes None is not a number",
        "line 7: seconds must be positive, not -1",
        "line 8: seconds must be positive, not nan",
        "line 9: bytes must be a whole number, not 0.5",
    ):
        assert complaint in message
    assert "line 2" not in message


def test_a_group_size_is_a_number():
    with pytest.raises(TableError, match="line 2: group_size 'shard' is not a whole number"):
        parse_tables("group_size,op,bytes,seconds\nshard,all_gather,8,1\n", where="t.csv")


@pytest.mark.parametrize("size", [0, 1])
def test_a_group_has_two_ranks_or_more(size):
    with pytest.raises(TableError, match=f"line 2: group_size {size} is no group that communicates: it has 2 ranks"):
        parse_tables(f"group_size,op,bytes,seconds\n{size},all_gather,8,1\n", where="t.csv")


def test_torchs_own_names_of_groups_are_digits():
    """In a file that says both, a name is no size."""
    tables = parse_tables(HEADER + "0,all_gather,8,1\n1,all_gather,8,2\n4,all_gather,8,3\n", where="t.csv")
    assert [tables.seconds("all_gather", 8, name, 4) for name in ("0", "1", "4", "shard")] == [1, 2, 3, 3]
    both = "group,group_size,op,bytes,seconds\n4,,all_gather,8,1\n,4,all_gather,8,2\n2,8,all_gather,8,3\n"
    tables = parse_tables(both, where="t.csv")
    assert tables.seconds("all_gather", 8, "4", 16) == 1
    assert tables.seconds("all_gather", 8, "0", 4) == 2
    assert tables.seconds("all_gather", 8, "2", 4) == 3
    assert tables.seconds("all_gather", 8, "shard", 8) is None


def test_a_row_without_a_group():
    with pytest.raises(TableError, match="line 2: group and group_size are empty"):
        parse_tables("group,group_size,op,bytes,seconds\n, ,all_gather,8,1\n", where="t.csv")


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_reduce_coalesced_", "all_reduce"),
        ("all_reduce_", "all_reduce"),
        ("all_gather_into_tensor_out", "all_gather"),
    ],
)
def test_other_forms_of_an_op_count_as_that_op(word, kind):
    tables = parse_tables(HEADER + f"shard,{word},8,1\n", where="t.csv")
    assert tables.seconds(kind, 8, "shard", 2) == 1


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TEXT, encoding="utf-8-sig")
    assert load_tables(path).seconds("all_gather", 1000, "shard", 8) == pytest.approx(1e-3)


@pytest.mark.parametrize("header", ["group,op,bytes,seconds,seconds", "group,op,bytes,time,time"])
def test_columns_that_are_there_twice_are_named(header):
    with pytest.raises(TableError, match=r"t\.csv: more than one column seconds: leave the one"):
        parse_tables(f"{header}\nshard,all_gather,8,1,2\n", where="t.csv")


def test_what_is_no_csv_is_named_by_line():
    with pytest.raises(TableError, match=r"t\.csv: line 2: field larger than field limit"):
        parse_tables(HEADER + "a" * 200_000 + ",all_gather,8,1\n", where="t.csv")


def test_no_rows():
    with pytest.raises(TableError, match=r"t\.csv: no rows"):
        parse_tables(HEADER, where="t.csv")


def test_no_file(tmp_path):
    with pytest.raises(TableError, match=r"gone\.csv' cannot be read: No such file"):
        load_tables(tmp_path / "gone.csv")


def test_a_name_that_no_file_can_have():
    with pytest.raises(TableError, match=r"the table 'a\\x00b' cannot be read: embedded null"):
        load_tables("a\0b")


@pytest.mark.parametrize("tables", [[1], {}, 5], ids=str)
def test_what_is_neither_tables_nor_their_file(tables):
    for read in (load_tables, tables_of):
        with pytest.raises(OptionTypeError) as error:
            read(tables)
        assert f"tables={tables!r} must be the path of a CSV file, or what load_tables returns" in str(error.value)


def test_tables_a_user_may_give(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "shard,all_gather,8,1\n")
    tables = load_tables(path)
    assert tables_of(None) is None
    assert tables_of(tables) is tables
    assert tables_of(str(path)) == tables_of(path) == tables
