"""What tokens cost. Money is an integer of billionths of the currency, so that sums are exact.

Owns prices and the text form of money. It must not know who pays.
"""

from __future__ import annotations

from dataclasses import dataclass

from minserve.config import PricesConfig

NANO = 10**9
_PICO_PER_MILLION = 10**6  # a price of 1 per million tokens is 10**6 trillionths a token


def nano(amount: float) -> int:
    """An amount of the currency in billionths, to the nearest."""
    return round(amount * NANO)


def money(amount: int) -> str:
    """Billionths as text without an exponent: 1500000 -> "0.0015"."""
    sign = "-" if amount < 0 else ""
    whole, part = divmod(abs(amount), NANO)
    return f"{sign}{whole}.{part:09d}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Prices:
    """Per token, in trillionths of the currency (a price of 1 per million tokens is 10**6)."""

    prefill: int = 0
    cached: int = 0
    decode: int = 0
    currency: str = "USD"

    def cost(self, prompt: int, cached: int, completion: int) -> int:
        """Billionths, rounded up, for `prompt` tokens of which `cached` were not computed, and `completion` more."""
        trillionths = (prompt - cached) * self.prefill + cached * self.cached + completion * self.decode
        return -(-trillionths // 1000)

    @property
    def free(self) -> bool:
        return not (self.prefill or self.cached or self.decode)

    @classmethod
    def of(cls, config: PricesConfig, measured: float = 1.0) -> Prices:
        """The configured prices; where one is missing and the device's cost is known, the derived one.

        measured: utilization, where the configuration names none. ValueError if a cached token would cost more than a
        computed one: a reservation would not cover it.
        """
        derived = derive(config, measured)
        prefill = config.prefill if config.prefill is not None else derived[0]
        cached = config.cached if config.cached is not None else prefill
        decode = config.decode if config.decode is not None else derived[1]
        if cached > prefill:
            raise ValueError(f"prices.cached ({cached:g}) is above the price of prefill ({prefill:g})")
        pico = [round(price * _PICO_PER_MILLION) for price in (prefill, cached, decode)]
        return cls(pico[0], pico[1], pico[2], config.currency)


def derive(config: PricesConfig, measured: float = 1.0) -> tuple[float, float]:
    """(prefill, decode) per million tokens from device-hours; 0 for a rate that is not known.

    A token takes 1 / rate seconds of a device that works for a share of the hours it is paid for, `utilization` or what
    was measured; the idle rest is shared out over the tokens that came.
    """
    if config.device_hour is None:
        return 0.0, 0.0
    second = config.device_hour / 3600 / (config.utilization or measured)
    rates = (config.prefill_tokens_per_s, config.decode_tokens_per_s)
    prefill, decode = (0.0 if rate is None else second / rate * 1e6 for rate in rates)
    return prefill, decode
