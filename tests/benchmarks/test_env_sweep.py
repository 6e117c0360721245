"""The sweep inside one run beside runs of one env each."""

from benchmarks import env_sweep

TINY = ["envs=3", "steps=3", "batch_size=8", "train_samples=8", "val_samples=8", "slots=1"]
TINY += ["task=cifar_impaired", "data.name=synthetic", "policy.schedule.advance=[1,1,1]"]


def test_both_sides_end_alike_and_are_timed() -> None:
    record = env_sweep.benchmark(TINY, "reward.rent_weight", ["0.1", "3"], turns=1)
    assert {len(own) for own in record["seconds"].values()} == {1}
    assert record["env_steps"] == 9
    assert "a run for each env" in "\n".join(env_sweep.table(record))


def test_a_setting_of_one_env_alone_is_told_from_another() -> None:
    worlds = env_sweep.worlds_of(TINY, "reward.rent_weight", ["0.1", "3"])
    assert [world.settings for world in worlds[env_sweep.SIDES[1]]] == [{}] * 3
    (together,) = worlds[env_sweep.SIDES[0]]
    assert together.settings == {"reward.rent_weight": [0.1, 3.0, 0.1]}
