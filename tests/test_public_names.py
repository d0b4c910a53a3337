"""The names that users write, frozen. Whoever changes one changes it here too, on purpose, and in docs/changelog.md."""

import argparse
import importlib
import inspect
from dataclasses import fields

import pytest

import graphshard
from graphshard import errors
from graphshard.backend import BackendOptions
from graphshard.cli.main import make_parser
from graphshard.passes import KNOWN

#: All names of the modules that are for users alone.
DOORS = {
    "graphshard": """
        CPUOffloadPolicy FSDPModule FullyShardedDataParallel GraphShardError MixedPrecisionPolicy OffloadPolicy
        UnshardHandle diff_reports formulas fully_shard inspect inspect_graph parallelize patch_torch
        register_fsdp_forward_method schedule_graph share_comm_ctx sweep
    """,
    "graphshard.passes": """
        KNOWN BucketCollectives ExchangeReductions InsertReshards InsertShards JoinPointwise KeepGathered LowerReshards
        LowerShards MergeReshards MergeSums MergeUnshards MergeWaits MoveReshards PlanCollectives PropagateSharding
        RecomputeActivations ScheduleCollectives SpreadParameters TagRecompute
    """,
    "graphshard.testing": "CapturedGraphs CollectiveMismatchError capture_graphs check_golden run_on_all_ranks",
}

#: Names that docs tell users to import from a room; its door has others, for the rooms above it.
FOR_USERS = {
    "graphshard.capture": "CapturedStep ShardingRules capture_step",
    "graphshard.cost": """
        CalibrationJob CollectiveTables CostModel GroupTopology HardwareCard LinkClass ProbeSizes calibrate known_cards
        load_card load_tables mesh_topologies
    """,
    "graphshard.ir": "GraphEmitter is_collective is_fusible is_wait",
    "graphshard.pipeline": "Fact Pass PassContext PassReport Pipeline",
    "graphshard.report": """
        Report Sweep print_summary report_schema report_text size_text sweep_plot sweep_table write_html write_trace
    """,
}

ERRORS = """
    AgreementError AlreadyShardedError BudgetError CalibrationError CaptureError CardError CollectiveMismatchError
    ConflictingCommError ExtensionError FormulaError GraphShardError InfeasibleBudgetError NotRootError OptionError
    OptionTypeError OutgrownBudgetError ParameterStateError PassError PipelineError PlanError PriceError ProblemError
    RefusedError ReportFileError ScheduleOrderError ShardDimError ShardingError StaleOptimizerError TableError
    FlatParameterError StateDictConfigError TrainingStateError
    UnknownGroupError UnnamedMeshError UnpricedGroupError UnsupportedShardingError UntypedGraphError UsageError
"""

PASSES = """
    insert_reshards insert_shards propagate_sharding move_reshards merge_reshards lower_reshards merge_waits
    merge_unshards spread_parameters keep_gathered tag_recompute recompute_activations lower_shards merge_sums
    join_pointwise bucket_collectives schedule_collectives plan_collectives exchange_reductions
"""

BACKEND_OPTIONS = """
    bucket overlap hardware memory_budget limit_all_gathers backward_prefetch forward_prefetch move_compute
    planning_seconds share_code progress verify dump inductor passes
"""

#: Arguments of the public functions; those behind "*" are given by name.
ARGUMENTS = {
    "diff_reports": "before after",
    "formulas": "model args kwargs * dynamic mesh loss progress seed options",
    "fully_shard": """
        module * mesh reshard_after_forward shard_placement_fn mp_policy offload_policy ignored_params dp_mesh_dims
    """,
    "inspect": """
        model args kwargs * mesh hardware tables units loss mp_policy reshard_after_forward optimizer micro_batches
        memory_budget plan checkpoint placements passes progress
    """,
    "inspect_graph": "gm * hardware tables memory_budget groups",
    "parallelize": "module mesh placements * inputs outputs src_data_rank inspect",
    "patch_torch": "",
    "register_fsdp_forward_method": "module method_name",
    "schedule_graph": """
        gm * hardware tables memory_budget groups shared_links buckets prefetch max_gathers max_reductions move_compute
    """,
    "share_comm_ctx": "modules",
    "sweep": "make * meshes batches loss num_processes captures progress options",
}

FSDP_MODULE = """
    unshard reshard reset_iter_state zero_grad set_requires_gradient_sync set_requires_all_reduce
    set_reshard_after_forward
    set_reshard_after_backward set_is_last_backward set_manual_backward_finalization finalize_backward
    set_keep_unsharded_storage set_gradient_divide_factor set_reduce_scatter_divide_factor
    set_force_sum_reduction_for_comms set_modules_to_forward_prefetch set_modules_to_backward_prefetch
    set_custom_all_gather set_custom_reduce_scatter set_all_reduce_hook set_post_optim_event
    set_reduce_scatter_unused_params set_reduce_scatter_max_input_buffers set_separate_reduce_scatter_group
    set_unshard_in_backward set_allocate_memory_from_process_group_for_comm set_symm_mem_for_comm
"""

#: Arguments of the subcommands; all of them have --help and --debug.
_OF_TRAINING = """
    factory --hf --sequence --unit --param-dtype --reduce-dtype --reshard-after-forward --micro-batches
"""
_OF_STEPS = f"""
    {_OF_TRAINING} --hardware --tables --loss --optimizer --memory-budget --placements --plan --checkpoint --mesh
"""
COMMANDS = {
    "inspect": f"{_OF_STEPS} --formulas --batch --html --text --all-blocks --trace --json",
    "sweep": f"{_OF_STEPS} --meshes --batch --processes --captures --csv --json --plot",
    "precompile": f"{_OF_TRAINING} --batch --mesh --out --hardware --option --device --threads --rank",
    "diff": "before after --json",
    "cards": "names --delete",
    "calibrate": "--out --nproc --device --like --quick",
}


@pytest.mark.parametrize("name", DOORS)
def test_names_of_a_module(name):
    assert set(importlib.import_module(name).__all__) == set(DOORS[name].split())


@pytest.mark.parametrize("name", FOR_USERS)
def test_names_that_docs_import_from_a_room(name):
    assert set(FOR_USERS[name].split()) <= set(importlib.import_module(name).__all__)


@pytest.mark.parametrize("name", [*DOORS, *FOR_USERS])
def test_what_a_module_offers_is_there(name):
    module = importlib.import_module(name)
    assert [word for word in module.__all__ if not hasattr(module, word)] == []
    assert len(set(module.__all__)) == len(module.__all__)


def test_errors():
    found = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert found == set(ERRORS.split())


def test_passes():
    assert list(KNOWN) == PASSES.split()


def test_options_of_the_backend():
    assert [each.name for each in fields(BackendOptions)] == BACKEND_OPTIONS.split()


def test_every_public_function_has_its_arguments_here():
    functions = {name for name in graphshard.__all__ if inspect.isfunction(getattr(graphshard, name))}
    assert functions == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_public_function(name):
    by_place, _, by_name = ARGUMENTS[name].partition("*")
    parameters = inspect.signature(getattr(graphshard, name)).parameters.values()
    assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == by_place.split()
    assert [each.name for each in parameters if each.kind is not each.POSITIONAL_OR_KEYWORD] == by_name.split()


def test_methods_of_a_sharded_module():
    found = [name for name in vars(graphshard.FSDPModule) if not name.startswith("_")]
    assert found == FSDP_MODULE.split()


def test_the_command_line():
    parser = make_parser()
    assert parser.prog == "graphshard"
    (words,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found = {
        name: [word for action in command._actions for word in action.option_strings or [action.dest]]
        for name, command in words.choices.items()
    }
    assert found == {name: ["-h", "--help", "--debug", *words.split()] for name, words in COMMANDS.items()}
