"""Holds tenants to their limits: requests in flight, tokens queued, and a token rate (tenant_limits.py).

The rate is a bucket that fills with ``tokens_per_second`` up to ``burst`` tokens. Prompt tokens are taken out at
acceptance, output tokens as they come; the bucket may run into debt, and new requests are refused until it is paid off.
So no request is cut short, and over time no tenant exceeds its rate.

Continuations must not be lost to a limit: they pass the queue and rate limits, and may go over ``max_requests`` up to
twice it (a tenant that calls everything a continuation gains no more than that).
"""

from __future__ import annotations

from collections.abc import Iterable

from protos import front
from scheduler_svc.core.door import Refusal
from scheduler_svc.core.sequence import Stream
from scheduler_svc.core.tenant_limits import NO_LIMITS, Limits, LimitsFile

_CHARGE_INTERVAL = 0.05  # seconds between two looks at the outputs of a tenant's running requests
_MAX_DEBTORS = 65536


class _Account:
    """One tenant: its live streams and its bucket. Kept while it has streams or debt."""

    __slots__ = ("at", "charged_at", "credit", "streams")

    def __init__(self, credit: float, now: float) -> None:
        self.streams: set[Stream] = set()
        self.credit = credit
        self.at = now  # the time of `credit`
        self.charged_at = now


class Tenants:
    def __init__(self, file: LimitsFile) -> None:
        self._file = file
        self.unlimited = file == NO_LIMITS
        self._accounts: dict[str, _Account] = {}

    def replace_limits(self, file: LimitsFile) -> None:
        """From now on; what runs goes on. Credit and debt stay, within the new bucket; who had none begins with a full
        one."""
        unrated = [tenant for tenant in self._accounts if not self.limits(tenant).tokens_per_second]
        self._file = file
        self.unlimited = file == NO_LIMITS
        for tenant in unrated:
            account = self._accounts[tenant]
            account.credit = self.limits(tenant).bucket
            for stream in account.streams:
                stream.charged = sum(sequence.num_outputs for sequence in stream.sequences.values())

    def limits(self, tenant: str) -> Limits:
        return self._file.tenants.get(tenant, self._file.default)

    # -- admission ---------------------------------------------------------------------------------------------------

    def check(self, submit: front.Submit, queued: int, replaced: Iterable[Stream], now: float) -> None:
        """Raises Refusal where this request would take its tenant over a limit. ``queued``: tokens that its waiting
        sequences hold; ``replaced``: the live streams that it fences."""
        tenant = submit.tenant
        limits = self.limits(tenant)
        account = self._accounts.get(tenant)
        requests = len(account.streams) if account is not None else 0
        if account is not None:
            requests -= len(account.streams.intersection(replaced))
        most = limits.max_requests * (2 if submit.continuation else 1)
        if limits.max_requests and requests >= most:
            raise Refusal(
                front.RESOURCE_EXHAUSTED,
                f"tenant {tenant!r} has {requests} requests in flight, its limit is {most}",
                "tenant.max_requests", requests, most, retry_after=1.0,
            )  # fmt: skip
        if submit.continuation:
            return
        incoming = len(submit.prompt) // 4 * len(submit.choices)
        if limits.max_queued_tokens and incoming > limits.max_queued_tokens:
            raise Refusal(
                front.INVALID_ARGUMENT,
                f"{incoming} tokens to queue are more than tenant {tenant!r} may ever have: {limits.max_queued_tokens}",
                "prompt", incoming, limits.max_queued_tokens,
            )  # fmt: skip
        if limits.max_queued_tokens and queued + incoming > limits.max_queued_tokens:
            raise Refusal(
                front.RESOURCE_EXHAUSTED,
                f"tenant {tenant!r} has {queued} tokens queued, {incoming} more would exceed its limit of "
                f"{limits.max_queued_tokens}",
                "tenant.max_queued_tokens", queued + incoming, limits.max_queued_tokens, retry_after=1.0,
            )  # fmt: skip
        if limits.tokens_per_second:
            credit = self._credit(tenant, limits, now)
            if credit <= 0.0:
                wait = (1.0 - credit) / limits.tokens_per_second
                raise Refusal(
                    front.RESOURCE_EXHAUSTED,
                    f"tenant {tenant!r} used its {limits.tokens_per_second:g} tokens a second: {wait:.2f} s to wait",
                    "tenant.tokens_per_second", f"{-credit:.0f} tokens ahead", limits.tokens_per_second,
                    retry_after=wait,
                )  # fmt: skip

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def opened(self, stream: Stream, prompt_tokens: int, now: float) -> None:
        account = self._accounts.get(stream.tenant)
        if account is None:
            account = self._accounts[stream.tenant] = _Account(self.limits(stream.tenant).bucket, now)
        account.streams.add(stream)
        if self.unlimited:
            return
        limits = self.limits(stream.tenant)
        if limits.tokens_per_second:
            stream.charged = sum(sequence.num_outputs for sequence in stream.sequences.values())
            self._refill(account, limits, now)
            account.credit -= prompt_tokens

    def closed(self, stream: Stream) -> None:
        """The stream is over, and what it still held is known."""
        account = self._accounts.get(stream.tenant)
        if account is None or stream not in account.streams:
            return
        account.streams.discard(stream)
        if self.unlimited:
            if not account.streams:
                del self._accounts[stream.tenant]
            return
        limits = self.limits(stream.tenant)
        if limits.tokens_per_second:
            _charge(account, (stream,))
        if not account.streams and (not limits.tokens_per_second or len(self._accounts) > _MAX_DEBTORS):
            del self._accounts[stream.tenant]

    def forget_idle(self, now: float) -> None:
        """Drops accounts that are as good as new."""
        for tenant, account in list(self._accounts.items()):
            if not account.streams:
                limits = self.limits(tenant)
                self._refill(account, limits, now)
                if account.credit >= limits.bucket:
                    del self._accounts[tenant]

    def describe(self, queued: dict[str, int], now: float) -> list[dict[str, object]]:
        """For operators: every tenant with something in flight, and those with limits of their own."""
        rows: list[dict[str, object]] = []
        for tenant in sorted({*self._accounts, *self._file.tenants}):
            limits = self.limits(tenant)
            account = self._accounts.get(tenant)
            row: dict[str, object] = {
                "name": tenant,
                "requests": len(account.streams) if account is not None else 0,
                "queued_tokens": queued.get(tenant, 0),
            }
            if limits.max_requests:
                row["max_requests"] = limits.max_requests
            if limits.max_queued_tokens:
                row["max_queued_tokens"] = limits.max_queued_tokens
            if limits.tokens_per_second:
                row["tokens_per_second"] = limits.tokens_per_second
                row["token_credit"] = self._credit(tenant, limits, now)
            rows.append(row)
        return rows

    def live(self) -> set[Stream]:
        """For the invariant checks: every stream that counts against somebody."""
        return {stream for account in self._accounts.values() for stream in account.streams}

    # -- the bucket --------------------------------------------------------------------------------------------------

    def _credit(self, tenant: str, limits: Limits, now: float) -> float:
        account = self._accounts.get(tenant)
        if account is None:
            return limits.bucket
        self._refill(account, limits, now)
        if now - account.charged_at >= _CHARGE_INTERVAL:
            account.charged_at = now
            _charge(account, account.streams)
        return account.credit

    def _refill(self, account: _Account, limits: Limits, now: float) -> None:
        elapsed = max(0.0, now - account.at)
        account.credit = min(limits.bucket, account.credit + elapsed * limits.tokens_per_second)
        account.at = now


def _charge(account: _Account, streams: Iterable[Stream]) -> None:
    for stream in streams:
        outputs = sum(sequence.num_outputs for sequence in stream.sequences.values())
        account.credit -= outputs - stream.charged
        stream.charged = outputs
