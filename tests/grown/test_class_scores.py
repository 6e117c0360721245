"""Scores by class are those of scikit-learn."""

import numpy as np
import pytest

from esper_soa.grown.class_scores import accuracy_by_class, class_scores

LABELS = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
SHARES = np.array(
    [
        [0.70, 0.20, 0.10],
        [0.41, 0.50, 0.09],
        [0.60, 0.22, 0.18],
        [0.30, 0.29, 0.41],
        [0.21, 0.59, 0.20],
        [0.51, 0.38, 0.11],
        [0.08, 0.12, 0.80],
        [0.42, 0.19, 0.39],
        [0.17, 0.21, 0.62],
        [0.28, 0.65, 0.07],
    ]
)
# by the definitions of sklearn.metrics: recall_score(average=None), roc_auc_score(
# multi_class="ovr", average=None): pairs in order of a class and the rest, confusion_matrix
RECALLS = [50.0, 50.0, 50.0]
AUCS = [20 / 24, 13 / 16, 17 / 24]
CONFUSION = [[2, 1, 1], [1, 1, 0], [1, 1, 2]]


def test_scores_are_those_of_scikit_learn() -> None:
    found = class_scores(np.log(SHARES), LABELS)
    assert found["accuracy_by_class"] == RECALLS
    assert found["balanced_accuracy"] == 50
    assert found["auc_by_class"] == pytest.approx(AUCS)
    assert found["auc"] == pytest.approx(np.mean(AUCS))
    assert found["confusion"] == CONFUSION
    sklearn = pytest.importorskip("sklearn.metrics")
    answers = SHARES.argmax(1)
    assert found["balanced_accuracy"] == 100 * sklearn.balanced_accuracy_score(LABELS, answers)
    auc = sklearn.roc_auc_score(LABELS, SHARES, multi_class="ovr", average=None)
    assert found["auc_by_class"] == pytest.approx(auc)
    assert found["confusion"] == sklearn.confusion_matrix(LABELS, answers).tolist()


def test_two_classes_have_one_auc_and_classes_without_images_none() -> None:
    shares = np.array([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5], [0.2, 0.8], [0.5, 0.5]])
    found = class_scores(np.log(shares), np.array([0, 0, 0, 1, 1]))
    # of 6 pairs four are in order and one is even
    assert found["auc_by_class"] == pytest.approx([4.5 / 6, 4.5 / 6])
    record = class_scores(np.log(SHARES), np.zeros(10, np.int64))
    assert record["accuracy_by_class"] == [40.0, None, None]
    assert record["balanced_accuracy"] == 40
    assert (record["auc"], record["auc_by_class"]) == (None, [None] * 3)
    assert record["confusion"] == [[4, 3, 3], [0, 0, 0], [0, 0, 0]]


def test_accuracy_of_hosts_by_class_leaves_out_what_is_not_known() -> None:
    percent = np.array([[100, 0, 0, np.nan], [100, 100, 0, np.nan]], float)
    found = accuracy_by_class(percent, np.array([0, 0, 2, 2]), 3)
    assert found[[0, 2]].tolist() == [75, 0]
    assert np.isnan(found[1])
