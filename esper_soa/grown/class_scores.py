"""Scores by class, as scikit-learn defines them: recall_score, balanced_accuracy_score,
roc_auc_score(multi_class="ovr", average="macro") and confusion_matrix, with a row for a class.
"""

import numpy as np
from scipy.stats import rankdata

MAX_CONFUSED = 100  # classes up to which scores have the confusion matrix


def class_scores(logits: np.ndarray, labels: np.ndarray) -> dict:
    """Scores of logits [B, C] for samples with the labels int64 [B], as JSON has them: None for
    what nothing says. Accuracies in percent; AUC of a class against the rest, 0.5 by chance.
    """
    shares = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    ranks = rankdata(shares / shares.sum(1, keepdims=True), axis=0)  # ties share their places
    confusion = np.zeros((logits.shape[1],) * 2, np.int64)
    np.add.at(confusion, (labels, logits.argmax(1)), 1)
    counts = confusion.sum(1)
    sums = np.array([ranks[labels == code, code].sum() for code in range(len(counts))])
    with np.errstate(invalid="ignore"):
        accuracy = 100 * confusion.diagonal() / counts
        auc = (sums - counts * (counts + 1) / 2) / (counts * (len(labels) - counts))
    return {
        "balanced_accuracy": float(np.nanmean(accuracy)),
        "auc": float(np.nanmean(auc)) if (counts > 0).sum() > 1 else None,
        "accuracy_by_class": plain(accuracy),
        "auc_by_class": plain(auc),
        "confusion": confusion.tolist() if len(counts) <= MAX_CONFUSED else None,
    }


def plain(values: np.ndarray) -> list[float | None]:
    """The numbers as JSON has them, None for NaN."""
    return [None if np.isnan(value) else float(value) for value in values]


def accuracy_by_class(percent: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Mean accuracy float64 [C] of hosts by class, from what they have right of each test sample
    [R, J], percent, NaN where nobody knows; NaN of classes without samples.
    """
    result = np.full(num_classes, np.nan)
    for code in np.unique(labels):
        result[code] = np.nanmean(percent[:, labels == code])
    return result
