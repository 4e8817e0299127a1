"""Rotary position embeddings: which angle per position each pair of dimensions turns by, for every kind of scaling.

Owns the meaning of config.json's rope_theta, rope_scaling and rope_parameters. The rotation itself belongs to the
backends: position p turns pair i by p * inverse[i]; cos and sin are multiplied by `scale`.

Su et al. 2021 (RoFormer) for the embedding; llama3, yarn (Peng et al. 2023) and longrope (Ding et al. 2024) follow
transformers' modeling_rope_utils.py, but in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import CheckpointError
from minserve.models.checked_config import Settings

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rope:
    """inverse: [r / 2], the first r dimensions of a head rotate. context: the longest sequence it is made for."""

    inverse: Float64
    scale: float
    context: int


def read_rope(
    config: Settings, head_dim: int, context: int, max_len: int = 0, *, parameters: Mapping[str, Any] | None = None
) -> Rope:
    """The embedding that a config asks for; CheckpointError for a kind that we don't compute.

    context: max_position_embeddings. max_len: what will be used of it, 0 = all. parameters: instead of the config's
    own, where a family has several.
    """
    p = Settings(rope_parameters(config.values) if parameters is None else parameters)
    fraction = p.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * fraction)
    if not 0 < dim <= head_dim or dim % 2:
        raise CheckpointError(f"config: partial_rotary_factor {fraction} of head_dim {head_dim} is no even number")
    kind = p.get("rope_type") or p.get("type") or "default"
    scaling = SCALINGS.get(kind) if isinstance(kind, str) else None
    if scaling is None:
        raise CheckpointError(f"config: rope_type {kind!r} is not supported, only {', '.join(sorted(SCALINGS))}")
    theta = p.number("rope_theta", config.number("rope_theta", 10000.0))
    if theta <= 1:
        raise CheckpointError(f"config: rope_theta must be more than 1, found {theta}")
    inverse = theta ** (-np.arange(0, dim, 2) / dim)
    trained = "original_max_position_embeddings"
    original = p.integer(trained, config.integer(trained, context))
    return scaling(inverse, Scaling(p, theta, context, original, max_len))


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes rope_parameters; before, rope_scaling stood beside rope_theta (null for no scaling)."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None:
            if not isinstance(value, Mapping):
                raise CheckpointError(f"config: {key} must be an object, found {value!r}")
            return value
    return {}


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a kind of scaling may look at. original: the context length of the pre-training."""

    parameters: Settings
    theta: float
    context: int
    original: int
    max_len: int


def _default(inverse: Float64, s: Scaling) -> Rope:
    return Rope(inverse, 1.0, s.context)


def _linear(inverse: Float64, s: Scaling) -> Rope:
    """Positions are divided by the factor (position interpolation, Chen et al. 2023)."""
    return Rope(inverse / s.parameters.number("factor"), 1.0, s.context)


def _llama3(inverse: Float64, s: Scaling) -> Rope:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones stay, those between are blended."""
    p = s.parameters
    factor, low, high = p.number("factor"), p.number("low_freq_factor"), p.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"config: low_freq_factor {low} must be less than high_freq_factor {high}")
    turns = s.original * inverse / (2 * np.pi)  # rotations within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return Rope((1 - smooth) * inverse / factor + smooth * inverse, 1.0, s.context)


def _yarn(inverse: Float64, s: Scaling) -> Rope:
    """Dimensions that turn often extrapolate, those that turn seldom interpolate, with a ramp between; attention is
    made sharper by `scale`."""
    p, dim = s.parameters, 2 * len(inverse)
    factor = p.number("factor", s.context / s.original)
    fast, slow = p.number("beta_fast", 32.0), p.number("beta_slow", 1.0)

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that turns so often within the original context."""
        return dim * math.log(s.original / (rotations * 2 * math.pi)) / (2 * math.log(s.theta))

    low, high = dimension(fast), dimension(slow)
    if p.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(len(inverse)) - low) / ((high - low) or 0.001), 0, 1)
    blended = inverse / factor * ramp + inverse * (1 - ramp)
    return Rope(blended, _yarn_scale(p, factor), max(s.context, int(s.original * factor)))


def _yarn_scale(p: Settings, factor: float) -> float:
    if p.get("attention_factor") is not None:
        return p.number("attention_factor")
    if p.get("mscale") and p.get("mscale_all_dim"):
        return _mscale(factor, p.number("mscale")) / _mscale(factor, p.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _longrope(inverse: Float64, s: Scaling) -> Rope:
    """One factor per pair, from a search. Which of the two lists holds is settled once, by whether sequences may grow
    beyond the original context: cached keys can't be turned again when one does."""
    p = s.parameters
    used = s.max_len or s.context
    key = "long_factor" if used > s.original else "short_factor"
    factors = p.get(key)
    if not _positive_numbers(factors, len(inverse)):
        raise CheckpointError(f"config: {key} must be a list of {len(inverse)} positive numbers")
    scale = 1.0
    if p.get("attention_factor") is not None:
        scale = p.number("attention_factor")
    elif (factor := p.number("factor", s.context / s.original)) > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(s.original))
    return Rope(inverse / np.array(factors, np.float64), scale, s.context)


def _positive_numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(v) in (int, float) and 0 < v < math.inf for v in values)
    )


SCALINGS: dict[str, Callable[[Float64, Scaling], Rope]] = {
    "default": _default,
    "none": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
