"""The interval between checkpoints that loses the least time."""

from __future__ import annotations

import math


def young_s(wait_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints: sqrt(2 x wait x MTBF).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. The waste
    wait / T + T / (2 MTBF) is least there.
    """
    return math.sqrt(2 * wait_s * mtbf_s)


def daly_s(wait_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints, to a higher order; the MTBF itself if a save takes twice that or more.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), 2006, equation 37: sqrt(2 d M) x (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2M, else M.
    """
    if wait_s >= 2 * mtbf_s:
        return mtbf_s
    share = wait_s / (2 * mtbf_s)
    return young_s(wait_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - wait_s


def best_interval_s(wait_s: float, mtbf_s: float, *, least_s: float = 0.0) -> float:
    """Seconds from the begin of one save to the begin of the next: Daly's work plus the wait itself.

    Args:
        wait_s: what training waits for a save.
        least_s: what a save takes until it is durable: there is no saving faster than that in the background.
    """
    return max(daly_s(wait_s, mtbf_s) + wait_s, least_s)
