"""Subset rows: which are evaluated, and how they share what lies before the first slot that differs."""

from esper_soa.nets.evaluation import branch_plan, max_rows, subset_codes


def test_branch_plan_reaches_every_subset_and_shares_prefixes():
    plan, rows = branch_plan((0, 1), (3, 2, 1, 0))
    assert plan[0] == ((0,), (0,))  # one row splits in two
    assert plan[1] == ((0, 1), (0, 1))  # two in four
    assert rows == (3, 2, 1, 0)  # after slot 1 the rows are: none, slot 0, slot 1, both


def test_up_to_four_seeds_every_subset_is_evaluated_once_with_the_full_one_first():
    assert subset_codes((0, 2), ()) == (5, 4, 1, 0)
    assert subset_codes((), ()) == (0,)
    assert len(set(subset_codes((0, 1, 2, 3), ()))) == 16


def test_more_seeds_are_evaluated_left_out_alone_and_all_off():
    codes = subset_codes((0, 1, 2, 3, 4), (1, 2))
    # full, five left out, five alone, none, and the fossils 1 and 2 on their own (2 + 4 = 6)
    assert codes == (31, 30, 29, 27, 23, 15, 1, 2, 4, 8, 16, 0, 6)
    assert len(codes) <= max_rows(5)


def test_branch_plan_of_left_out_rows_computes_a_seed_only_for_rows_that_have_it():
    # rows: both on, slot 1 off; slot 0 is met first and is on in both
    plan, rows = branch_plan((0, 1), (3, 1))
    assert plan[0] == ((), (0,))
    assert plan[1] == ((0,), (0,))
    assert rows == (1, 0)
