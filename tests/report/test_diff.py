"""``graphshard diff``: what differs between two reports, and nothing else."""

import copy
import json
import re
from dataclasses import replace

import pytest
from support.cost_cards import ROUND_CARD
from support.small_models import MODELS, example_batch

import graphshard
from graphshard.cli.main import main
from graphshard.errors import ReportFileError
from graphshard.report.compare import diff_reports, read_report
from graphshard.report.compare_tables import folded

OPTIONS = {"hardware": ROUND_CARD, "loss": lambda output: output.square().mean()}


@pytest.fixture(scope="module")
def reports():
    """The same model on 2 ranks as one unit, and on 4 ranks as two units with SGD."""
    batch = [example_batch("two_linears")]
    one = graphshard.inspect(MODELS["two_linears"](), batch, mesh={"shard": 2}, **OPTIONS)
    other = graphshard.inspect(
        MODELS["two_linears"](),
        batch,
        mesh={"shard": 4},
        units=["first", "second"],
        optimizer="sgd",
        **OPTIONS,
    )
    return one, other


@pytest.fixture
def files(reports, tmp_path):
    for name, report in zip("ab", reports, strict=True):
        report.to_json(tmp_path / f"{name}.json")
    return tmp_path / "a.json", tmp_path / "b.json"


def test_what_changed_is_listed(reports):
    one, other = reports
    diff = diff_reports(one, other)
    settings = {change.what: (change.before, change.after) for change in diff.settings}
    assert settings == {
        "mesh axis shard": (2, 4),
        "units": ([], ["first", "second"]),
        "optimizer": ("adamw", "sgd"),
    }
    seconds = {change.what: (change.before, change.after) for change in diff.seconds}
    assert seconds["step"] == (one.step_seconds, other.step_seconds)
    assert seconds["optimizer"] == (one.half("optimizer").seconds, other.half("optimizer").seconds)
    memory = {change.what: (change.before, change.after) for change in diff.memory}
    assert memory["peak"] == (one.memory.peak_bytes, other.memory.peak_bytes)
    assert memory["optimizer"] == (one.memory.categories["optimizer"], 0)
    assert "activations" not in memory
    padded = 4 * (6 * 4 + 6 + 4 * 5 + 4)  # of [5, 4], [5], [3, 5] and [3] on 2 ranks
    gathers = {change.what: (change.before, change.after) for change in diff.collectives}
    assert gathers[f"forward all_gather over shard, {padded} bytes"] == (1, None)
    assert any(before is None and after == 1 for before, after in gathers.values())
    exposures = {change.what: (change.before, change.after) for change in diff.exposures}
    assert exposures["forward all_gather of root over shard"][1] is None
    assert exposures["forward all_gather of first over shard"][0] is None
    passes = {change.what: (change.before, change.after) for change in diff.passes}
    assert passes["forward bucket_collectives: collectives left"] == (1, 2)


def test_equal_reports_say_so(files, capsys):
    first, _ = files
    assert diff_reports(first, first).is_empty
    assert main(["diff", str(first), str(first)]) == 0
    assert capsys.readouterr().out == f"{first} and {first} are equal\n"


def test_long_paths_stay_on_their_line(files, capsys):
    folder = files[0].parent / ("long" * 30)
    folder.mkdir()
    first, second = (path.rename(folder / path.name) for path in files)
    assert main(["diff", str(first), str(second)]) == 0
    assert capsys.readouterr().out.startswith(f"from {first} to {second}\n")
    assert main(["diff", str(first), str(first)]) == 0
    assert capsys.readouterr().out == f"{first} and {first} are equal\n"


def test_times_of_stages_do_not_count(reports):
    one, _ = reports
    later = replace(one, stage_seconds={"capture": 1e9})
    assert diff_reports(one, later).is_empty
    assert not diff_reports(one, replace(one, step_seconds=2 * one.step_seconds)).is_empty


def test_tables(files, capsys, tmp_path):
    first, second = files
    assert main(["diff", str(first), str(second), "--json", str(tmp_path / "diff.json")]) == 0
    printed = capsys.readouterr().out
    titles = (
        "Settings",
        "Time",
        "Memory of a rank at its peak",
        "Collectives of a step",
        "Costliest exposures",
    )
    for title in (*titles, "Passes"):
        assert f"\n{title}\n" in printed
    lines = {line.split("  ")[0]: line.split() for line in printed.splitlines()}
    assert lines["mesh axis shard"][-4:] == ["2", "4", "+100.0", "%"]
    assert lines["forward all_gather of root over shard"][-2:] == ["-", "went"]
    assert lines["forward all_gather of first over shard"][-1] == "came"
    assert json.loads((tmp_path / "diff.json").read_text()) == diff_reports(first, second).to_dict()


def test_rows_that_differ_in_one_number_are_folded():
    layers = [(f"forward all_gather of layers.{index} over shard", "1 ms", "2 ms", "+100.0 %") for index in range(4)]
    other = ("forward all_gather of layers.4 over shard", "1 ms", "3 ms", "+200.0 %")
    some = [(f"layers.{index}: of 8", "1", "-", "went") for index in (1, 3, 9)]
    assert folded([*layers, other, *some]) == [
        ("forward all_gather of layers.0..3 over shard (4 rows)", "1 ms", "2 ms", "+100.0 %"),
        other,
        ("layers.1,3,9: of 8 (3 rows)", "1", "-", "went"),
    ]
    two_numbers = [(f"a.{index}.{index}", "1", "2", "") for index in range(3)]
    assert folded(two_numbers) == two_numbers
    assert folded(layers[:2]) == layers[:2] and folded([]) == []


def test_bytes_and_times_have_units(reports, capsys, tmp_path):
    for name, budget in (("a", 2**30), ("b", 3 * 2**30)):
        data = reports[0].to_dict()
        data["settings"]["memory_budget"] = budget
        data["collectives"][0]["num_bytes"] = budget // 1024
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    printed = "\n".join(lines)
    assert re.search(r"memory_budget +1 GiB +3 GiB", printed)
    assert "over shard, 1 MiB " in printed and "over shard, 3 MiB " in printed and "bytes" not in printed


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        ("not json", "is no JSON: Expecting value"),
        ("[]", "has no schema_version: write one with graphshard inspect --json"),
        ('{"schema_version": 99}', "has schema version 99, and this graphshard reads 1"),
        ('{"schema_version": 1}', "is no report of graphshard inspect: it has no halves, memory"),
        (b"\xff\xfe\x00", "cannot be read: it is no text"),
    ],
)
def test_bad_files_are_one_line_and_status_2(content, complaint, files, capsys, tmp_path):
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    for pair in ((files[0], bad), (bad, files[0])):
        assert main(["diff", *map(str, pair)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert printed.err.startswith(f"graphshard diff: report '{bad}' ") and complaint in printed.err


def test_json_into_a_missing_folder(files, capsys):
    assert main(["diff", *map(str, files), "--json", "nowhere/diff.json"]) == 2
    assert "--json nowhere/diff.json: its folder does not exist" in capsys.readouterr().err


def test_data_of_another_version_is_refused(reports):
    data = copy.deepcopy(reports[0].to_dict())
    data["schema_version"] = 0
    with pytest.raises(ReportFileError, match="the report has schema version 0"):
        diff_reports(reports[0], data)


def test_a_report_is_read_back(files, reports):
    assert read_report(files[0]) == reports[0].to_dict()
