# SPDX-License-Identifier: Apache-2.0
"""The choice of a size as text for people and as JSON for programs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from infranetes.ctl.tables import Json, age, lines, table
from infranetes_common.wire import control

_NANOS = 1e9
_MIB = 1 << 20


def sizes_json(answer: control.ChooseSizeResponse, options: argparse.Namespace) -> Json:
    """Return one document."""
    return {
        "provider": answer.provider,
        "asked": {"cpu_millis": options.cpu, "memory_bytes": options.memory, "gpus": options.gpus},
        "needed": {
            "cpu_millis": answer.cpu_millis,
            "memory_bytes": answer.memory_bytes,
            "gpus": options.gpus,
            "architecture": answer.architecture,
        },
        "guest_memory": answer.guest_memory,
        "min_memory": answer.min_memory,
        "fitting": [_json(one) for one in answer.fitting],
        "fitting_count": answer.fitting_count,
        "cheaper": [_json(one) for one in answer.cheaper],
        "cheaper_count": answer.cheaper_count,
        "sizes": {"from": answer.offers_from, "at": answer.offers_at / _NANOS or None},
        "prices": {"from": answer.prices_from, "at": answer.prices_at / _NANOS or None},
        "currency": answer.currency,
    }


def _json(one: control.SizeOnOffer) -> Json:
    return {
        "name": one.name,
        "cpu_millis": one.cpu_millis,
        "shared_cpus": one.shared_cpus,
        "memory_bytes": one.memory_bytes,
        "gpus": one.gpus,
        "architecture": one.architecture,
        "price_per_hour": one.price if one.HasField("price") else None,
        "priced_by": one.priced_by,
        "why_not": one.why_not,
    }


def sizes_text(answer: control.ChooseSizeResponse, options: argparse.Namespace) -> str:
    """Return sentences and tables."""
    asked = f"{options.cpu / 1000:g} CPU, {_mib(options.memory)}" + (
        f", {options.gpus} GPUs" if options.gpus else ""
    )
    total = options.memory + answer.guest_memory
    least = f", and no VM has less than {_mib(answer.min_memory)}" if total < answer.min_memory else ""
    head = ("SIZE", "CPU", "MEMORY", "GPUS", f"{answer.currency}/H", "PRICED BY")
    rest = answer.cheaper_count - len(answer.cheaper)
    return lines(
        f"asked: {asked}",
        f"needed: {answer.cpu_millis / 1000:g} CPU, {_mib(answer.memory_bytes)} "
        f"({_mib(answer.guest_memory)} of them the guest's own{least}), {answer.architecture}",
        f"sizes: {_source(answer.offers_from, answer.offers_at)}",
        f"prices: {_source(answer.prices_from, answer.prices_at)}",
        table(head, [_row(one) for one in answer.fitting])
        if answer.fitting
        else "no size fits: ask for less, or allow more sizes",
        f"{answer.fitting_count} fit" if answer.fitting else "",
        "",
        table((*head, "WHY NOT"), [(*_row(one), one.why_not) for one in answer.cheaper])
        if answer.cheaper
        else "",
        f"and {rest} more that cost no more and do not fit" if rest > 0 and answer.cheaper else "",
    )


def _row(one: control.SizeOnOffer) -> Sequence[str]:
    shared = f" of {one.shared_cpus}" if one.shared_cpus else ""
    price = f"{one.price:.4f}" if one.HasField("price") else ""
    cpus, gpus = f"{one.cpu_millis / 1000:g}{shared}", str(one.gpus or "")
    return one.name, cpus, _mib(one.memory_bytes), gpus, price, one.priced_by


def _mib(size: int) -> str:
    return f"{size / (1 << 30):g} GiB" if size >= 1 << 30 else f"{size // _MIB} MiB"


def _source(name: str, at: int) -> str:
    return f"of {name}, {age(at, time.time())} ago" if at else f"of {name}"
