"""Subset rows: which are evaluated, and how they share what lies before the first slot that
differs.
"""

import numpy as np

from esper_soa.config.nets import SubsetRows
from esper_soa.nets.seeds.subsets import branch_plan, jobs_of, max_rows, subset_codes
from esper_soa.vocabulary import Blend, Blueprint, Stage
from tests.builders.tiny_world import seeds_where


def test_branch_plan_reaches_every_subset_and_shares_prefixes():
    plan, rows = branch_plan((0, 1), (3, 2, 1, 0))
    assert plan[0] == ((0,), (0,))  # one row splits in two
    assert plan[1] == ((0, 1), (0, 1))  # two in four
    assert rows == (3, 2, 1, 0)  # after slot 1 the rows are: none, slot 0, slot 1, both


def test_up_to_four_seeds_every_subset_is_evaluated_once_with_the_full_one_first():
    assert subset_codes((0, 2), ()) == (5, 4, 1, 0)
    assert subset_codes((), ()) == (0,)
    assert len(set(subset_codes((0, 1, 2, 3), ()))) == 16


def test_more_seeds_are_evaluated_left_out_alone_all_off_and_in_pairs():
    codes = subset_codes((0, 1, 2, 3, 4), (1, 2, 3))
    # full, five left out, five alone, none, the fossils 1, 2 and 3 on their own (2 + 4 + 8 = 14),
    # ten pairs
    few = (31, 30, 29, 27, 23, 15, 1, 2, 4, 8, 16, 0, 14)
    assert codes == (*few, 3, 5, 9, 17, 6, 10, 18, 12, 20, 24)
    assert len(codes) == max_rows(5)
    assert subset_codes((0, 1, 2, 3, 4), (1, 2, 3), SubsetRows(pairs=False)) == few


def test_codes_asked_for_are_cut_down_to_the_ablated_seeds_and_evaluated_once():
    rows = SubsetRows(pairs=False, codes=(0, 7, 71, 127))
    # 1 + 2 + 8 + 16 + 64 = 91; 7 without slot 2 is 3, 71 without slot 2 is 67
    codes = subset_codes((0, 1, 3, 4, 6), (), rows)
    assert codes == (91, 90, 89, 83, 75, 27, 1, 2, 8, 16, 64, 0, 3, 67)
    assert subset_codes((0, 1), (), rows) == (3, 2, 1, 0)
    assert max_rows(7, rows) == 2 * 7 + 3 + 4
    assert max_rows(5, SubsetRows(codes=tuple(range(32)))) == 32
    assert max_rows(5, SubsetRows(pairs=False)) == 2**4  # of four seeds every subset


def test_branch_plan_of_left_out_rows_computes_a_seed_only_for_rows_that_have_it():
    # rows: both on, slot 1 off; slot 0 is met first and is on in both
    plan, rows = branch_plan((0, 1), (3, 1))
    assert plan[0] == ((), (0,))
    assert plan[1] == ((0,), (0,))
    assert rows == (1, 0)


def test_envs_are_validated_together_where_the_seeds_and_which_are_fossils_are_the_same():
    stage = np.full((4, 5), Stage.HOLDING)
    stage[1, 1:4] = Stage.FOSSILIZED
    running = np.ones((4, 5), bool)
    running[3, 2:] = False
    seeds = seeds_where(running, stage, Blueprint.NORM, Blend.ADD)
    every = tuple(range(5))
    jobs = jobs_of(seeds, every, SubsetRows(), size=8)
    assert [job.envs.tolist() for job in jobs] == [[0, 2], [1], [3]], "the most work first"
    wanted = [subset_codes(every, ()), subset_codes(every, (1, 2, 3)), subset_codes((0, 1), ())]
    assert [job.codes for job in jobs] == wanted
    assert [job.ablated for job in jobs] == [31, 31, 3]
    alone = [job.envs.tolist() for job in jobs_of(seeds, every, SubsetRows(), size=1)]
    assert sorted(alone) == [[0], [1], [2], [3]]
