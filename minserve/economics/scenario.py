"""A business that does not exist yet: what users of a planned product would cost.

Owns the scenario file's form and how it becomes costs per user. Requests per user and day follow a log-normal
distribution (a long tail: most call a little, a few call very much), taken at evenly spaced quantiles, so the same file
gives the same numbers every time.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import msgspec
from msgspec import Meta

from minserve.config import Count, LimitConfig, Money, Natural, PricesConfig, Section, Share
from minserve.economics.costs import DAYS
from minserve.economics.prices import NANO, Prices


class CallShape(Section, frozen=True):
    """Tokens of a mean call. cached_share: of system and retrieved tokens, those found in the prefix cache."""

    system_tokens: Natural = 0
    retrieved_tokens: Natural = 0
    user_tokens: Natural = 100
    history_tokens: Natural = 0
    output_tokens: Natural = 250
    cached_share: Share = 0.0

    @property
    def prompt(self) -> int:
        return self.system_tokens + self.retrieved_tokens + self.user_tokens + self.history_tokens

    @property
    def cached(self) -> int:
        return int((self.system_tokens + self.retrieved_tokens) * self.cached_share)


class Users(Section, frozen=True):
    """sigma: the tail. 0: all alike; 1: the dearest 1 % call ten times as often as the median; 1.5: thirty times."""

    count: Count = 1000
    requests_per_day: Annotated[float, Meta(gt=0, le=1e6)] = 5.0  # of the median user
    sigma: Annotated[float, Meta(ge=0, le=5)] = 1.2


class Scenario(Section, frozen=True):
    prices: PricesConfig = PricesConfig()
    call: CallShape = CallShape()
    users: Users = Users()
    limits: tuple[LimitConfig, ...] = ()  # caps per user
    max_prompt: Count = 8192  # the largest call that the server takes
    max_output: Count = 4096
    price_per_user: Money | None = None  # a month

    def costs(self) -> list[float]:
        """Cost of each user in a month, in the currency, before caps; ascending."""
        call, users = self.call, self.users
        cost = Prices.of(self.prices).cost(call.prompt, call.cached, call.output_tokens) / NANO
        normal = NormalDist()
        return [
            cost * DAYS * users.requests_per_day * math.exp(users.sigma * normal.inv_cdf((i + 0.5) / users.count))
            for i in range(users.count)
        ]


def load(path: Path) -> Scenario:
    """ValueError with the file's name and the field at fault."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8-sig")), Scenario)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None
