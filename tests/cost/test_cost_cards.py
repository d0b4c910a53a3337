"""Cards: the shipped ones are complete and sane, and what is wrong with others is named."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest
from support.cost_cards import ROUND_CARD, round_card, with_rows

from graphshard.cost.card_files import card_of, known_cards, load_card
from graphshard.cost.cards import KERNEL_CLASSES, HardwareCard, LinkClass
from graphshard.cost.curves import Curve
from graphshard.errors import CardError, OptionTypeError

SHIPPED = known_cards()


def _data(name="h100-sxm"):
    return load_card(name).as_dict()


def _saved(tmp_path, data):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    return path


def test_the_known_cards():
    assert SHIPPED == (
        "a100-sxm",
        "b200",
        "cpu-ethernet-10g",
        "cpu-ethernet-1g",
        "cpu-loopback",
        "h100-sxm",
        "h200-sxm",
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_card_loads_under_its_name(name):
    card = load_card(name)
    assert card.name == name
    assert card.summary
    assert {"float32", "float64", "bfloat16", "float16"} <= set(card.peak_flops)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_entry_of_a_shipped_card_has_a_source(name):
    data = _data(name)
    sources = data.pop("sources")
    entries = set(data) - {"name", "summary", "device_type", "efficiency"}
    entries |= {f"efficiency.{kind}" for kind in data["efficiency"]}
    assert entries == set(sources)
    assert all(sources.values())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_card_is_physically_sane(name):
    card = load_card(name)
    assert card.peak_flops["float32"] >= card.peak_flops["float64"]
    near, far = (link.bandwidth * link.efficiency for link in (card.intra_node, card.inter_node))
    assert near >= far
    assert card.intra_node.latency_seconds <= card.inter_node.latency_seconds
    assert 1e-7 < card.kernel_overhead_seconds < 1e-4
    assert 2**30 < card.memory_bytes < 2**40
    for kind in ("matmul", "memory"):
        rows = card.efficiency[kind].rows
        assert len(rows) > 1, f"{kind}: small kernels reach less"
    for link in (card.intra_node, card.inter_node):
        for way in link.protocols:
            assert way.latency_seconds < link.latency_seconds


def test_newer_devices_are_faster():
    a100, h100, h200, b200 = map(load_card, ("a100-sxm", "h100-sxm", "h200-sxm", "b200"))
    for older, newer in ((a100, h100), (h200, b200)):
        assert newer.peak("bfloat16") > 2 * older.peak("bfloat16")
        assert newer.intra_node.bandwidth > older.intra_node.bandwidth
    assert h200.peak_flops == h100.peak_flops
    assert h200.memory_bandwidth > h100.memory_bandwidth


def test_a_card_survives_a_round_trip(tmp_path):
    for card in (ROUND_CARD, *map(load_card, SHIPPED)):
        path = tmp_path / f"{card.name}.json"
        card.save(path)
        assert load_card(path) == card
        assert load_card(str(path)) == card


def test_cards_are_frozen():
    with pytest.raises(FrozenInstanceError):
        ROUND_CARD.name = "other"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(CardError, match=r"no hardware card 'h1000'.*a100-sxm, b200.*No such file"):
        load_card("h1000")


def test_a_folder_is_no_card(tmp_path):
    with pytest.raises(CardError, match="Is a directory"):
        load_card(tmp_path)


def test_a_name_that_no_file_can_have():
    with pytest.raises(CardError, match=r"no hardware card 'a\\x00b'.*cannot be read \(embedded null"):
        load_card("a\0b")


@pytest.mark.parametrize("hardware", [None, {}, 5], ids=str)
def test_what_is_neither_a_card_nor_its_name(hardware):
    for read in (load_card, card_of):
        with pytest.raises(OptionTypeError) as error:
            read(hardware)
        assert f"hardware={hardware!r} must be a card, its name or the path of its file" in str(error.value)
        assert "known names: a100-sxm, b200" in str(error.value)


def test_cards_a_user_may_give(tmp_path):
    ROUND_CARD.save(tmp_path / "mine.json")
    assert card_of(ROUND_CARD) is ROUND_CARD
    assert card_of(tmp_path / "mine.json") == ROUND_CARD
    assert card_of("h100-sxm") == load_card("h100-sxm")


def test_numbers_that_no_float_reaches(tmp_path):
    data = _data()
    data["memory_bytes"] = 10**400
    data["peak_flops"]["bfloat16"] = -(10**400)
    data["efficiency"]["matmul"] = [[10**400, 0.5]]
    data["intra_node"]["measured"] = [["all_gather", 2, 10**400, 1]]
    with pytest.raises(CardError) as error:
        load_card(_saved(tmp_path, data))
    message = str(error.value)
    for complaint in (
        "memory_bytes is too large a number",
        "peak_flops.bfloat16 is too large a number",
        "efficiency.matmul is neither a number nor a list",
        "intra_node.measured[0] is not",
    ):
        assert complaint in message
    with pytest.raises(CardError, match=r"^card 'round': memory_bytes is too large a number$"):
        round_card(memory_bytes=10**400)


def test_numbers_of_thousands_of_digits(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(f'{{"memory_bytes": {"9" * 5000}}}')
    with pytest.raises(CardError, match=r"mine\.json: no JSON: Exceeds the limit"):
        load_card(path)


def test_texts_must_be_texts(tmp_path):
    data = _data() | {"name": 5, "summary": 3, "sources": {"peak_flops": 1}}
    with pytest.raises(CardError) as error:
        load_card(_saved(tmp_path, data))
    message = str(error.value)
    assert "mine.json: name must be a text, not 5" in message
    assert "summary must be a text, not 3" in message
    assert "sources.peak_flops must be a text, not 1" in message
    with pytest.raises(CardError, match=r"sources must say by entry where it comes from, not \[1\]"):
        round_card(sources=[1])
    with pytest.raises(CardError, match="name must be a text, not ''"):
        round_card(name="")


@pytest.mark.parametrize(("text", "complaint"), [("{", "no JSON"), ("[1]", "a JSON object, not list")])
def test_what_is_no_object(tmp_path, text, complaint):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(CardError, match=rf"mine\.json: .*{complaint}"):
        load_card(path)


def test_missing_entries_are_all_named(tmp_path):
    data = _data()
    del data["vector_flops"], data["efficiency"]["gather"], data["inter_node"]["bandwidth"]
    del data["intra_node"]
    with pytest.raises(CardError) as error:
        load_card(_saved(tmp_path, data))
    message = str(error.value)
    assert "mine.json" in message
    for entry in ("vector_flops", "efficiency.gather", "inter_node.bandwidth", "intra_node"):
        assert f"{entry} is missing" in message


def test_entries_of_a_wrong_type_are_named(tmp_path):
    data = _data()
    data["memory_bytes"] = "80GB"
    data["peak_flops"]["bfloat16"] = True
    data["efficiency"]["matmul"] = [[1, 0.5], 3]
    data["inter_node"] = 4
    data["intra_node"]["measured"] = [["all_gather", 2, 1024], ["gossip", 2, 1, 1], ["all_gather", 2, 1, 1, None]]
    with pytest.raises(CardError) as error:
        load_card(_saved(tmp_path, data))
    message = str(error.value)
    for complaint in (
        "memory_bytes is not a number: '80GB'",
        "peak_flops.bfloat16 is not a number: True",
        "efficiency.matmul is neither a number nor a list",
        "inter_node is not an object",
        "intra_node.measured[0] is not [op, ranks, bytes, seconds] or [op, ranks, bytes, seconds, overlapped seconds]",
        "intra_node.measured[1] is not",
        "intra_node.measured[2] is not",
    ):
        assert complaint in message


def test_measured_must_be_a_list(tmp_path):
    data = _data()
    data["intra_node"]["measured"] = 3
    with pytest.raises(CardError, match=r"intra_node\.measured is not a list"):
        load_card(_saved(tmp_path, data))


def test_unknown_entries_are_named(tmp_path):
    data = _data()
    data["vectorflops"] = 1
    data["efficiency"]["sort"] = 1
    data["intra_node"]["speed"] = 1
    data["intra_node"]["protocols"]["ll"]["bandwith"] = 1
    with pytest.raises(CardError) as error:
        load_card(_saved(tmp_path, data))
    message = str(error.value)
    assert "vectorflops is not an entry of a card" in message
    assert f"efficiency.sort is none of {', '.join(KERNEL_CLASSES)}" in message
    assert "intra_node.speed is not an entry of a link" in message
    assert "intra_node.protocols.ll.bandwith is not an entry of a protocol" in message


def test_values_that_make_no_sense_are_all_named(tmp_path):
    data = _data()
    data["memory_bandwidth"] = 0
    data["peak_flops"]["float16"] = -1
    data["ranks_per_node"] = 1.5
    data["efficiency"]["matmul"] = [[10, 0.5], [1, 1.5]]
    data["efficiency"]["vector"] = []
    data["inter_node"]["efficiency"] = 1.01
    data["intra_node"]["protocols"]["ll"]["bandwidth_fraction"] = 2
    data["memory_bytes"] = float("inf")
    sizes = ((0, 8), (1.5, 8), (2, 0.5))
    data["inter_node"]["measured"] = [["all_gather", num_ranks, num_bytes, 1] for num_ranks, num_bytes in sizes]
    data["inter_node"]["measured"] += [["all_gather", 2, 8, 1, seconds] for seconds in (-0.5, 1.5, float("nan"))]
    with pytest.raises(CardError) as error:
        load_card(_saved(tmp_path, data))
    message = str(error.value)
    assert "mine.json" in message
    for complaint in (
        "memory_bandwidth must be positive, not 0",
        "peak_flops.float16 must be positive, not -1",
        "ranks_per_node must be a whole number, not 1.5",
        "efficiency.matmul has sizes that do not rise",
        "efficiency.matmul at 1 must be at most 1, not 1.5",
        "efficiency.vector has no rows",
        "inter_node.efficiency must be at most 1, not 1.01",
        "intra_node.protocols.ll.bandwidth_fraction must be at most 1, not 2",
        "memory_bytes must be positive, not inf",
        "inter_node.measured[0] ranks must be positive, not 0",
        "inter_node.measured[1] ranks must be a whole number, not 1.5",
        "inter_node.measured[2] bytes must be a whole number, not 0.5",
        "inter_node.measured[3] overlapped seconds must be from 0 to its 1 seconds, not -0.5",
        "inter_node.measured[4] overlapped seconds must be from 0 to its 1 seconds, not 1.5",
        "inter_node.measured[5] overlapped seconds must be from 0 to its 1 seconds, not nan",
    ):
        assert complaint in message


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"peak_flops": {}}, "peak_flops is empty"),
        ({"kernel_overhead_seconds": 0.0}, "kernel_overhead_seconds must be positive"),
        ({"kernel_overhead_seconds": 1e-320}, "kernel_overhead_seconds must be at least 1e-30, not "),
        ({"host_bandwidth": float("nan")}, "host_bandwidth must be positive, not nan"),
        ({"memory_bytes": float("nan")}, "memory_bytes must be positive, not nan"),
        ({"ranks_per_node": float("inf")}, "ranks_per_node must be positive, not inf"),
        ({"vector_flops": "x"}, "vector_flops must be a number, not 'x'"),
        ({"vector_flops": None}, "vector_flops must be a number, not None"),
        ({"ranks_per_node": True}, "ranks_per_node must be a number, not True"),
        ({"peak_flops": {"float32": "x"}}, "peak_flops.float32 must be a number, not 'x'"),
        ({"peak_flops": None}, "peak_flops must be numbers by dtype, not None"),
        ({"efficiency": None}, "efficiency must be curves by class of kernels, not None"),
        ({"efficiency": {"matmul": 0.5}}, "efficiency must be curves by class of kernels"),
        ({"intra_node": None}, "intra_node must be a LinkClass, not None"),
        (
            {"inter_node": LinkClass(latency_seconds=1e-6, bandwidth=1.0, efficiency="x")},
            "inter_node.efficiency must be a number, not 'x'",
        ),
        ({"efficiency": {}}, "efficiency.matmul is missing"),
        ({"efficiency": {"matmul": Curve(((0.0, 1.0),))}}, "has a size that is not a positive number"),
        (
            {"inter_node": LinkClass(latency_seconds=-1e-6, bandwidth=1.0, efficiency=1.0)},
            "inter_node.latency_seconds must be positive",
        ),
    ],
)
def test_a_card_made_in_python_is_checked_too(changes, complaint):
    with pytest.raises(CardError, match=rf"card 'round': .*{complaint}"):
        round_card(**changes)


def test_measured_rows_are_read_as_they_were_saved(tmp_path):
    rows = [(8, 1.0, overlapped) for overlapped in (None, 0.0, 0.25, 1.0)]
    card = round_card(intra_node=with_rows(ROUND_CARD.intra_node, "all_gather", 2, *rows))
    card.save(tmp_path / "mine.json")
    assert load_card(tmp_path / "mine.json").intra_node == card.intra_node
    assert [row.overlapped_seconds for row in card.intra_node.measured] == [None, 0.0, 0.25, 1.0]


def test_nothing_lost_to_collectives_is_fine():
    assert round_card(
        comm_compute_seconds_per_byte=0.0,
        overlapped_latency_seconds=0.0,
        collective_spread_seconds=0.0,
    )


def test_a_dtype_without_a_peak_is_named():
    with pytest.raises(
        CardError, match=r"card 'round' has no peak_flops for float16, but for bfloat16, float32"
    ):
        ROUND_CARD.peak("float16")
    assert isinstance(ROUND_CARD, HardwareCard)


def test_a_complex_peak_is_a_quarter_of_that_of_the_parts():
    assert ROUND_CARD.peak("complex64") == ROUND_CARD.peak("float32") / 4
    with pytest.raises(CardError, match="has no peak_flops for float16"):
        ROUND_CARD.peak("complex32")


def test_float8_without_a_rate_is_as_fast_as_bfloat16():
    assert ROUND_CARD.peak("float8_e4m3fn") == ROUND_CARD.peak("float8_e5m2") == ROUND_CARD.peak("bfloat16")
    own = replace(ROUND_CARD, peak_flops={**ROUND_CARD.peak_flops, "float8_e4m3fn": 7e12})
    assert own.peak("float8_e4m3fn") == 7e12


def test_a_curve_is_linear_in_the_logarithm_and_flat_outside():
    curve = Curve(((1e3, 0.2), (1e5, 0.8)))
    assert curve.at(1) == curve.at(0) == curve.at(1e3) == 0.2
    assert curve.at(1e4) == pytest.approx(0.5)
    assert curve.at(1e5) == curve.at(1e9) == 0.8
