"""Numbers for people."""

from __future__ import annotations


def usd(value: float) -> str:
    """ "$1,234"; cents below $10: "$3.20"; "$12.3M" from ten millions on; a minus sign in front: "-$12"."""
    sign = "-" if value < 0 else ""
    value = abs(value)
    return f"{sign}${count(value)}" if value >= 10 else f"{sign}${value:.2f}"


def count(value: float) -> str:
    """ "4,301"; "12.3M" from ten millions on, then "B" and "T"."""
    for least, unit in ((1e13, "T"), (1e10, "B"), (1e7, "M")):
        if value >= least:
            return (
                f"{value / (least / 10):,.3g}{unit}"
                if value < least * 100
                else f"{value / (least / 10):,.0f}{unit}"
            )
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """ "156 s", "24.8 s", "0.25 s", "2 ms", "0 s"; days from 100,000 s on."""
    if value == 0:
        return "0 s"
    if value < 0.1:
        return f"{value * 1e3:.2g} ms"
    if value >= 1e5:
        return f"{value / 86_400:,.3g} days"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def minutes(value: float) -> str:
    """ "30 min", "7.4 h", "2.5 min"."""
    if value >= 120:
        return f"{value / 60:.3g} h"
    return f"{value:.3g} min"


def hours(value: float) -> str:
    """ "3.09 hours", "6,335 hours"."""
    return f"{value:,.0f} hours" if value >= 100 else f"{value:.3g} hours"


def size(num_bytes: float) -> str:
    """Decimal: "840 GB", "1.21 PB", "12.3 MB"."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"


def rate(gb_per_s: float) -> str:
    """ "5 GB/s", "3,328 GB/s"."""
    return f"{gb_per_s:,.0f} GB/s" if gb_per_s >= 100 else f"{gb_per_s:.3g} GB/s"


def percent(share: float) -> str:
    """ "24 %", "0.4 %"."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.095 else f"{100 * share:.2g} %"
