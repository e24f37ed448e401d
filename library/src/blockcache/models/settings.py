"""What configs of all families have in common, checked with the same sentences. Knows no family and nothing of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from blockcache.errors import ContentError, PolicyError, short, shortened
from blockcache.files import Fields, read
from blockcache.samplers import SamplerConfig


def refuse_unknown(config: type[Any], value: Mapping[str, Any]) -> None:
    """Refuse settings that a config does not have; some of them by name."""
    known = {item.name for item in fields(config)}
    if unknown := sorted(set(value) - known):
        names = shortened(", ".join(unknown), 100)
        raise PolicyError(f"unknown policy settings {names}; known are {', '.join(sorted(known))}")


def check_sizes_of(config: Any, most: Mapping[str, int]) -> None:
    """Refuse settings that are no positive whole numbers, or beyond the largest that each may be."""
    for name, limit in most.items():
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= limit:
            raise PolicyError(
                f"policy setting {name} must be a positive whole number, {limit:,} at most, got {short(value)}"
            )


def check_sampler_and_record(config: Any, record: Fields) -> None:
    """Refuse a sampler that is none, and settings for the record that no file can hold."""
    if not isinstance(config.sampler, SamplerConfig):
        raise PolicyError(f"policy setting sampler must be a sampler's config, got {short(config.sampler)}")
    try:
        read(record, {name: getattr(config, name) for name in record.required})
    except ContentError as error:
        raise PolicyError(f"the policy's settings do not fit: {error}") from error
