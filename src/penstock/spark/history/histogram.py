"""Histograms of durations that can be added up: percentiles of an hour follow from those of its minutes.

A duration is counted in a bucket whose bounds differ by 2 %, so a percentile is at most 1 % off.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["bucket_of", "percentile_rows"]

_GROWTH: Final = 1.02
_LOG: Final = float(np.log(_GROWTH))


def bucket_of(ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the bucket of each duration; that of 0 is -1."""
    found = np.ceil(np.log(np.maximum(ms, 1)) / _LOG)
    return np.where(ms < 1, -1, found).astype(np.int32)


def _middle(buckets: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Return a duration that is at most 1 % from all of a bucket."""
    return np.where(buckets < 0, 0.0, 2 * np.power(_GROWTH, buckets.astype(float)) / (_GROWTH + 1))


def percentile_rows(
    groups: npt.NDArray[np.int64], buckets: npt.NDArray[np.int32], times: npt.NDArray[np.int64], share: float
) -> npt.NDArray[np.float64]:
    """Return the percentile of each group. The entries are sorted by group and bucket, and ``groups`` says where each
    group starts, with the number of entries at its end."""
    reached = np.cumsum(times)
    before = np.concatenate([[0], reached])[groups[:-1]]
    totals = np.concatenate([[0], reached])[groups[1:]] - before
    ranks = before + np.maximum(np.ceil(share * totals), 1)
    found: npt.NDArray[np.float64] = _middle(buckets)[np.searchsorted(reached, ranks, side="left")]
    return found
