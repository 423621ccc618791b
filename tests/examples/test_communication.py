import communication
import pytest
import torch
from benchmark_dlrm import make_config, random_batches
from ranking_model import RankingModel
from sharding import Exchange
from torchrec.distributed.types import ParameterSharding, ShardingPlan

TINY = """--step-ms 20 --bandwidth 1e6 --batch-size 6 --history 6 20 --stream 12 40 --candidates 2 6 --items 50 --features 2 3
    --feature-rows 30 --embedding-dim 16 --num-heads 2 --block-size 16 --num-batches 2 --num-compressed 4""".split()  # noqa: E501


def task(*arguments):
    options = communication.parse_arguments([*TINY, *arguments])
    tables, batches = random_batches(options)
    return options, batches, RankingModel(tables, make_config(options), device=torch.device("meta"))


def test_row_wise_bags_of_a_gpu_are_reduced_and_gathered():
    """Each rank's partial sums go to all others, as in a ring reduce-scatter."""
    options, batches, model = task("--plan", "row_wise")
    plan = communication.make_plan(model, options, 4)
    bags = ShardingPlan({path: plan.plan[path] for path in ("user_bags", "item_bags")})
    assert {how.sharding_type for tables in bags.plan.values() for how in tables.values()} == {
        "row_wise"
    }
    inputs = [communication.features(batches[0])] * 4
    traffic = communication.count_traffic(model, bags, inputs)
    rows = len(batches[0].users.lengths()) + len(batches[0].items.lengths())
    row_bytes = options.embedding_dim * 4
    assert torch.equal(
        traffic.embeddings.sum(dim=1), torch.full((4,), 3.0 * rows * row_bytes, dtype=torch.float64)
    )
    assert torch.equal(traffic.gradients, traffic.embeddings.T)


def test_every_id_of_a_row_wise_table_goes_to_one_rank():
    options, batches, model = task("--plan", "row_wise", "--parts")
    plan = communication.make_plan(model, options, 8)
    ids = batches[0].ids
    own = communication.features(batches[0])
    exchanged = communication._exchanged(
        model, ShardingPlan({"sequences": plan.plan["sequences"]}), own, 8
    )
    # without streams
    sent = [
        len(ids[key].values())
        for key in ("history_item", "history_rating", "history_age", "target_item")
    ]
    assert exchanged.ids.sum() == 8 * sum(sent)
    assert exchanged.embeddings.sum() == options.embedding_dim * 4 * sum(sent)
    assert exchanged.lengths.sum() == 4 * 8 * options.batch_size * len(sent)  # int32, to all ranks


def test_embeddings_in_bf16_are_half_the_bytes():
    _, batches, model = (options, *_) = task("--plan", "column_wise")
    plan = communication.make_plan(model, options, 4)
    inputs = [communication.features(batches[0])] * 4
    exact, bf16 = (
        communication.count_traffic(model, plan, inputs, Exchange(bf16=bf16))
        for bf16 in (False, True)
    )
    halves = exact._replace(embeddings=exact.embeddings / 2, gradients=exact.gradients / 2)
    assert (
        all(torch.equal(x, y) for x, y in zip(bf16, halves, strict=True))
        and exact.embeddings.sum() > 0
    )


def test_unique_ids_are_sent_once():
    """The features of a table have their unique ids together. Bags are sent as they are."""
    _, batches, model = (options, *_) = task("--plan", "row_wise")
    plan = communication.make_plan(model, options, 8)
    ids = batches[0].ids
    own = communication.features(batches[0])
    plan = ShardingPlan({path: plan.plan[path] for path in ("sequences", "user_bags")})
    traffic = communication._exchanged(model, plan, own, 8, Exchange(unique_ids=True))
    tables = [
        [f"{kind}_{name}" for kind in kinds.split()]
        for name, kinds in (
            ("item", "history target stream"),
            ("rating", "history stream"),
            ("age", "history"),
        )
    ]
    unique = sum(
        len(set(torch.cat([ids[key].values() for key in keys]).tolist())) for keys in tables
    )
    bags = batches[0].users
    assert unique < sum(len(ids[key].values()) for keys in tables for key in keys)
    assert traffic.ids.sum() == 8 * (unique + len(bags.values()))


@pytest.mark.parametrize("option", ["--bf16-exchange", "--unique-ids"])
def test_what_only_gpus_exchange_is_refused_elsewhere(option):
    with pytest.raises(
        SystemExit,
        match="communication: --bf16-exchange and --unique-ids need GPUs; the device is cpu",
    ):
        communication.main([*TINY, "--device", "cpu", option])


def test_a_ring_sends_each_byte_twice_but_for_its_own():
    assert communication.all_reduce(8, 4).tolist() == [
        [0, 12, 0, 0],
        [0, 0, 12, 0],
        [0, 0, 0, 12],
        [12, 0, 0, 0],
    ]
    assert communication.all_reduce(8, 1).tolist() == [[0]]


def test_unknown_types_of_sharding_are_refused():
    _, batches, model = task()
    plan = ShardingPlan({"sequences": {"item": ParameterSharding("grid_shard", "fused", [0])}})
    with pytest.raises(
        ValueError,
        match=(
            "plan: sequences.item is grid_shard, not one of .*'column_wise', 'row_wise',"
            " 'table_wise'"
        ),
    ):
        communication.count_traffic(model, plan, [communication.features(batches[0])])


def busiest(**changes):
    return dict.fromkeys(communication.Traffic._fields, 0) | changes


@pytest.mark.parametrize(
    ("bytes_by_kind", "step"),
    [
        ({}, 3),
        (dict(embeddings=10, gradients=10), 3 + 2),  # waited for
        (dict(dense=20), 3),  # as long as the backward
        (dict(dense=25), 3.5),
        (dict(splits=1, lengths=9, ids=20), 3),  # as long as the step
        (dict(splits=1, lengths=9, ids=40), 5),
        (dict(ids=20, dense=20), 4),  # on the same links
        (dict(ids=5, embeddings=10, gradients=20, dense=25), 6.5),
    ],
)
def test_prediction_overlaps_what_the_pipeline_does(bytes_by_kind, step):
    predicted = communication.predict(3, busiest(**bytes_by_kind), bandwidth=10)
    assert predicted.step == pytest.approx(step)
    assert predicted.efficiency == pytest.approx(3 / step)


@pytest.mark.parametrize("name", ["one_rank_step", "bandwidth"])
def test_prediction_needs_positive_numbers(name):
    with pytest.raises(ValueError, match=f"{name} must be positive, not 0"):
        communication.predict(
            **(dict(one_rank_step=1, bandwidth=1) | {name: 0}), bytes_by_kind=busiest()
        )


@pytest.mark.parametrize("plan", ["column_wise", "data_parallel"])
def test_program_prints_a_line_for_each_number_of_ranks(capsys, plan):
    communication.main([*TINY, "--plan", plan, "--world-sizes", "1", "2", "3"])
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "ranks",
        "ids",
        "MB",
        "embeddings",
        "MB",
        "gradients",
        "MB",
        "dense",
        "MB",
        "step",
        "ms",
        "efficiency",
    ]
    one, two, three = ([float(x) for x in line.split()] for line in lines)
    assert one == [1, 0, 0, 0, 0, 20, 1]
    assert (two[0], three[0]) == (2, 3) and two[-1] < 1
    assert (min(two[1:4]) > 0) == (plan == "column_wise") and three[4] > two[4] > 0


def test_program_refuses_an_impossible_plan():
    with pytest.raises(SystemExit, match="communication: table item: .* a multiple of 4, not 6"):
        communication.main([*TINY, "--embedding-dim", "6", "--num-heads", "1"])


@pytest.mark.parametrize(
    ("option", "value"), [("--step-ms", "nan"), ("--bandwidth", "0"), ("--memory-gb", "inf")]
)
def test_an_option_that_is_no_positive_number_ends_with_one_line(option, value, capsys):
    with pytest.raises(SystemExit):
        communication.main([*TINY, option, value])
    assert capsys.readouterr().err.endswith(
        f"error: argument {option}: must be a finite number above 0, not {float(value)}\n"
    )
